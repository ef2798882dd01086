"""The report and the compare page in a browser: what they show is what is stored; sort, filter and keys work."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from stages.report.spec import ReportSpec
from stages.report.stage import run
from tests import browser
from tests.report.fake_project import EFFECTS, Effect, Project, write_evaluation
from tests.report.test_compare import sides

pytestmark = pytest.mark.slow

CELLS = """[...document.querySelectorAll("#%s-table tbody tr")].filter(row => !row.hidden).map(
    row => [...row.cells].map(cell => cell.firstChild ? cell.firstChild.textContent.trim() : ""))"""
VALUES = """[...document.querySelectorAll("#%s-table td[data-value]")].map(cell => Number(cell.dataset.value))"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    project = Project(root / "project")
    write_evaluation(project.root / "evaluations" / "base", Effect())
    for name, effect in EFFECTS.items():
        project.add(name, effect)
    (root / "out").mkdir()
    run(project.inputs, ReportSpec(bootstrap=300, runs=tuple(EFFECTS)), None, root / "out")
    return root / "out"


@pytest.fixture(scope="module")
def page(made: Path):  # type: ignore[no-untyped-def]
    with browser.page() as opened:
        yield opened


def column(page: browser.Page, table: str, place: int) -> list[str]:
    return [row[place] for row in page.js(CELLS % table)]


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "table5", "geneval", "pairs", "cost"])
def test_every_number_on_the_page_is_the_stored_one(page, made, name):
    page.open(made / "index.html")
    stored = pd.read_csv(made / "tables" / f"{name}.csv")["value"].tolist()
    assert page.js(VALUES % name) == pytest.approx(stored, rel=0, abs=0) and stored
    for value, text in page.js(f"""[...document.querySelectorAll("#{name}-table td[data-value]")].map(
        cell => [cell.dataset.value, cell.firstChild.textContent])"""):
        digits = text.strip("▲▼·✓ ").replace("−", "-").replace(",", "")
        places = len(digits.partition(".")[2])
        assert float(digits) == pytest.approx(float(value), abs=0.5000001 * 10**-places)


def test_a_header_sorts_down_up_and_back(page, made):
    page.open(made / "index.html")
    before = column(page, "table1", 0)
    numbers = []
    for state in ("descending", "ascending", "none"):
        page.click("#table1-table th:nth-child(6) button")
        assert page.js("document.querySelector('#table1-table th:nth-child(6)').getAttribute('aria-sort')") == state
        shown = [float(text.rstrip(" ✓")) for text in column(page, "table1", 5) if text != "–"]
        numbers.append(shown)
    assert numbers[0] == sorted(numbers[0], reverse=True) and numbers[1] == sorted(numbers[1])
    assert column(page, "table1", 0) == before
    page.js("document.querySelector('#table1-table th button').focus()")
    page.press("Enter")
    assert column(page, "table1", 0) != before


def test_the_filter_keeps_rows_with_all_words(page, made):
    page.open(made / "index.html")
    page.press("/")
    page.type("g2rpo 42")
    assert set(column(page, "table1", 0)) == {"g2rpo", "g2rpo_single"}
    assert page.js("document.querySelector('#pairs p.none').hidden") is False
    page.press("Escape")
    assert len(column(page, "table1", 0)) == 9 and page.js("document.activeElement.id") != "filter"


def test_keys_walk_sections_and_hide_published_numbers(page, made):
    page.open(made / "index.html")
    at = "document.querySelector('.bar a.here').textContent"
    assert page.js(at) == "Table 1"
    page.press("j")
    assert page.js("document.activeElement.id") == "table1" or page.js("document.activeElement.id") == "pairs"
    page.press("p")
    assert page.js("getComputedStyle(document.querySelector('#table1-table td.theirs')).display") == "none"
    page.press("p")
    assert page.js("getComputedStyle(document.querySelector('#table1-table td.theirs')).display") != "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_errors_no_requests_and_nothing_wider_than_a_phone(page, made, scheme):
    page.colours(scheme)
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    page.open(made / "index.html")
    assert page.js("document.documentElement.scrollWidth") <= 390
    page.call("Emulation.clearDeviceMetricsOverride")
    paper = page.js("getComputedStyle(document.body).backgroundColor")
    assert (int(paper.removeprefix("rgb(").split(",")[0]) < 128) == (scheme == "dark")
    assert page.errors == [] and page.requests == []


def test_pairs_of_images_come_worst_first_and_in_the_order_of_a_scorer(page, tmp_path):
    from stages.report.compare import render
    from stages.report.statistics import Bootstrap

    (tmp_path / "compare.html").write_text(render(*sides(tmp_path), Bootstrap(300, 0)), encoding="utf-8")
    page.open(tmp_path / "compare.html")
    page.click(".choices button:nth-of-type(3)")
    values = page.js("[...document.querySelectorAll('.pair')].map(one => Number(one.dataset.by2))")
    assert values == sorted(values) and len(values) == 48
    assert page.js(VALUES % "differences") and page.js("document.images.length") == 96
    assert page.js("[...document.images].every(one => one.naturalWidth > 0)")
    assert page.errors == [] and page.requests == []
