"""The screenshots of docs/page.md: `python -m tests.page.screenshots [FOLDER]`."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PIL import Image

from tests.e2e.serving import ROOT, serving
from tests.page.conftest import program
from tests.page.tab import Tab
from tests.page.test_chat import TOOLS
from tests.page.test_layout import conversation
from tests.page.test_live import LONG, generating

WIDE = {"width": 1440, "height": 1080}
ANSWER = r"""Two settings share the memory of the cache:

| setting | default | meaning |
|---|---|---|
| `--slots` | what memory allows | sequences that are computed at the same time |
| `--context` | what memory allows | tokens of one sequence |

The pool has a *cell* for each token, and sequences take cells as they grow. They fit while

$$\sum_{i=1}^{k} n_i \le \frac{M}{m} - C + E$$

```python
def fits(sequences: list[int], cells: int, cached: int) -> bool:
    # Cached prefixes are evicted for running sequences.
    return sum(sequences) <= cells - cached + evictable(cached)
```

1. Start with the defaults.
2. Raise `--slots` if requests wait, and `--context` if answers end early.
"""
SHIFT = {"overflow": "shift", "max_tokens": 100_000}


def save(tab: Tab, folder: Path, name: str) -> None:
    """Save what the tab shows, with 256 colours."""
    image = Image.open(io.BytesIO(tab.page.screenshot())).convert("RGB")
    # The other methods lose the colours of small areas.
    few = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(folder / f"{name}.png", optimize=True)


def talk(tab: Tab) -> None:
    """A short conversation."""
    tab.set("Temperature", "0")
    for text in ("What is Cellar?", "What is a slot?", "What does --slots do?"):
        tab.ask(text)
    tab.open_panel("Engine")


def take_all(browser: Any, address: str, folder: Path) -> None:
    """Take the screenshots."""
    for scheme in ("light", "dark"):
        tab = Tab(browser.new_context(viewport=WIDE, color_scheme=scheme), address).ready()
        talk(tab)
        with ExitStack() as stack:
            for text in ("One", "Two", "Three"):
                stack.enter_context(generating(address, LONG + text, **SHIFT))
            tab.page.locator(".slot .shifted").first.wait_for()
            save(tab, folder, f"live-{scheme}")
        file = conversation(folder.parent, ANSWER, "Slots and context")
        tab.page.get_by_label("File of conversations").set_input_files(file)
        tab.page.locator(".failure").wait_for()
        tab.page.locator(".messages").evaluate("(area) => (area.scrollTop = 0)")
        tab.open_panel("Settings")
        save(tab, folder, f"text-{scheme}")
        file.unlink()
    tools(Tab(browser.new_context(viewport={"width": 1180, "height": 860}), address).ready(), folder)
    small = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
    phone(Tab(small, address).ready(), folder)


def tools(tab: Tab, folder: Path) -> None:
    """A tool call that waits for its result."""
    tab.set("Tools", json.dumps(TOOLS, indent=1))
    tab.set("Temperature", "0")
    tab.button("Close the panel").click()
    tab.send("What is the weather in Paris?")
    tab.page.get_by_label("Result of get_weather").fill('{"weather": "sunny"}')
    save(tab, folder, "tools")


def phone(tab: Tab, folder: Path) -> None:
    """A narrow window."""
    tab.set("Temperature", "0")
    tab.button("Close the panel").click()
    tab.ask("What is Cellar?")
    tab.ask("What is a slot?")
    save(tab, folder, "phone")


def main(folder: Path) -> None:
    """Take all screenshots on a server of the bundled model."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--store", "memory", "--context", "1024", "--slots", "6"]
    with Path(os.devnull).open("w") as errors, serving(flags, errors) as address, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program(), args=["--no-sandbox"])
        take_all(browser, address, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/page")
