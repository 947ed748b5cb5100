"""Every family that docs/models-checked.md promises, checked against transformers alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.engine.kit.families import CHECKS, FAMILIES, Family, build, rotated, shifted

PAGE = Path(__file__).parents[2] / "docs" / "models-checked.md"
# One of each mechanism in every run; latents and Mamba are in test_latent.py, test_recurrent.py and test_resume.py.
ALWAYS = {
    "gpt_oss",
    "llama4_text",
    "qwen3_next",
    "gemma4_text",
    "mpt",
}

family = cache(build)


def families() -> list[object]:
    """All families, most of them marked slow."""
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in sorted(FAMILIES)]


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.parametrize("name", families())
def test_a_family_equals_transformers(name: str) -> None:
    """Batched, chunked, copied and resumed, a family's logits equal transformers alone."""
    model: Family = family(name)

    assert {check: True for check in CHECKS} == {name: check(model) for name, check in CHECKS.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", families())
def test_a_family_shifts_or_is_computed_anew(name: str) -> None:
    """The documented way to shift is the one that happens, and gives finite logits."""
    assert documented()[name]["shift"] == shifted(family(name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*families(), "phi3", "falcon"])
def test_a_family_rotates_as_generate_does_beyond_the_original_length(name: str) -> None:
    """The documented outcome is the one that happens."""
    assert documented()[name]["LongRoPE"] == rotated(name)


def test_the_page_has_every_family() -> None:
    """docs/models-checked.md has a row for each family that is checked, and for no other, and none of them fails."""
    rows = documented()

    assert sorted(FAMILIES) == sorted(rows)
    assert not [name for name, cells in rows.items() if "FAIL" in cells.values()]


def documented() -> dict[str, dict[str, str]]:
    """The rows of the page's first table by family, their cells by column."""
    table = PAGE.read_text().split("| family |")[1].split("\n\n")[0]
    heads, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {cells[0]: dict(zip(heads, cells[1:], strict=True)) for cells in rows}
