"""The README tells every setting, and no setting that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.house.source import ROOT

README = ROOT / "README.md"
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
# Flags of the command line itself, or other spellings of a flag that has a row.
OWN = {"--help", "--version"}


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag that `cellar serve --help` shows."""
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", "--help"]
    wide = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=wide, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    return set(FLAG.findall(shown.stdout)) - OWN


def rows() -> list[str]:
    """The rows of the README's tables."""
    return [line for line in README.read_text().splitlines() if line.startswith("|")]


def test_every_flag_has_a_row(flags: set[str]) -> None:
    """A flag is born with a row in the README, or not at all."""
    told = {flag for row in rows() for flag in FLAG.findall(row)}

    assert set() == {flag for flag in flags if not flag.startswith("--no-")} - told


def test_every_row_has_a_flag(flags: set[str]) -> None:
    """The settings table tells no flag that does not exist."""
    told = {flag for row in rows() if (first := row.split("|")[1]) for flag in FLAG.findall(first)}

    assert set() == told - flags - OWN


def test_the_flags_are_few(flags: set[str]) -> None:
    """Thirty settings: those that users of other servers look for, and not one for every constant."""
    assert len({flag for flag in flags if not flag.startswith("--no-")}) <= 30
