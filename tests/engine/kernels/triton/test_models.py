"""Models over the Triton kernels: the text of any mix of requests equals transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.load.load import LoadedModel
from engine.run.packed import PackedRunner
from tests.engine.kernels.triton.interpreter import DEVICE, ONE_TILE, TritonKernels
from tests.engine.kit.models import Reference, core, load_model
from tests.engine.kit.play import Job, ask, play
from tests.engine.test_oracle import expected, run

# Attention of full range; windows and chunks of it; latents.
FAMILIES = ("llama", "gemma2", "gemma3", "llama4", "deepseek_v3")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU runs whole models in its own tests"),
]


@pytest.fixture
def over_triton(folder: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """The tiny model of a family, whose attention is Triton's."""

    def load(family: str, dtype: str = "float32", **settings: Any) -> LoadedModel:
        model = load_model(folder(family), dtype, kernels="torch", **settings)
        kernels = TritonKernels(ONE_TILE)
        return replace(model, runner=PackedRunner(model.model, model.layers, model.runner.mla, kernels))  # type: ignore[attr-defined]

    return cache(load)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_text_equals_generate(
    family: str, over_triton: Callable[..., LoadedModel], folder: Callable[[str], Path]
) -> None:
    """Prompts in chunks beside a decoding sequence."""
    reference = Reference(folder(family), torch.float32)
    jobs = [Job(ask("long", tuple(range(20)), 2)), Job(ask("short", (7, 8, 9), 3))]

    answers = play(core(over_triton(family), chunk=12), jobs)

    assert {job.request.id: expected(reference, job) for job in jobs} == {
        name: list(answer.tokens) for name, answer in answers.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_equals_generate(
    family: str, over_triton: Callable[..., LoadedModel], folder: Callable[[str], Path]
) -> None:
    references = cache(lambda name, dtype: Reference(folder(name), getattr(torch, dtype)))

    assert 20 < run(over_triton, references, family, range(3000, 3002), "float32")
