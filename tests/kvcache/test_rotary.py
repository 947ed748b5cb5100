"""Rotation of keys: algebra, layouts, and the error of a thousand shifts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.rotary import rotate
from kvcache.spec import Rotation
from tests.kvcache.token_rows import columns

LLAMA = tuple(10_000.0 ** (-pair / 8) for pair in range(8))
ROTATIONS = (
    Rotation("half", 0, LLAMA),
    Rotation("interleaved", 0, LLAMA),
    Rotation("half", 3, LLAMA[:4]),
    Rotation("interleaved", 2, LLAMA[:5]),
    Rotation("half", 0, tuple(-frequency for frequency in LLAMA)),
    Rotation("half", 0, ()),
)
rotations = pytest.mark.parametrize("rotation", ROTATIONS, ids=lambda r: f"{r.layout}-{len(r.inverse_frequency)}")


def keys(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Keys of two heads and seven tokens."""
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def rotated_by_numpy(rows: torch.Tensor, by: int, rotation: Rotation) -> torch.Tensor:
    """The definition: every pair is a complex number times exp(i angle)."""
    rotated = rows.double().numpy().copy()
    for pair, frequency in enumerate(rotation.inverse_frequency):
        first, second = columns(rotation, pair)
        shifted_entries = (rotated[..., first] + 1j * rotated[..., second]) * np.exp(1j * by * frequency)
        rotated[..., first], rotated[..., second] = shifted_entries.real, shifted_entries.imag
    return torch.from_numpy(rotated)


@rotations
@pytest.mark.parametrize("by", [-100_000, -7, 0, 1, 4096])
def test_every_layout_rotates_its_pairs_by_the_angle(rotation: Rotation, by: int) -> None:
    rows = keys()

    torch.testing.assert_close(rotate(rows, by, rotation), rotated_by_numpy(rows, by, rotation), rtol=0, atol=1e-10)


@rotations
def test_float32_is_exact_to_its_rounding_even_far_from_the_start(rotation: Rotation) -> None:
    rows = keys(torch.float32)
    expected = rotated_by_numpy(rows, -100_000, rotation)

    torch.testing.assert_close(rotate(rows, -100_000, rotation).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@rotations
def test_half_precision_is_rounded_once(rotation: Rotation, dtype: torch.dtype) -> None:
    rows = keys(dtype)

    assert rotated_by_numpy(rows, -9, rotation).to(dtype).equal(rotate(rows, -9, rotation))


@rotations
@given(first=st.integers(-5000, 5000), second=st.integers(-5000, 5000))
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
def test_rotations_add_up(rotation: Rotation, first: int, second: int) -> None:
    twice = rotate(rotate(keys(), first, rotation), second, rotation)

    torch.testing.assert_close(twice, rotate(keys(), first + second, rotation), rtol=0, atol=1e-10)


@rotations
def test_rotation_by_zero_is_the_identity(rotation: Rotation) -> None:
    assert keys().equal(rotate(keys(), 0, rotation))


@rotations
def test_rotation_keeps_its_input(rotation: Rotation) -> None:
    rows = keys()

    assert rotate(rows, 5, rotation).data_ptr() != rows.data_ptr()
    assert rows.equal(keys())


@rotations
def test_rotation_keeps_lengths(rotation: Rotation) -> None:
    torch.testing.assert_close(rotate(keys(), 123, rotation).norm(dim=-1), keys().norm(dim=-1))


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_a_thousand_shifts_do_not_drift(dtype: torch.dtype, allowed: float) -> None:
    rotation = ROTATIONS[0]
    rows = keys(dtype)
    for _ in range(1000):
        rows = rotate(rows, -1, rotation)

    error = (rows.double() - rotated_by_numpy(keys(dtype), -1000, rotation)).norm() / keys().norm()
    assert error < allowed


def test_a_view_of_a_pool_can_be_rotated() -> None:
    pool = torch.stack((keys(), keys() + 1), dim=2)
    rows = pool[:, :, 1]

    assert rotate(rows.contiguous(), 3, ROTATIONS[0]).equal(rotate(rows, 3, ROTATIONS[0]))


def test_rotation_takes_no_rows() -> None:
    assert (2, 0, 16) == rotate(keys()[:, :0], -3, ROTATIONS[0]).shape
