"""A text, JSON lines or Parquet file becomes one record for each line, or is refused with the line's number."""

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.core.errors import GranularError
from stages.prompts.cleaning import read_source
from stages.prompts.spec import CleanUp, PromptsSpec


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_the_end_of_the_last_line_is_not_a_line(read, end):
    source = read("p.txt", b"a\r\nb" + end)
    assert source.lines == len(source.rows) == 2


def test_only_line_feeds_separate_prompts(read):
    text = "before\u2028middle\u0085after\x0bend"
    assert [row.text for row in read("p.txt", text.encode()).rows] == [text]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"fine\nbad \xff byte\n", "line 2: is not valid UTF-8 .byte 5"),
        ("p.txt", "utf-16".encode("utf-16"), "line 1: is not valid UTF-8"),
        ("p.txt", "utf-16".encode("utf-16-le"), "line 1: holds a NUL"),
        ("p.txt", b"old mac\rline ends", "line 1: holds a carriage return"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2: is not valid JSON"),
        ("p.jsonl", b'{"prompt": "a", "weight": NaN}', "line 1: is not valid JSON .NaN"),
        ("p.jsonl", b'["a"]', "line 1: holds a JSON list"),
        ("p.jsonl", b'{"caption": "a"}', "line 1: has no 'prompt' or 'text' key; its keys are caption"),
        ("p.jsonl", b'{"prompt": 3}', "line 1: 'prompt' is int"),
        ("p.jsonl", b'{"prompt": "half \\ud83d"}', "line 1: holds half of a surrogate pair"),
        ("p.jsonl", b'{"prompt": "a", "note": "half \\ud83d"}', "line 1: has metadata that cannot be kept as JSON"),
        ("p.jsonl", b'{"prompt": "bad \xff byte"}', "line 1: is not valid UTF-8 .byte 17"),
        ("p.csv", b"a", "prompts.source: .*no file ending in .jsonl, .parquet, .txt"),
        ("p.parquet", b"a", "cannot be read as Parquet"),
    ],
)
def test_what_cannot_be_one_prompt_is_refused_with_its_line(read, name, content, message):
    with pytest.raises(GranularError, match=message):
        read(name, content)


def test_the_knob_of_a_missing_file_is_named(tmp_path):
    spec = PromptsSpec(source="p.txt", test_source=str(tmp_path / "absent.txt"))
    with pytest.raises(GranularError, match=r"prompts.test_source: no such file: .*absent.txt"):
        read_source(spec, "test_source")


def test_jsonl_keys_beside_the_prompt_are_metadata(read):
    lines = [
        {"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "red"}], "prompt": "a red cup"},
        {"text": "a cup", "prompt": "a blue cup"},
        {"text": "only a text"},
    ]
    rows = read("p.jsonl", "\n".join(map(json.dumps, lines)).encode()).rows
    assert [row.text for row in rows] == ["a red cup", "a blue cup", "only a text"]
    assert [row.tag for row in rows] == ["colors", "", ""]
    assert [row.metadata for row in rows] == [
        {"tag": "colors", "include": lines[0]["include"]},
        {"text": "a cup"},
        {},
    ]


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_columns_are_named_by_the_spec(tmp_path, name):
    lines = [{"caption": "a cup", "prompt": "not this", "kind": "x"}, {"caption": "two cups", "kind": "y"}]
    if name == "p.jsonl":
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    else:
        pd.DataFrame(lines).to_parquet(tmp_path / name)
    spec = PromptsSpec(source=str(tmp_path / name), text_column="caption", tag_column="kind")
    rows = read_source(spec).rows
    assert [(row.text, row.tag) for row in rows] == [("a cup", "x"), ("two cups", "y")]
    assert rows[0].metadata == {"prompt": "not this", "kind": "x"}
    wrong = PromptsSpec(source=str(tmp_path / name), text_column="captoin")
    with pytest.raises(GranularError, match=r"no (column )?'captoin'"):
        read_source(wrong)


def test_parquet_equals_jsonl(read, tmp_path):
    lines = [{"prompt": "a cup", "tag": "x"}, {"prompt": "two cups", "tag": "y", "count": 2}, {"prompt": " "}]
    pd.DataFrame(lines).astype({"count": "Int64"}).to_parquet(tmp_path / "p.parquet")
    from_jsonl = read("p.jsonl", "\n".join(map(json.dumps, lines)).encode())
    from_parquet = read_source(PromptsSpec(source=str(tmp_path / "p.parquet")))
    assert from_parquet.rows == from_jsonl.rows
    assert from_parquet.dropped == from_jsonl.dropped


def test_a_parquet_file_keeps_dictionaries_nulls_and_bad_bytes_apart_row_by_row(tmp_path):
    texts = pa.array([b"a cup", b"bad \xff", None], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": texts}), tmp_path / "p.parquet")
    spec = PromptsSpec(source=str(tmp_path / "p.parquet"), clean_up=CleanUp(invalid_utf8="drop"))
    source = read_source(spec)
    assert [row.text for row in source.rows] == ["a cup"]
    assert (source.dropped["invalid_utf8"], source.dropped["blank"]) == ([2], [3])
    pq.write_table(pa.table({"prompt": pa.array(["a", "b", "a"]).dictionary_encode()}), tmp_path / "p.parquet")
    assert [row.text for row in read_source(spec).rows] == ["a", "b"]
    pq.write_table(pa.table({"prompt": [1, 2]}), tmp_path / "p.parquet")
    with pytest.raises(GranularError, match="line 1: 'prompt' is int, expected a string"):
        read_source(spec)


def test_a_parquet_file_without_a_prompt_column_is_refused(tmp_path):
    pd.DataFrame({"caption": ["a"]}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(GranularError, match="no column 'prompt' or 'text'; it has caption"):
        read_source(PromptsSpec(source=str(tmp_path / "p.parquet")))


def test_the_labs_file_is_its_grammar():
    from stages.lab.grammar import enumerate_prompts

    lab = Path(__file__).parents[2] / "data" / "lab" / "prompts.jsonl"
    source = read_source(PromptsSpec(source=str(lab)))
    assert [row.text for row in source.rows] == [prompt.text for prompt in enumerate_prompts()]
    assert all(row.tag == row.metadata["tag"] and "include" in row.metadata for row in source.rows)
