"""Pages with tables that are generated from code: options from the declarations, endpoints from the app."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from docs import endpoints
from docs import options as options_page
from server.configuration.options import options
from tests.engine.kit.checkpoint_list import PUBLISHED
from tests.house.source import ROOT

FLAG = re.compile(r"--[a-z][a-z0-9-]*")
# Flags of every command, and the argument's.
COMMON = {"--help", "--version", "--model"}


@pytest.mark.parametrize("page", [endpoints, options_page], ids=["endpoints", "options"])
def test_the_tables_are_up_to_date(page: ModuleType) -> None:
    """`python -m docs.endpoints` and `python -m docs.options` write them."""
    text = page.PAGE.read_text()

    assert page.generated(text) == text


def test_the_page_of_models_has_fifty_checkpoints() -> None:
    """Their names and types are those of `checkpoint_list`, and the totals those of the rows."""
    table, totals = (ROOT / "docs" / "models.md").read_text().split("| checkpoint |")[1].split("\n\n")[:2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    starting = sum(not row[2].startswith("no") for row in rows)
    native = sum(row[3] == "yes" for row in rows)

    assert [(published.name, published.model_type) for published in PUBLISHED] == [(row[0], row[1]) for row in rows]
    assert len({published.hub for published in PUBLISHED}) == len(rows) == 50
    assert totals.startswith(f"Of 50, {starting} start (goal: 45) and {native} run natively (goal: 35).")


def test_every_endpoint_has_a_purpose() -> None:
    assert all(f"| {purpose} |" not in endpoints.tables() for purpose in ("", "None"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_help_shows_every_declared_option() -> None:
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", "--help"]
    wide = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=wide, timeout=60, check=True).stdout
    declared = {flag for option in options() for flag in option.flags}

    assert declared <= set(FLAG.findall(shown))
    assert declared | COMMON >= {line.split()[1] for line in shown.splitlines() if line.startswith("│ --")}


def test_options_are_few_and_explained() -> None:
    """No option for an internal constant; every option has a help text and a default in words."""
    assert len([option for option in options() if option.field != "config"]) <= 50
    assert all(option.help.endswith(".") and option.default_text not in ("None", "()", "False") for option in options())
