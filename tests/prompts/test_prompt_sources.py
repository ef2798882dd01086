"""Every line of a prompt file becomes one row, a counted drop, or a refusal that names the line."""

import json
from pathlib import Path

import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.prompts.sources import read_source

PUBLIC = Path(__file__).resolve().parents[2].parent / "shared" / "prompts"


def read(path: Path, content: bytes, max_chars: int = 2000):
    path.write_bytes(content)
    return read_source(str(path), max_chars)


def test_every_line_is_kept_or_counted(tmp_path):
    lines = ["a cat", "", "  a dog \t", "a cat", "A CAT", "x" * 51, 'ein "Hündchen" 🐶', "one\ttwo", "   "]
    source = read(tmp_path / "p.txt", ("\ufeff" + "\r\n".join(lines)).encode(), max_chars=50)
    assert [row.text for row in source.rows] == ["a cat", "a dog", "A CAT", 'ein "Hündchen" 🐶', "one\ttwo"]
    assert [row.line for row in source.rows] == [1, 3, 5, 7, 8]
    assert source.dropped == {"blank": [2, 9], "duplicates": [4], "over_long": [6]}
    assert source.noted == {
        **{"bom": 1, "crlf": 8, "stripped": 1, "tabs": 1, "non_ascii": 1},
        **{"case_only": 1, "same_text": 0},
    }
    assert source.lines == len(source.rows) + sum(map(len, source.dropped.values())) == len(lines)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_the_end_of_the_last_line_is_not_a_line(tmp_path, end):
    source = read(tmp_path / "p.txt", b"a\r\nb" + end)
    assert source.lines == len(source.rows) == 2


def test_only_line_feeds_separate_prompts(tmp_path):
    text = "before\u2028middle\u0085after\x0bend"
    assert [row.text for row in read(tmp_path / "p.txt", text.encode()).rows] == [text]


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
        ("p.csv", b"a", "no file ending in .jsonl, .parquet, .txt"),
    ],
)
def test_what_cannot_be_one_prompt_is_refused_with_its_line(tmp_path, name, content, message):
    with pytest.raises(GranularError, match=message):
        read(tmp_path / name, content)


def test_jsonl_keys_beside_the_prompt_are_metadata(tmp_path):
    lines = [
        {"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "red"}], "prompt": "a red cup"},
        {"text": "a cup", "prompt": "a blue cup"},
        {"text": "only a text"},
    ]
    rows = read(tmp_path / "p.jsonl", "\n".join(map(json.dumps, lines)).encode()).rows
    assert [row.text for row in rows] == ["a red cup", "a blue cup", "only a text"]
    assert [row.tag for row in rows] == ["colors", "", ""]
    assert [row.metadata for row in rows] == [
        {"tag": "colors", "include": lines[0]["include"]},
        {"text": "a cup"},
        {},
    ]


def test_one_text_with_other_metadata_is_another_row(tmp_path):
    lines = b'{"prompt":"a","n":1}\n{"n":1,"prompt":"a"}\n{"prompt":"a","n":2}'
    source = read(tmp_path / "p.jsonl", lines)
    assert [row.metadata for row in source.rows] == [{"n": 1}, {"n": 2}]
    assert source.dropped["duplicates"] == [2] and source.noted["same_text"] == 1


def test_parquet_equals_jsonl(tmp_path):
    lines = [{"prompt": "a cup", "tag": "x"}, {"prompt": "two cups", "tag": "y", "count": 2}, {"prompt": " "}]
    pd.DataFrame(lines).astype({"count": "Int64"}).to_parquet(tmp_path / "p.parquet")
    from_jsonl = read(tmp_path / "p.jsonl", "\n".join(map(json.dumps, lines)).encode())
    from_parquet = read_source(str(tmp_path / "p.parquet"), 2000)
    assert from_parquet.rows == from_jsonl.rows
    assert from_parquet.dropped == from_jsonl.dropped


def test_a_parquet_file_without_a_prompt_column_is_refused(tmp_path):
    pd.DataFrame({"caption": ["a"]}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(GranularError, match="no column 'prompt' or 'text'; it has caption"):
        read_source(str(tmp_path / "p.parquet"), 2000)


def test_the_labs_file_is_its_grammar():
    from stages.lab.grammar import enumerate_prompts

    source = read_source(str(Path(__file__).parents[2] / "data" / "lab" / "prompts.jsonl"), 2000)
    assert [row.text for row in source.rows] == [prompt.text for prompt in enumerate_prompts()]
    assert all(row.tag == row.metadata["tag"] and "include" in row.metadata for row in source.rows)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public prompt files are not beside the project")
@pytest.mark.parametrize(
    ("name", "kept", "duplicates"),
    [
        ("drawbench.txt", 200, 800),
        ("geneval_test.jsonl", 553, 1659),
        ("hpsv2_test.txt", 400, 0),
        ("ocr_test.txt", 1018, 0),
        ("pickscore_sfw_test.txt", 1024, 0),
    ],
)
def test_public_prompt_files_lose_nothing_but_exact_duplicates(name, kept, duplicates):
    content = (PUBLIC / name).read_text(encoding="utf-8")
    lines = content.removesuffix("\n").split("\n")
    source = read_source(str(PUBLIC / name), 2000)
    assert source.lines == len(lines)
    assert len(source.rows) == len({line.strip() for line in lines})
    assert source.dropped["blank"] == source.dropped["over_long"] == []
    assert (len(source.rows), len(source.dropped["duplicates"])) == (kept, duplicates)
