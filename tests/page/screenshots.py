"""The screenshots of docs/page.md: `python -m tests.page.screenshots [FOLDER]`."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PIL import Image

from tests.e2e.serving import ROOT, serving
from tests.engine.kit.shapes import QUESTION, draw, save_shape_model
from tests.page.conftest import program
from tests.page.tab import Tab
from tests.page.test_chat import TOOLS
from tests.page.test_layout import conversation
from tests.page.test_live import LONG, generating

WIDE = {"width": 1440, "height": 1080}
LAPTOP, PHONE = {"width": 1180, "height": 860}, {"width": 390, "height": 800}
IMAGE_SIDE = 400
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
    tools(Tab(browser.new_context(viewport=LAPTOP), address).ready(), folder)
    small = browser.new_context(viewport=PHONE, color_scheme="dark")
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


def images(tab: Tab, folder: Path, name: str) -> None:
    """Questions about two images, and a third one in the message field."""
    tab.set("Temperature", "0")
    tab.button("Close the panel").click()
    for number, (colour, shape) in enumerate((("red", "circle"), ("blue", "triangle"), ("green", "cross"))):
        file = io.BytesIO()
        draw(colour, shape, IMAGE_SIDE).save(file, "PNG")
        chosen = {"name": f"{number}.png", "mimeType": "image/png", "buffer": file.getvalue()}
        tab.page.get_by_label("Image files").set_input_files([chosen])
        tab.page.get_by_role("list", name="Images of this message").get_by_role("img").wait_for()
        if shape != "cross":
            tab.ask(QUESTION)
    save(tab, folder, name)


def take_images(browser: Any, folder: Path) -> None:
    """Take those with images, on a server of a small model that is trained to name shapes."""
    with tempfile.TemporaryDirectory() as place:
        model = save_shape_model(Path(place) / "shapes")
        flags = ["--store", "memory", "--context", "512", "--slots", "2", str(model)]
        with Path(os.devnull).open("w") as errors, serving(flags, errors) as address:
            for name, size, scheme in (("images", LAPTOP, "light"), ("images-phone", PHONE, "dark")):
                images(Tab(browser.new_context(viewport=size, color_scheme=scheme), address).ready(), folder, name)


def main(folder: Path) -> None:
    """Take all screenshots on a server of the bundled model, but for those with images."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--store", "memory", "--context", "1024", "--slots", "6"]
    with Path(os.devnull).open("w") as errors, serving(flags, errors) as address, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program(), args=["--no-sandbox"])
        take_all(browser, address, folder)
        take_images(browser, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/page")
