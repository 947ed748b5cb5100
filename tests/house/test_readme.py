"""The README's table of options is generated from the declarations in server/configuration/settings.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from docs.options import README, generated
from server.configuration.options import options
from tests.house.source import ROOT

FLAG = re.compile(r"--[a-z][a-z0-9-]*")
# Flags of every command, and the argument's.
COMMON = {"--help", "--version", "--model"}


def test_the_table_of_options_is_up_to_date() -> None:
    """`python -m docs.options` writes it."""
    readme = README.read_text()

    assert generated(readme) == readme


def test_help_shows_every_declared_option() -> None:
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", "--help"]
    wide = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=wide, timeout=60, check=True).stdout
    declared = {flag for option in options() for flag in option.flags}

    assert declared <= set(FLAG.findall(shown))
    assert declared | COMMON >= {line.split()[1] for line in shown.splitlines() if line.startswith("│ --")}


def test_options_are_few_and_explained() -> None:
    """No option for an internal constant; every option has a help text and a default in words."""
    assert len([option for option in options() if option.field != "config"]) <= 39
    assert all(option.help.endswith(".") and option.default_text not in ("None", "()", "False") for option in options())
