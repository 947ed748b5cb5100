"""Prints the notes of a release, its section of CHANGELOG.md: `python -m docs.release vX.Y.Z`.

It fails unless the tag is the version of pyproject.toml and its section has a date.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, project: str, changelog: str) -> str:
    """The section of a tag's version, without its heading.

    ValueError for another version, or without a dated section.

    project    content of pyproject.toml
    changelog  content of CHANGELOG.md
    """
    version = tomllib.loads(project)["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, pyproject.toml has version {version}")
    for section in changelog.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        if re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading):
            return text.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section {version} with a date")


def _main() -> None:
    try:
        text = notes(sys.argv[1], (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text())
    except ValueError as error:
        sys.exit(str(error))
    sys.stdout.write(text)


if __name__ == "__main__":
    _main()
