"""The tests that CONTRIBUTING.md shows pass."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["engine", "server"])
def test_an_example_passes(example: str, request: pytest.FixtureRequest) -> None:
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    (test,) = (value for name, value in names.items() if name.startswith("test_"))

    assert test(*map(request.getfixturevalue, inspect.signature(test).parameters)) is None
