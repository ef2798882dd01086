"""The prompt table and its split."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.prompts.sources import Row, read_source
from stages.prompts.spec import PromptsSpec
from stages.prompts.stage import assign_splits, read_prompts, run

LAB = str(Path(__file__).parents[2] / "data" / "lab" / "prompts.jsonl")


def rows(*texts: str, tag: str = "") -> list[Row]:
    return [Row(line, text, tag, {}) for line, text in enumerate(texts, 1)]


def test_held_out_numbers_are_exact_and_every_tag_gives_its_share():
    lab = read_source(LAB, 2000).rows
    splits = assign_splits(lab, test=96, validation=32)
    assert (splits.count("test"), splits.count("validation")) == (96, 32)
    table = pd.DataFrame({"tag": [row.tag for row in lab], "split": splits})
    for tag, members in table.groupby("tag"):
        assert abs((members["split"] == "test").sum() - 96 * len(members) / len(lab)) < 1, tag


def test_the_split_belongs_to_the_text_not_to_its_place():
    texts = [f"prompt {i}" for i in range(40)]
    forward = dict(zip(texts, assign_splits(rows(*texts), test=10, validation=5)))
    backward = dict(zip(texts[::-1], assign_splits(rows(*texts[::-1]), test=10, validation=5)))
    assert forward == backward


def test_prompts_that_differ_only_in_case_share_a_split():
    texts = [form(f"prompt {i}") for i in range(30) for form in (str.lower, str.upper, str.title)]
    by_family: dict[str, set[str]] = {}
    for text, split in zip(texts, assign_splits(rows(*texts), test=30, validation=12)):
        by_family.setdefault(text.lower(), set()).add(split)
    assert all(len(splits) == 1 for splits in by_family.values())


def test_a_number_that_would_divide_a_family_is_refused():
    with pytest.raises(GranularError, match=r"prompts.test: 1 rows cannot be held out .* 0 can"):
        assign_splits(rows("a", "A", "b", "B"), test=1, validation=0)


def test_something_must_be_left_to_train_on():
    with pytest.raises(GranularError, match=r"3 [+] 1 leave nothing to train on out of 4"):
        assign_splits(rows("a", "b", "c", "d"), test=3, validation=1)


def test_row_position_is_the_id_and_the_report_adds_up(tmp_path):
    (tmp_path / "p.txt").write_text("a\nb\n\na\nc\nd 🐶\n", encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    run(PromptsSpec(source=str(tmp_path / "p.txt"), test=1, validation=1), out)
    table = read_prompts(out)
    assert table["id"].tolist() == table.index.tolist() == [0, 1, 2, 3]
    assert table["text"].tolist() == ["a", "b", "c", "d 🐶"]
    report = json.loads((out / "report.json").read_text())
    assert report["lines"] == report["kept"] + report["blank"] + report["duplicates"] + report["over_long"] == 6
    assert report["dropped_lines"] == {"blank": [3], "duplicates": [4], "over_long": []}
    assert report["split"] == {"train": 2, "validation": 1, "test": 1}


def test_a_missing_table_says_which_stage_to_run(tmp_path):
    with pytest.raises(GranularError, match="run the prompts stage first"):
        read_prompts(tmp_path)


def command(*options: str, cwd) -> subprocess.CompletedProcess:
    from stages.core.code import SOURCES

    return subprocess.run(
        [sys.executable, "-m", "stages.prompts", *options],
        cwd=cwd, env={"PYTHONPATH": str(SOURCES)}, capture_output=True, text=True,
    )  # fmt: skip


def test_the_command_writes_equal_bytes_twice(tmp_path):
    (tmp_path / "params.yaml").write_text(f"prompts: {{source: {LAB}, test: 96, validation: 32}}\n")
    outputs = []
    for name in ("one", "two"):
        done = command("--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
    assert outputs[0] == outputs[1]
    assert set(outputs[0]) == {"prompts.parquet", "report.json"}


def test_a_misspelt_knob_is_one_sentence_and_leaves_the_old_folder(tmp_path):
    (tmp_path / "params.yaml").write_text(f"prompts: {{source: {LAB}, tset: 96}}\n")
    (tmp_path / "data/prompts").mkdir(parents=True)
    (tmp_path / "data/prompts/old").touch()
    done = command(cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: prompts.tset: unknown key; did you mean 'test'?"
    assert (tmp_path / "data/prompts/old").exists()
