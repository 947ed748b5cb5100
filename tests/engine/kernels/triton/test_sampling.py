"""The arg max of logits plus noise in Triton equals that of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.sample import device_noise
from tests.engine.kernels.triton.interpreter import DEVICE

sampling = pytest.importorskip("engine.kernels.triton.sampling")


def test_tokens_are_those_of_torch() -> None:
    """With all bits of seeds and positions, and floors that leave one token or all."""
    assert device_noise.equals_torch(sampling.noisy_argmax, DEVICE)


def test_first_of_equal_scores_wins_and_masked_tokens_never() -> None:
    """Also in a vocabulary of less than a block, and in float64."""
    logits = torch.full((3, 40), -torch.inf, dtype=torch.float64, device=DEVICE)
    logits[0, 7], logits[1, 39], logits[2, 3:5] = 1.0, -1e4, torch.tensor([1.0, 60.0])
    seeds = torch.arange(3, device=DEVICE)

    assert [7, 39, 4] == sampling.noisy_argmax(logits, logits.amax(-1, keepdim=True) - 26, seeds, seeds).tolist()


def test_torch_replaces_a_kernel_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("no driver")

    gpu = torch.device("cuda")
    for other, reason in ((fail, "RuntimeError: no driver"), (lambda *_: torch.zeros(1), "its tokens differ")):
        device_noise.best_noisy_argmax.cache_clear()
        monkeypatch.setattr(sampling, "noisy_argmax", other)
        monkeypatch.setattr(device_noise, "equals_torch", lambda own, _: torch.equal(own(), torch.ones(1)))
        assert device_noise.noisy_argmax is device_noise.best_noisy_argmax(gpu)
        assert reason in caplog.messages[-1]
    device_noise.best_noisy_argmax.cache_clear()
