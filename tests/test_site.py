"""Tests of the built site in a Chromium: search, and tables at two widths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
BROWSERS = "chromium", "chromium-browser", "google-chrome"
# What newcomers look for, and the page that answers.
SEARCHES = {
    "dataset": "data.html",
    "data set": "how-to/own-data.html",
    "DataLoader": "faq.html",
    "onnxruntime": "export.html",
    "onnx runtime": "export.html",
    "own dataset event": "how-to/own-data.html",
    "first call slow": "faq.html",
}
TABLES = ["benchmarks", "differences", "surrogates"]  # the widest ones
SEARCH = """(() => {
    document.querySelector(".md-search-result__list").replaceChildren()
    const input = document.querySelector(".md-search__input")
    input.focus()
    input.value = QUERY
    return input.dispatchEvent(new KeyboardEvent("keyup"))
})()"""
FOUND = """[...document.querySelectorAll(".md-search-result__item")].map(
    item => new URL(item.querySelector("a").href).pathname
)"""
# The first cells of tables that are wider than their frame, or that have none, which could scroll.
CUT_OFF = """({
    page: document.scrollingElement.scrollWidth > innerWidth,
    tables: [...document.querySelectorAll(".md-content table")].filter(table => {
        const frame = table.closest(".md-typeset__scrollwrap")
        return !frame || frame.scrollWidth > frame.clientWidth && innerWidth > 390
    }).map(table => table.innerText.slice(0, 60)),
})"""

FILTER = """(() => {
    document.body.dataset.mdColorScheme = SCHEME
    return getComputedStyle(document.querySelector(".md-content img")).filter
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    built = SITE / "search" / "search_index.js"
    sources = [ROOT / "mkdocs.yml", *(p for p in ROOT.glob("docs/**/*") if p.is_file())]
    if not built.exists() or built.stat().st_mtime < max(p.stat().st_mtime for p in sources):
        pytest.skip("the site is missing or old: make docs")
    browser = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_search_finds_what_newcomers_look_for(browser: Browser) -> None:
    """The page that answers is among the first three."""
    browser.open(SITE / "index.html", 1280)
    for query, page in SEARCHES.items():
        browser.run(SEARCH.replace("QUERY", json.dumps(query)))
        assert (SITE / page).as_posix() in browser.run(FOUND)[:3], query


def test_no_table_is_cut_off(browser: Browser) -> None:
    """On a laptop all columns are in view, and on a telephone tables scroll, not the page."""
    for page in TABLES:
        for width in (1280, 390):
            browser.open(SITE / f"{page}.html", width)
            assert browser.run(CUT_OFF) == {"page": False, "tables": []}, (page, width)


def test_figures_follow_the_mode(browser: Browser) -> None:
    """Black on white in light mode, inverted in dark mode."""
    browser.open(SITE / "gallery.html", 1280)
    for scheme, inverted in (("default", False), ("slate", True)):
        found = browser.run(FILTER.replace("SCHEME", json.dumps(scheme)))
        assert ("invert" in found) == inverted, scheme
