"""Chromium, a server, and a tab that fails its test for an error in the console or a request to another host."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import serving
from tests.page.tab import PATIENCE_MS, Tab

# Debian calls it chromium, other systems chromium-browser or google-chrome.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# Small, so that conversations reach its end.
CONTEXT = 512


def program() -> str | None:
    """The path of the system's Chromium, if there is one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The system's Chromium, headless."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install playwright")
    found = program()
    if found is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server without API keys."""
    flags = ["--store", "memory", "--context", str(CONTEXT), "--slots", "4"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as errors, serving(flags, errors) as address:
        yield address


OpenTab = Callable[..., Tab]


@pytest.fixture
def open_tab(chromium: Any, server: str, tmp_path: Path) -> Iterator[OpenTab]:
    """Opens tabs with an empty storage each, by default on the server without keys."""
    tabs: list[Tab] = []

    def opened(address: str = server, **options: Any) -> Tab:
        context = chromium.new_context(
            **{"viewport": {"width": 1400, "height": 900}, "accept_downloads": True, **options}
        )
        tabs.append(Tab(context, address))
        return tabs[-1]

    yield opened
    problems = [problem for tab in tabs for problem in tab.problems()]
    for tab in tabs:
        tab.page.context.close()
    assert [] == problems


@pytest.fixture
def tab(open_tab: OpenTab) -> Tab:
    """A tab with the page, ready to send."""
    return open_tab().ready()
