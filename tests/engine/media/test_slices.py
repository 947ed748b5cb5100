"""Calls in slices: the same result in slices of any length, and a thread that ends with the call."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from engine.media.slices import CallFailed, SlicedCall

ROWS = 300


@pytest.fixture
def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24), nn.LayerNorm(24))


def _call(tower: nn.Module) -> SlicedCall[Tensor]:
    x = torch.randn(2, ROWS // 2, 16, generator=torch.Generator().manual_seed(1))

    def compute() -> Tensor:
        with torch.inference_mode():
            return tower(x)  # type: ignore[no-any-return]

    return SlicedCall(compute, [*tower.modules()])


def _slices(call: SlicedCall[Tensor], seconds: float) -> int:
    slices = 1
    while not call.advance(seconds):
        slices += 1
    return slices


def test_slices_of_any_length_have_the_same_result(tower: nn.Module) -> None:
    """Three blocks of rows in each linear layer."""
    whole, sliced = _call(tower), _call(tower)

    assert _slices(whole, 60.0) == 1
    assert _slices(sliced, 0.0) == len([*tower.modules()]) + 2 * 3 + 1
    assert torch.equal(whole.result, sliced.result)
    assert torch.allclose(
        whole.result, tower(torch.randn(2, ROWS // 2, 16, generator=torch.Generator().manual_seed(1)))
    )


def test_the_model_computes_for_others_between_slices(tower: nn.Module) -> None:
    """In another thread, without a pause."""
    call = _call(tower)
    call.advance(0.0)
    x = torch.ones(ROWS, 16)

    between = tower(x)

    _slices(call, 0.0)
    assert torch.allclose(between, tower(x))


@pytest.mark.parametrize("slices", [0, 1, 4, 100])
def test_a_closed_call_has_no_thread_and_no_hook(tower: nn.Module, slices: int) -> None:
    threads = threading.active_count()
    call = _call(tower)
    for _ in range(slices):
        call.advance(0.0)

    call.close()

    assert threading.active_count() == threads
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in tower.modules())


def test_an_error_of_the_function_is_raised_in_the_slice(tower: nn.Module) -> None:
    threads = threading.active_count()
    wide = torch.ones(ROWS, 17)
    call = SlicedCall[Tensor](lambda: tower(wide), [*tower.modules()])
    with pytest.raises(CallFailed) as error:
        _slices(call, 0.0)
    assert isinstance(error.value.__cause__, RuntimeError)

    call.close()

    assert threading.active_count() == threads
    assert not any(module._forward_pre_hooks for module in tower.modules())
