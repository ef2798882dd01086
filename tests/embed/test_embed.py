"""Embeddings: each prompt once, bits independent of its neighbours, nothing stale, nothing cut in silence."""

import numpy as np
import pytest

from stages.core.errors import GateError, GranularError
from stages.embed.stage import embed, encoded, encoder_digest
from stages.embed.store import open_embeddings, read_embeddings, write_embeddings


class FakeEncoder:
    """Embeddings that spell the text; remembers the batch sizes it saw."""

    family = "fake"
    length = 6

    def __init__(self):
        self.batches: list[int] = []

    def unconditional(self):
        return {"unconditional_tokens": np.ones((1, self.length, 2), np.float32)}

    def encode(self, texts):
        self.batches.append(len(texts))
        codes = np.zeros((len(texts), self.length, 2), np.float32)
        for row, text in enumerate(texts):
            for place, letter in enumerate(text[: self.length]):
                codes[row, place] = ord(letter), place
        return {"tokens": codes, "pooled": codes.mean(1)}

    def truncated(self, texts):
        return [len(text) > self.length for text in texts]


TEXTS = [f"p{i}" for i in range(70)]


def test_rows_come_back_in_the_order_asked_for_repeats_included(tmp_path):
    ids = [100 + i for i in range(70)]
    embed(FakeEncoder(), ids, TEXTS, "digest", tmp_path)
    asked = [169, 100, 169, 133]
    expected = FakeEncoder().encode([TEXTS[i - 100] for i in asked])
    found = read_embeddings(tmp_path, asked)
    assert found.pop("unconditional_tokens").shape == (1, 6, 2)  # of all prompts, so it has no rows
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
        assert found[name].dtype == np.float32


def test_every_forward_has_the_same_number_of_rows():
    encoder = FakeEncoder()
    rows = list(encoded(encoder, TEXTS, batch=32))
    assert encoder.batches == [32, 32, 32]
    assert [len(batch["pooled"]) for batch in rows] == [32, 32, 6]


def test_cut_prompts_are_named_and_warned_about_once(tmp_path, capsys):
    embed(FakeEncoder(), [4, 9, 11], ["short", "far too long", "also too long"], "digest", tmp_path)
    attrs = open_embeddings(tmp_path).attrs
    assert attrs["truncated"] == [9, 11] and attrs["truncated_count"] == 2 and attrs["text_limit"] == 6
    assert capsys.readouterr().err.count("warning: 2 of 3 prompts are longer") == 1


def test_the_store_names_its_dimensions_and_is_sharded(tmp_path):
    write_embeddings(tmp_path, range(600), [{"e": np.ones((600, 3, 2), np.float32)}], {"family": "fake"})
    array = open_embeddings(tmp_path)["e"]
    assert array.metadata.dimension_names == ("prompt", "token", "channel")
    assert (array.chunks, array.shards) == ((1, 3, 2), (256, 3, 2))
    np.testing.assert_array_equal(array[...], 1)


def test_bytes_do_not_depend_on_how_rows_arrive(tmp_path):
    values = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    stores = []
    for name, size in (("a", 300), ("b", 7)):
        folder = tmp_path / name
        folder.mkdir()
        batches = [{"e": values[i : i + size]} for i in range(0, 300, size)]
        write_embeddings(folder, range(300), batches, {})
        stores.append({p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    assert stores[0] == stores[1]


def test_a_large_row_makes_a_small_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.embed.store.SHARD_BYTES", 64)
    write_embeddings(tmp_path, range(5), [{"e": np.ones((5, 8), np.float32)}], {})
    assert open_embeddings(tmp_path)["e"].shards == (2, 8)


def test_an_unfinished_store_is_refused(tmp_path):
    def broken():
        yield {"e": np.ones((2, 3), np.float32)}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_embeddings(tmp_path, range(4), broken(), {})
    with pytest.raises(GranularError, match="never finished"):
        read_embeddings(tmp_path, [0])


def test_a_prompt_without_embedding_is_one_sentence(tmp_path):
    embed(FakeEncoder(), [0, 1], ["a", "b"], "digest", tmp_path)
    with pytest.raises(GranularError, match=r"no embedding of prompt 7 .1 of 2 are missing"):
        read_embeddings(tmp_path, [1, 7])
    with pytest.raises(GranularError, match="run the embed stage first"):
        read_embeddings(tmp_path / "elsewhere", [0])


def test_a_non_finite_embedding_stops_the_stage(tmp_path):
    class Broken(FakeEncoder):
        def encode(self, texts):
            arrays = super().encode(texts)
            arrays["pooled"][1] = np.nan
            return arrays

    with pytest.raises(GateError, match="pooled is not finite for prompt 'b'"):
        embed(Broken(), [0, 1], ["a", "b"], "digest", tmp_path)


def test_the_encoder_digest_covers_text_parts_only(tmp_path):
    for name in ("text_encoder", "tokenizer_2", "transformer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"a": 1}')
    before = encoder_digest(tmp_path)
    (tmp_path / "transformer/config.json").write_text('{"a": 2}')
    assert encoder_digest(tmp_path) == before
    (tmp_path / "tokenizer_2/config.json").write_text('{"a": 2}')
    assert encoder_digest(tmp_path) != before


def test_the_stage_equals_the_encoder_and_rows_do_not_depend_on_their_batch(tiny_base, tmp_path):
    from stages.embed.stage import run
    from stages.policies.flux import FluxTextEncoder
    from stages.policies.spec import PolicySpec
    from stages.prompts.spec import PromptsSpec
    from stages.prompts.stage import read_prompts
    from stages.prompts.stage import run as prompts

    texts = [
        "a photo of a circle",
        "a photo of a red square",
        "a photo of two triangles",
        "a photo of a " + "red " * 20,
    ]
    (tmp_path / "p.txt").write_text("\n".join(texts))
    for name in ("prompts", "embeddings"):
        (tmp_path / name).mkdir()
    prompts(PromptsSpec(source=str(tmp_path / "p.txt"), test=1, validation=1), tmp_path / "prompts")
    spec = PolicySpec(base=str(tiny_base))
    run(spec, tiny_base, tmp_path / "prompts", tmp_path / "embeddings")
    kept = read_prompts(tmp_path / "prompts")["text"].tolist()
    found = read_embeddings(tmp_path / "embeddings", range(4))
    encoder = FluxTextEncoder(spec, tiny_base)
    alone = [next(encoded(encoder, [text])) for text in kept]
    for name in ("prompt_embeds", "pooled_prompt_embeds"):
        np.testing.assert_array_equal(found[name], np.concatenate([arrays[name] for arrays in alone]))
    assert open_embeddings(tmp_path / "embeddings").attrs["truncated"] == [3]
