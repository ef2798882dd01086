"""Every line of a prompt file is kept, dropped and counted, or refused: as the clean-up says."""

import pytest

from stages.core.errors import GranularError
from stages.prompts.cleaning import read_source
from stages.prompts.spec import REASONS, CleanUp, PromptsSpec
from stages.prompts.targets import quoted_phrase

# One file with a line for every reason: line 2 blank, 3 over-long, 4 a duplicate, 5 invalid, 6 a test prompt.
LINES = [b"a cat", b" ", b"x" * 51, b"a cat", b"bad \xff", b"A TEST", b"a dog"]
FAULTS = {"blank": 2, "over_long": 3, "duplicates": 4, "invalid_utf8": 5, "in_test": 6}


def clean(read, **rules):
    everything = dict.fromkeys(REASONS, "drop") | rules
    source = read("p.txt", b"\n".join(LINES), max_chars=50, clean_up=CleanUp(**everything))
    spec = PromptsSpec(source=source.path, test_source="t.txt", max_chars=50, clean_up=CleanUp(**everything))
    return read_source(spec, held_out={"a test"})


def test_every_line_is_kept_or_counted(read):
    lines = ["a cat", "", "  a dog \t", "a cat", "A CAT", "x" * 51, 'ein "Hündchen" 🐶', "one\ttwo", "   "]
    source = read("p.txt", ("\ufeff" + "\r\n".join(lines)).encode(), max_chars=50)
    assert [row.text for row in source.rows] == ["a cat", "a dog", "A CAT", 'ein "Hündchen" 🐶', "one\ttwo"]
    assert [row.line for row in source.rows] == [1, 3, 5, 7, 8]
    assert source.found == source.dropped
    assert source.dropped == {
        **{"invalid_utf8": [], "blank": [2, 9], "over_long": [6], "duplicates": [4], "in_test": []},
    }
    assert source.noted == {
        **{"bom": 1, "crlf": 8, "stripped": 1, "tabs": 1, "non_ascii": 1},
        **{"case_only": 1, "same_text": 0, "no_target": 0},
    }
    assert source.lines == len(source.rows) + sum(map(len, source.dropped.values())) == len(lines)


def test_what_is_dropped_is_counted_once_and_listed(read):
    source = clean(read)
    assert source.dropped == source.found == {reason: [FAULTS[reason]] for reason in REASONS}
    assert [row.line for row in source.rows] == [1, 7]


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_kept_is_a_row_and_counted_all_the_same(read, reason):
    source = clean(read, **{reason: "keep"})
    assert FAULTS[reason] in [row.line for row in source.rows]
    assert source.found[reason] == [FAULTS[reason]] and source.dropped[reason] == []
    assert source.lines == len(source.rows) + sum(map(len, source.dropped.values()))


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_refused_is_named_with_its_line_and_the_knob(read, reason):
    with pytest.raises(GranularError, match=rf"line {FAULTS[reason]}: .*set prompts.clean_up.{reason} to drop or keep"):
        clean(read, **{reason: "refuse"})


def test_kept_bad_bytes_are_replaced_and_a_kept_blank_is_the_empty_prompt(read):
    source = clean(read, invalid_utf8="keep", blank="keep")
    assert [row.text for row in source.rows] == ["a cat", "", "bad \ufffd", "a dog"]


def test_a_dropped_line_of_bad_bytes_need_not_be_json(read):
    source = read("p.jsonl", b'{"prompt": "a"}\n\xff\xfe{\0', clean_up=CleanUp(invalid_utf8="drop"))
    assert [row.text for row in source.rows] == ["a"] and source.dropped["invalid_utf8"] == [2]


def test_one_sentence_tells_counts_rules_and_first_lines(read):
    source = read("p.txt", b"a\n" + b"a\n" * 5 + b"\n")
    assert source.sentence().partition(": ")[2] == (
        "7 lines, 1 rows; invalid utf8 0; blank 1 (drop: line 7); over long 0; "
        "duplicates 5 (drop: lines 2, 3, 4, …); in test 0"
    )


def test_one_text_with_other_metadata_is_another_row(read):
    source = read("p.jsonl", b'{"prompt":"a","n":1}\n{"n":1,"prompt":"a"}\n{"prompt":"a","n":2}')
    assert [row.metadata for row in source.rows] == [{"n": 1}, {"n": 2}]
    assert source.dropped["duplicates"] == [2] and source.noted["same_text"] == 1


@pytest.mark.parametrize(
    ("prompt", "phrase"),
    [
        ('a sign that says "Open 24h"', "Open 24h"),
        ('first "one", then "two"', "one"),
        ('a board with " spaced "', "spaced"),
        ("a page with “curly quotes”", "curly quotes"),
        ('nothing in "" and then "this"', "this"),
        ("a storefront with 'Google' on it", None),
        ('one mark " only', None),
        ("", None),
    ],
)
def test_the_target_is_the_first_phrase_in_double_quotes(prompt, phrase):
    assert quoted_phrase(prompt) == phrase


def test_targets_go_into_the_metadata_where_asked_for(read):
    lines = b'{"prompt": "says \\"Hi\\""}\n{"prompt": "says \\"Hi\\"", "target": "Ho"}\n{"prompt": "says nothing"}'
    source = read("p.jsonl", lines, quoted_target=True)
    assert [row.metadata for row in source.rows] == [{"target": "Hi"}, {"target": "Ho"}, {}]
    assert source.noted["no_target"] == 1
    assert [row.metadata for row in read("p.jsonl", lines).rows] == [{}, {"target": "Ho"}, {}]


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
def test_public_prompt_files_lose_nothing_but_exact_duplicates(public, name, kept, duplicates):
    content = (public / name).read_text(encoding="utf-8")
    lines = content.removesuffix("\n").split("\n")
    source = read_source(PromptsSpec(source=str(public / name)))
    assert source.lines == len(lines)
    assert len(source.rows) == len({line.strip() for line in lines})
    assert {reason: len(found) for reason, found in source.dropped.items() if found} == (
        {"duplicates": duplicates} if duplicates else {}
    )
    assert len(source.rows) == kept


def test_geneval_rows_carry_what_must_be_in_the_image(public):
    rows = read_source(PromptsSpec(source=str(public / "geneval_test.jsonl"))).rows
    assert {row.tag for row in rows} == {
        *("single_object", "two_object", "counting", "colors", "position", "color_attr"),
    }
    assert all(row.metadata["include"] and row.metadata["tag"] == row.tag for row in rows)
    assert {row.tag for row in rows if "exclude" in row.metadata} == {"counting"}


def test_every_prompt_of_the_ocr_list_has_its_target(public):
    source = read_source(PromptsSpec(source=str(public / "ocr_test.txt"), quoted_target=True))
    assert source.noted["no_target"] == 0
    assert all(f'"{row.metadata["target"]}"' in row.text for row in source.rows)
