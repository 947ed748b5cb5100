"""Markup of answers: lists, tasks, tables and formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.page.tab import Tab
from tests.page.test_chat import imported
from tests.page.test_layout import PHONE, violations

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect

DOCUMENT = r"""Steps:

1. Install

```bash
make
```

2. Configure
   - slots

     ```bash
     export SLOTS=4
     ```

   - context
3. Start

```bash
cellar serve
```

4. Ask

- [x] read
- [ ] write

| name | left | middle | tokens |
|---|:---|:---:|---:|
| a | b | c | 1,024 |

The error \(\hat{y}_i - y_i\) is squared, with $a_1 * b_1 * \epsilon$ added:

\[
\mathcal{L} = \frac{1}{n} \sum_{i=1}^{n} (\hat{y}_i - y_i)^2

+ \lambda \lVert w \rVert^2
\]

1. In a list:

   $$\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix} \pmb{x} \prescript{14}{6}{C} \sideset{_1^2}{_3^4}\sum$$

A beer is $5 and a meal is $12.50; $20 for both, US$30 for three, and echo $HOME:$PATH. `\(code\)`
"""
Opened = Callable[..., Tab]


def shown(open_tab: Opened, folder: Path, text: str, **options: object) -> Tab:
    """A tab with an answer of this text."""
    tab = open_tab(**options).ready()
    tab.page.get_by_label("File of conversations").set_input_files(imported(folder, text))
    expect(tab.answers).to_have_count(1)
    return tab


def test_lists_count_on_after_code(open_tab: Opened, tmp_path: Path) -> None:
    """Code between two items ends a list; the next one starts with the number that is written."""
    answer = shown(open_tab, tmp_path, DOCUMENT).answers

    lists = answer.locator(".block > ol").evaluate_all(
        "(lists) => lists.map((one) => [one.start, one.children.length])"
    )
    assert [[1, 1], [2, 2], [4, 1], [1, 1]] == lists
    expect(answer.locator("ol ul pre")).to_have_text("export SLOTS=4\n")


def test_tasks_are_boxes(open_tab: Opened, tmp_path: Path) -> None:
    """Which cannot be changed."""
    tab = shown(open_tab, tmp_path, DOCUMENT)
    boxes = tab.answers.get_by_role("checkbox")

    assert [True, False] == boxes.evaluate_all("(boxes) => boxes.map((box) => box.checked)")
    assert [True, True] == boxes.evaluate_all("(boxes) => boxes.map((box) => box.disabled)")
    box = boxes.first.bounding_box()
    assert box is not None
    assert box["width"] < 20
    assert 0 == tab.answers.locator("input[type=text], input:not([type])").count()


def test_columns_keep_their_alignment(open_tab: Opened, tmp_path: Path) -> None:
    cells = shown(open_tab, tmp_path, DOCUMENT).answers.locator("td")

    assert ["start", "left", "center", "right"] == cells.evaluate_all(
        "(cells) => cells.map((cell) => getComputedStyle(cell).textAlign)"
    )


def test_formulas_are_mathml(open_tab: Opened, tmp_path: Path) -> None:
    """In a line and displayed, by all four delimiters; backslashes, underscores and asterisks are no markup."""
    answer = shown(open_tab, tmp_path, DOCUMENT).answers

    displayed = answer.locator("math").evaluate_all(
        "(all) => all.map((one) => one.getAttribute('display') === 'block')"
    )
    assert [False, False, True, True] == displayed
    for part in ("mfrac", "munderover", "mtable", "mmultiscripts"):
        expect(answer.locator(f"math {part}").first).to_be_attached()
    assert 0 == answer.locator("em").count()
    expect(answer.locator("math").nth(1).locator("msub")).to_have_count(2)


def test_prices_and_variables_are_text(open_tab: Opened, tmp_path: Path) -> None:
    last = shown(open_tab, tmp_path, DOCUMENT).answers.locator(".block").last

    expect(last).to_have_text(DOCUMENT.splitlines()[-1].replace("`", ""))
    assert 0 == last.locator("math").count()


@pytest.mark.parametrize(
    "text",
    [
        r"\(\frac{1}{\)",
        r"$$\undefinedcommand{x}$$",
        r"\(\href{javascript:alert(1)}{x}\)",
        r"\(\includegraphics{https://other.example/p.png}\)",
    ],
)
def test_what_is_no_formula_stays_as_written(open_tab: Opened, tmp_path: Path, text: str) -> None:
    """Half a formula of a running answer, unknown commands, and commands that would load or link something."""
    answer = shown(open_tab, tmp_path, f"Then {text} follows").answers.locator(".markdown")

    expect(answer).to_have_text(f"Then {text} follows")
    assert 0 == answer.locator("math, a, img").count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_document_fits_a_phone(open_tab: Opened, tmp_path: Path, scheme: str) -> None:
    """And axe-core finds nothing serious in it."""
    tab = shown(open_tab, tmp_path, DOCUMENT, color_scheme=scheme, reduced_motion="reduce", **PHONE)

    assert 0 == tab.overflow
    assert [] == violations(tab)
