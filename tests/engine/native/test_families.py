"""The native step supports the families listed in tests/engine/native/families.py."""

from __future__ import annotations

import pytest

from tests.engine.native.families import FAMILIES, NATIVE, reason

# One of each architecture and of each reason in every run; the others are slow only by their number.
ALWAYS = ("apertus", "beam", "gpt_oss", "hyperclovax", "llama4_text", "mamba", "olmo3", "olmoe", "solar_open")


def families() -> list[object]:
    """All families, most of them marked slow."""
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in sorted(FAMILIES)]


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", families())
def test_family_is_supported_or_not(name: str) -> None:
    assert (name in NATIVE) == (reason(name) is None)
