"""Reads docker/Dockerfile into stages of instructions, as far as the tests need it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its keyword in upper case, and the rest on one line."""

    keyword: str
    rest: str


def stages() -> list[list[Instruction]]:
    """Return the stages of docker/Dockerfile, each from its FROM on; what stands before the first FROM is left out."""
    lines = [
        line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[list[Instruction]] = []
    for line in filter(str.strip, whole.splitlines()):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            found.append([])
        if found:
            found[-1].append(Instruction(keyword.upper(), rest.strip()))
    return found


def stage(name: str) -> list[Instruction]:
    """Return the stage of a name."""
    return next(found for found in stages() if found[0].rest.endswith(f" AS {name}"))


def last(keyword: str) -> str:
    """Return the last instruction of the image with `keyword`."""
    return [step.rest for step in stage("runtime") if step.keyword == keyword][-1]
