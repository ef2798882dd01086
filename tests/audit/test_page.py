"""A round's page in a real browser: every number is the stored one, keys and filters work, nothing leaves the page."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stages.audit.page import LIMIT, round_page, run_page
from stages.audit.payload import facts
from stages.audit.tables import tables
from tests import browser
from tests.audit.world import G2RPO, METHODS, World, name_of

pytestmark = pytest.mark.slow

REASON = "the service answered <b>503</b> & went </script>"
OTHERS = [one for one in METHODS if one["name"] in ("flow_grpo", "branchgrpo", "nft", "stepwise")]


@pytest.fixture(scope="module")
def world() -> World:
    return World(G2RPO, failing={5: REASON})


@pytest.fixture(scope="module")
def html(world: World) -> str:
    return round_page(world.stored(), world.decode)


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Page]:
    with browser.page() as page:
        yield page


@pytest.fixture
def page(chromium: browser.Page, html: str, tmp_path: Path) -> Iterator[browser.Page]:
    """The page, opened from disk; whatever a test does with it, it complains of nothing and asks for nothing."""
    yield from opened(chromium, html, tmp_path)


def opened(chromium: browser.Page, html: str, folder: Path) -> Iterator[browser.Page]:
    (folder / "round-0001.html").write_text(html, encoding="utf-8")
    chromium.errors.clear()
    chromium.requests.clear()
    chromium.open(folder / "round-0001.html")
    yield chromium
    chromium.js("0")
    assert chromium.errors == [] and chromium.requests == []


def shown(page: browser.Page, table: str) -> list[dict]:
    """What elements of a table show: key, name, value (raw) and text."""
    return page.js(
        f"[...document.querySelectorAll('[data-table={table}]')].map(e => "
        "({key: e.dataset.key, name: e.dataset.name, value: e.dataset.value, text: e.textContent}))"
    )


def same(raw: str, stored: object) -> bool:
    """Whether a raw value of the page is a stored one, to the last bit."""
    if isinstance(stored, bool | np.bool_):
        return raw == str(bool(stored)).lower()
    if isinstance(stored, str):
        return raw == stored
    if stored is None or (isinstance(stored, float) and math.isnan(stored)):
        return raw == ""
    return raw != "" and float(raw) == float(stored)  # type: ignore[arg-type]


def agrees(text: str, raw: str) -> bool:
    """Whether the number that a person reads is the raw one, rounded."""
    if raw in ("", "true", "false"):
        return text in ("–", "yes", "no")
    read = text.replace("−", "-")
    scale = 100 if read.endswith(" %") else 1
    return float(read.removesuffix(" %")) / scale == pytest.approx(float(raw), rel=6e-3, abs=6e-4)


def check_numbers(page: browser.Page, world: World) -> None:
    found = tables(world.stored())
    by_key = {
        "members": found.members.set_index("edge"), "images": found.images.set_index("leaf"),
        "prompts": found.prompts.set_index("prompt"), "steps": found.steps.set_index("s"),
    }  # fmt: skip
    texts = {int(one): world.stored().texts[int(one)] for one in found.prompts["prompt"]}
    for name, table in by_key.items():
        elements = shown(page, name)
        assert elements
        for one in elements:
            key = int(one["key"])
            if one["name"] == "text":
                prompt = key if name == "prompts" else int(table.loc[key, "prompt"])
                assert one["text"] == texts[prompt]
                continue
            stored = key if one["name"] == table.index.name else table.loc[key, one["name"]]
            assert same(one["value"], stored), (name, one, stored)
            assert isinstance(stored, str) or agrees(one["text"], one["value"]), (name, one)


def test_every_number_is_the_stored_one(page, world):
    for prompt in world.rollout.prompts:
        page.js(f"choose({prompt})")
        check_numbers(page, world)
    summary = {(one["of"], one["key"]): one["value"] for one in facts(world.stored())}
    said = page.js("[...document.querySelectorAll('#facts b')].map(e => ({of: e.dataset.table, key: e.dataset.name, "
                   "value: e.dataset.value, text: e.textContent}))")  # fmt: skip
    assert len(said) == len(summary)
    for one in said:
        assert same(one["value"], summary[one["of"], one["key"]]) and agrees(one["text"], one["value"])
    for one in shown(page, "correlation"):
        scorer, pair = one["key"].split()
        if one["name"] == "correlation":
            assert same(one["value"], world.summary["rank_correlation"][scorer][pair])
    for one in shown(page, "rewardFigures"):
        assert same(one["value"], world.summary["scorers"][one["key"]][one["name"]])
    for one in shown(page, "optimizerSteps"):
        (step,) = [step for step in world.update["steps"] if step["optimizer_step"] == int(one["key"])]
        assert same(one["value"], step.get(one["name"]))


@pytest.mark.parametrize("method", OTHERS, ids=name_of)
def test_other_kinds_of_methods_have_pages_too(method, chromium, tmp_path):
    other = World(method)
    for page in opened(chromium, round_page(other.stored(), other.decode), tmp_path):
        check_numbers(page, other)
        assert page.js("document.querySelectorAll('#tree image').length") > 0
        page.press("ArrowRight")
        check_numbers(page, other)


def test_failures_are_shown_with_their_reasons(page, world):
    assert page.js("document.querySelector('#missing h3').textContent") == "Failures: 1 reward is not there"
    assert REASON in page.js("document.querySelector('#missing table').textContent")
    assert REASON in page.js("document.querySelector('#matrices').textContent"), "its prompt is the first one shown"
    row = page.js("document.querySelector('#matrices tr.failed').textContent")
    assert "1 failed" in row and "0: dropped" in row
    page.click("[data-flag=failures]")
    assert page.js("document.getElementById('count').textContent").startswith("1 of ")


def test_disagreeing_strides_are_highlighted(page, world):
    members = tables(world.stored()).members
    for prompt in world.rollout.prompts:
        page.js(f"choose({prompt})")
        marked = page.js("[...document.querySelectorAll('#matrices tr')].filter(e => e.textContent.includes("
                         "'strides disagree')).map(e => Number(e.dataset.edge))")  # fmt: skip
        assert set(marked) == set(members[(members["prompt"] == prompt) & members["flips"]]["edge"])


def rows(page: browser.Page, name: str = "advantage") -> list[float]:
    return page.js(f"[...document.querySelectorAll('#member-list td[data-name=\"{name}\"]')]"
                   ".map(e => Number(e.dataset.value))")  # fmt: skip


def test_headings_sort(page, world):
    values = world.advantages["advantage"].tolist()
    assert rows(page) == sorted(values, reverse=True)
    for order, expected in (("ascending", sorted(values)), ("none", values), ("descending", sorted(values)[::-1])):
        page.click("#member-list th[data-column=advantage] button")
        assert rows(page) == expected
        assert page.js("document.querySelector('#member-list th[data-column=advantage]').ariaSort") == order
    page.press("Enter")  # the heading keeps the focus
    assert rows(page) == sorted(values)


def test_filters_by_words_numbers_and_scorers(page, world):
    advantages = world.advantages["advantage"]
    page.press("/")
    page.type("advantage>0.5 s=0")
    expected = sorted(advantages[(advantages > 0.5) & (world.advantages["s"] == 0)], reverse=True)
    assert rows(page) == expected and expected
    page.js("document.getElementById('filter').value = ''")
    page.type("TRIANGLES")
    assert set(rows(page, "prompt")) == {3}
    page.type(" nothing>1")
    assert "no column nothing" in page.js("document.getElementById('count').textContent")
    page.press("Escape")
    page.press("Escape")
    assert len(rows(page)) == len(advantages)
    page.js("e = document.getElementById('scorer'); e.value = 'hps'; e.dispatchEvent(new Event('change'))")
    names = page.js("[...document.querySelectorAll('#member-list th')].map(e => e.dataset.column)")
    assert "z.hps.1" in names and not [one for one in names if one.startswith("z.clip")]


def test_everything_can_be_reached_by_keys(page, world):
    first, second = page.js("promptGrid.order().map(e => e.prompt)")
    place = "document.activeElement.dataset.key"
    assert page.js("now.prompt") == page.js("data.first")
    page.press("j")
    assert page.js("document.activeElement.closest('#prompt-list') !== null")
    page.press("Home")
    assert page.js(place) == str(first)
    page.press("j")
    assert page.js(place) == str(second)
    page.press("Enter")
    assert page.js("now.prompt") == second
    page.press("k")
    page.press("Enter")
    assert page.js("now.prompt") == first
    page.press("ArrowRight")
    assert page.js("now.prompt") == second
    page.js("document.querySelector('#member-list tbody tr').focus()")
    page.press("ArrowDown")
    edge = int(page.js(place))
    page.press("Enter")
    row = world.advantages.set_index("edge").loc[edge]
    assert (page.js("now.prompt"), page.js("now.step")) == (row["prompt"], row["s"])
    page.js("document.querySelector('#matrices .thumb').focus()")
    page.press("Enter")
    assert page.js("document.getElementById('zoom').open")
    page.press("Escape")
    assert not page.js("document.getElementById('zoom').open")
    assert page.js("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_the_table_can_be_downloaded(page, world):
    page.js(
        "window.blobs = []; real = URL.createObjectURL; URL.createObjectURL = (one) => (blobs.push(one), real(one))"
    )
    page.js("HTMLAnchorElement.prototype.click = () => {}")
    page.click("#csv")
    lines = page.js("blobs[0].text()").strip().split("\r\n")
    names = re.sub(r'"[^"]*"', "", lines[0]).split(",")
    assert len(lines) == 1 + len(world.advantages) and {"edge", "advantage", "ratio", "share"} <= set(names)


def test_light_and_dark_differ_and_can_be_read(page):
    def luminance(colour: str) -> float:
        parts = [int(one) / 255 for one in re.findall(r"\d+", colour)[:3]]
        linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    papers = []
    for scheme in ("light", "dark"):
        page.colours(scheme)
        style = page.js("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        soft = page.js("getComputedStyle(document.querySelector('.soft')).color")
        ink, paper, pale = luminance(style[0]), luminance(style[1]), luminance(soft)
        for one in (ink, pale):
            assert (max(one, paper) + 0.05) / (min(one, paper) + 0.05) > 4.5
        papers.append(paper)
    assert papers[0] > 0.8 and papers[1] < 0.1


def test_a_page_too_large_says_what_is_left_out(world, monkeypatch):
    monkeypatch.setattr("stages.audit.page.LIMIT", len(round_page(world.stored(), None).encode()) + 180_000)
    monkeypatch.setattr("stages.audit.page.TREES", 10)
    noise = np.random.default_rng(0).random((len(world.rollout.leaf_nodes), 64, 64, 3), dtype=np.float32)
    html = round_page(world.stored(), lambda rows: noise[list(rows)], prompt=3)
    assert "Images of 1 of 2 prompts are left out" in html and "Trees of 1 of 2 prompts are left out" in html
    assert "granular audit toy --round 1 --prompt P" in html and len(html.encode()) < LIMIT


def test_without_latents_the_page_says_why(world):
    html = round_page(world.stored(), None, without="the latents were evicted")
    assert "No images: the latents were evicted" in html


def test_the_run_has_curves_alarms_and_its_table(chromium, tmp_path):
    figures = [
        {"round": 0, "validation.clip": 0.5},
        {"round": 1, "reward.clip": 1 / 3},
        {"round": 2, "reward.clip": 0.4},
    ]
    html = run_page("toy", figures, {1: [], 2: ["60% of update points are clipped"]}, [2])
    for page in opened(chromium, html, tmp_path):
        assert "round 2: 60% of update points are clipped" in page.js("document.getElementById('alarms').textContent")
        assert page.js("document.querySelectorAll('.dot.alarm').length") == 1
        for one in shown(page, "rounds"):
            (row,) = [row for row in figures if row["round"] == int(one["key"])]
            assert same(one["value"], row.get(one["name"]))
        page.press("j")
        page.press("Enter")
        assert "round 0" in page.js("document.getElementById('said').textContent")


def test_the_stored_round_is_not_changed_by_its_page(world):
    stored = world.stored()
    before = stored.advantages.copy()
    round_page(stored, world.decode)
    assert dataclasses.asdict(stored.credit) and stored.advantages.equals(before)
