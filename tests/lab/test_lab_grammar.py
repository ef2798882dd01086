"""The lab's world is finite: everything about it can be enumerated."""

from collections import Counter

from stages.lab.grammar import COLORS, RELATIONS, SHAPES, TAGS, enumerate_prompts


def test_every_prompt_is_distinct_and_the_order_is_stable():
    texts = [p.text for p in enumerate_prompts()]
    assert len(set(texts)) == len(texts) == 294
    assert texts == [p.text for p in enumerate_prompts()]
    assert texts[0] == "a photo of a circle"


def test_the_six_tags_have_the_sizes_of_their_products():
    s, c, r = len(SHAPES), len(COLORS), len(RELATIONS)
    pairs = s * (s - 1)
    expected = {
        "single_object": s,
        "two_object": pairs,
        "counting": 3 * s * (c + 1),
        "colors": s * c,
        "position": pairs * r,
        "color_attr": pairs * c * (c - 1),
    }
    assert Counter(p.tag for p in enumerate_prompts()) == expected
    assert tuple(expected) == TAGS


def test_metadata_are_genevals_format():
    for p in enumerate_prompts():
        assert p.metadata["tag"] == p.tag and p.metadata["prompt"] == p.text
        assert set(p.metadata) <= {"tag", "include", "exclude", "prompt"}
        for item in p.metadata["include"]:
            assert set(item) <= {"class", "count", "color", "position"}
            assert item["class"] in SHAPES and item["count"] >= 1


def test_the_landmark_of_a_relation_comes_first():
    by_text = {p.text: p.metadata for p in enumerate_prompts()}
    assert by_text["a photo of a circle left of a square"]["include"] == [
        {"class": "square", "count": 1},
        {"class": "circle", "count": 1, "position": ["left of", 0]},
    ]
