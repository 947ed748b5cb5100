"""Latent attention: cells hold one latent a token, and both ways to attend to it agree with transformers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.kernels import latent, reference
from engine.load import Loaded
from engine.types import Request
from kvcache.forward import Segment
from kvcache.spec import Reach
from tests.engine.models import END, Reference, core
from tests.engine.play import GREEDY, Job, play

FAMILIES = ["deepseek_v2", "deepseek_v3", "minicpm3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_any_batch_says_what_each_says_alone(
    family: str, chunk: int, loaded: Callable[..., Loaded], reference: Callable[..., Reference]
) -> None:
    """Prompts with common beginnings in too few slots: each answer is that of `generate`."""
    draw = random.Random(chunk)
    base = [draw.randrange(250) for _ in range(50)]
    prompts = {f"{at}": (*base[: draw.randrange(1, 50)], at) for at in range(6)}
    engine = core(loaded(family), slots=3, chunk=chunk)
    jobs = [Job(Request(id=name, prompt=prompt, sampling=GREEDY, max_tokens=6)) for name, prompt in prompts.items()]

    answers = play(engine, jobs)

    said = {name: reference(family).greedy(prompt, 6) for name, prompt in prompts.items()}
    expected = {name: answer[: answer.index(END)] if END in answer else answer for name, answer in said.items()}
    assert expected == {name: tuple(answer.tokens) for name, answer in answers.items()}


def test_a_cell_holds_one_latent(loaded: Callable[..., Loaded]) -> None:
    """The cache stores the latent and the turned part once, not keys and values of every head."""
    model = loaded("deepseek_v3")

    assert {(1, 16 + 8, 0)} == {(plan.spec.heads, plan.spec.key_width, plan.spec.value_width) for plan in model.layers}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_turned_part_shifts(family: str, loaded: Callable[..., Loaded]) -> None:
    """A shift knows a rotation for the last columns of the cell, and leaves the latent alone."""
    rotations = {plan.spec.rotation for plan in loaded(family).layers}

    assert all(rotation is not None and rotation.offset == 16 for rotation in rotations)
    assert all(rotation is not None and len(rotation.inverse_frequency) == 4 for rotation in rotations)


@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 30), (7, 12), (40, 0)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_absorbed_equals_expanded(rows: int, before: int, contiguous: bool) -> None:
    """Projecting the queries or the latents is the same sum in another order."""
    torch.manual_seed(rows)
    heads, width, value, rank, turned = 4, 6, 5, 16, 4
    draw = {"dtype": torch.float64}
    projection = latent.Projection(torch.randn(heads, width, rank, **draw), torch.randn(heads, value, rank, **draw))
    cells = torch.randn(1, 64, rank + turned, **draw)
    query = torch.randn(heads, rows, width + turned, **draw)
    length = before + rows
    index = slice(3, 3 + length) if contiguous else torch.randperm(64)[:length]
    segment = Segment(slice(0, rows), before, index)
    arguments = (query, cells, segment, Reach(), projection, 0.3)

    assert torch.allclose(latent._absorbed(*arguments), latent._expanded(*arguments), atol=1e-12)
    assert torch.equal(reference.read(cells, segment), cells[:, index])
