"""The prompt table and its split."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.prompts.cleaning import Row, read_source
from stages.prompts.spec import PromptsSpec
from stages.prompts.stage import assign_splits, read_prompts, run

LAB = str(Path(__file__).parents[2] / "data" / "lab" / "prompts.jsonl")


def rows(*texts: str, tag: str = "") -> list[Row]:
    return [Row(line, text, tag, {}) for line, text in enumerate(texts, 1)]


def test_held_out_numbers_are_exact_and_every_tag_gives_its_share():
    lab = read_source(PromptsSpec(source=LAB)).rows
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
    source = report["source"]
    assert source["lines"] == source["rows"] + sum(one["count"] for one in source["clean_up"].values()) == 6
    assert source["clean_up"]["blank"] == {"rule": "drop", "count": 1, "lines": [3]}
    assert source["clean_up"]["duplicates"] == {"rule": "drop", "count": 1, "lines": [4]}
    assert report["rows"] == 4 and report["test_source"] is None
    assert report["split"] == {"train": 2, "validation": 1, "test": 1}


def two_files(folder: Path, train: str, tests: str, **knobs: object) -> tuple[pd.DataFrame, dict]:
    (folder / "train.txt").write_text(train)
    (folder / "test.txt").write_text(tests)
    out = folder / "out"
    out.mkdir()
    knobs = {"validation": 1, "test": None} | knobs
    run(PromptsSpec(source=str(folder / "train.txt"), test_source=str(folder / "test.txt"), **knobs), out)
    return read_prompts(out), json.loads((out / "report.json").read_text())


def test_a_test_file_of_its_own_follows_the_source(tmp_path):
    table, report = two_files(tmp_path, "a\nb\nc\n", "d\n\ne\n")
    assert table["id"].tolist() == [0, 1, 2, 3, 4]
    assert table["text"].tolist() == ["a", "b", "c", "d", "e"]
    assert table["split"].tolist()[3:] == ["test", "test"]
    assert report["split"] == {"train": 2, "validation": 1, "test": 2}
    assert report["test_source"]["clean_up"]["blank"]["lines"] == [2] and report["test_source"]["unused"] == 0


def test_no_test_prompt_is_trained_on(tmp_path):
    table, report = two_files(tmp_path, "a\nB\nc\nd\n", "b\nA\n")
    assert table["text"].tolist() == ["c", "d", "b", "A"]
    assert report["source"]["clean_up"]["in_test"] == {"rule": "drop", "count": 2, "lines": [1, 2]}


def test_a_count_takes_so_many_rows_of_the_test_file_and_says_how_many_are_left(tmp_path):
    table, report = two_files(tmp_path, "a\nb\n", "t1\nt2\nt3\nt4\n", test=3)
    assert (table["split"] == "test").sum() == 3 and report["test_source"]["unused"] == 1


def test_a_count_beyond_the_test_file_is_refused(tmp_path):
    with pytest.raises(GranularError, match=r"prompts.test: at most 2, the rows of .*test.txt, got 3; null takes all"):
        two_files(tmp_path, "a\nb\n", "t1\nt2\n", test=3)


@pytest.mark.parametrize(("train", "test", "place"), [("\n", "t\n", "source"), ("a\nb\n", "\n", "test_source")])
def test_a_file_without_a_prompt_is_refused(tmp_path, train, test, place):
    with pytest.raises(GranularError, match=rf"prompts.{place}: .* holds no prompt in 1 lines"):
        two_files(tmp_path, train, test)


@pytest.mark.parametrize("test_source", [None, "./p.txt"])
def test_all_rows_need_a_test_file_of_its_own(test_source):
    with pytest.raises(ValueError, match="test: null takes every row of test_source"):
        PromptsSpec(source="p.txt", test_source=test_source, test=None)


def test_a_prompt_file_of_hpsv2s_size_is_one_table(tmp_path):
    """103,700 rows, the size of HPSv2's training prompts; their report lists every dropped line."""
    lines = [f"A photo of object {i % 100_000}, by artist {i % 977}, {'highly detailed, ' * 5}" for i in range(103_700)]
    (tmp_path / "p.txt").write_text("\n".join(lines))
    (tmp_path / "t.txt").write_text("\n".join(lines[:400]))
    out = tmp_path / "out"
    out.mkdir()
    run(PromptsSpec(source=str(tmp_path / "p.txt"), test_source=str(tmp_path / "t.txt"), test=400), out)
    assert read_prompts(out)["split"].value_counts().to_dict() == {
        **{"train": len(set(lines)) - 400 - 32, "validation": 32, "test": 400},
    }


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


def test_the_command_says_what_became_of_the_lines(tmp_path):
    (tmp_path / "p.txt").write_text("a\nb\n\na\n")
    (tmp_path / "params.yaml").write_text("prompts: {source: p.txt, test: 0, validation: 1}\n")
    done = command("--out", "out", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "prompts: p.txt: 4 lines, 2 rows; invalid utf8 0; blank 1 (drop: line 3); over long 0; "
        "duplicates 1 (drop: line 4); in test 0",
        "prompts: wrote out, 1 train, 1 validation, 0 test",
    ]


def test_a_refused_line_leaves_the_old_folder(tmp_path):
    (tmp_path / "p.txt").write_text("a\nb\n\n")
    (tmp_path / "params.yaml").write_text("prompts: {source: p.txt, clean_up: {blank: refuse}}\n")
    (tmp_path / "data/prompts").mkdir(parents=True)
    (tmp_path / "data/prompts/old").touch()
    done = command(cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.strip() == (
        "error: p.txt, line 3: is blank; mend it, or set prompts.clean_up.blank to drop or keep."
    )
    assert (tmp_path / "data/prompts/old").exists()


def test_a_misspelt_knob_is_one_sentence_and_leaves_the_old_folder(tmp_path):
    (tmp_path / "params.yaml").write_text(f"prompts: {{source: {LAB}, tset: 96}}\n")
    (tmp_path / "data/prompts").mkdir(parents=True)
    (tmp_path / "data/prompts/old").touch()
    done = command(cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: prompts.tset: unknown key; did you mean 'test'?"
    assert (tmp_path / "data/prompts/old").exists()
