"""Structures of the libraries are compared with their ctypes mirrors at load."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure
from pathlib import Path

import pytest

from engine.kernels.cpu.attention import attention
from engine.kernels.cpu.build import layout, libraries
from engine.kernels.cpu.products import linear
from engine.native import step_library
from engine.native.step_library import MIRRORS, StepFields, StepLibrary

VARIANT = libraries.variants("step")[:1]


def reordered(mirror: type[Structure], first: str, second: str) -> type[Structure]:
    """The mirror with two fields exchanged."""
    fields = list(mirror._fields_)
    names = [name for name, *_ in fields]
    at, other = names.index(first), names.index(second)
    fields[at], fields[other] = fields[other], fields[at]
    return type("Reordered", (Structure,), {"_fields_": fields})


def without(mirror: type[Structure], field: str) -> type[Structure]:
    """The mirror without one field."""
    fields = [entry for entry in mirror._fields_ if entry[0] != field]
    return type("Shortened", (Structure,), {"_fields_": fields})


@pytest.fixture(scope="module")
def step_file() -> Path:
    """The library of the native step."""
    if not VARIANT:
        pytest.skip("this processor has no variant of the native step")
    return libraries.library("step", VARIANT[0])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Step", lambda mirror: reordered(mirror, "hidden_states", "logits"), "Step.hidden_states"),
        ("Layer", lambda mirror: reordered(mirror, "attention_range", "attention_range_size"), "Layer.attention_range"),
        ("Norm", lambda mirror: without(mirror, "epsilon"), "Norm"),
        ("SamplingContext", lambda mirror: reordered(mirror, "top_p", "min_p"), "SamplingContext.min_p"),
    ],
)
def test_a_wrong_mirror_is_refused(
    step_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: Callable[[type[Structure]], type[Structure]],
    message: str,
) -> None:
    monkeypatch.setattr(step_library, "MIRRORS", {**MIRRORS, name: change(MIRRORS[name])})

    with pytest.raises(layout.LayoutMismatch, match=message):
        StepLibrary(step_file, libraries.library("linear"))


def test_a_missing_or_unknown_mirror_is_refused(step_file: Path) -> None:
    library = ctypes.CDLL(str(step_file))
    missing = {name: mirror for name, mirror in MIRRORS.items() if name != "Heads"}

    with pytest.raises(layout.LayoutMismatch, match="Heads"):
        layout.check_layout(library, missing)
    with pytest.raises(layout.LayoutMismatch, match="Unknown"):
        layout.check_layout(library, {**MIRRORS, "Unknown": StepFields})


def test_all_kernels_export_the_layout_of_their_mirrors() -> None:
    layout.check_layout(ctypes.CDLL(str(libraries.library("attention"))), attention._MIRRORS)
    layout.check_layout(ctypes.CDLL(str(libraries.library("linear"))), linear._MIRRORS)


def test_a_mismatch_is_reported_as_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = reordered(attention.SegmentFields, "start", "first")
    monkeypatch.setattr(attention, "_MIRRORS", {**attention._MIRRORS, "Segment": wrong})

    with pytest.raises(OSError, match=r"Segment\.first"):
        attention.NativeAttention(libraries.library("attention"))
