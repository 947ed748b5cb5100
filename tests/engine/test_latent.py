"""Latent attention (MLA): cells hold one latent a token, and both kernels agree with transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.kernels import latent, reference
from engine.kernels.attention_input import AttentionInput
from engine.load.load import LoadedModel
from engine.native.runner import NativeRunner
from engine.run.packed import PackedRunner
from engine.run.runner import runners_of
from engine.types.request import MlaMode, Request
from kvcache.forward import Segment
from kvcache.kv_buffer import FloatKVBuffer, LayerKV
from kvcache.spec import AttentionRange
from tests.engine.kit.models import END, Reference, core, load_model
from tests.engine.kit.play import GREEDY, Job, play
from tests.selection import quick

FAMILIES = ["deepseek_v2", "deepseek_v3", "minicpm3"]
CASES = [
    (family, chunk, mla)
    for family in FAMILIES
    for chunk, mla in ((3, "auto"), (64, "auto"), (5, "absorb"), (5, "expand"))
]
QUICK = [
    ("deepseek_v2", 3, "auto"),
    ("deepseek_v3", 64, "auto"),
    ("minicpm3", 5, "absorb"),
    ("deepseek_v3", 5, "expand"),
]


@pytest.mark.parametrize(("family", "chunk", "mla"), quick(QUICK, CASES))
def test_any_batch_equals_separate_runs(
    family: str, chunk: int, mla: MlaMode, loaded: Callable[..., LoadedModel], reference: Callable[..., Reference]
) -> None:
    """Prompts with shared prefixes in fewer slots than requests, with each setting."""
    draw = random.Random(chunk)
    base = [draw.randrange(250) for _ in range(50)]
    prompts = {f"{at}": (*base[: draw.randrange(1, 50)], at) for at in range(6)}
    model = loaded(family)
    engine = core(replace(model, runner=PackedRunner(model.model, model.layers, mla)), slots=3, chunk=chunk)
    jobs = [Job(Request(id=name, prompt=prompt, sampling=GREEDY, max_tokens=6)) for name, prompt in prompts.items()]

    answers = play(engine, jobs)

    outputs = {name: reference(family).greedy(prompt, 6) for name, prompt in prompts.items()}
    expected = {name: answer[: answer.index(END)] if END in answer else answer for name, answer in outputs.items()}
    assert expected == {name: tuple(answer.tokens) for name, answer in answers.items()}


@pytest.mark.parametrize("mla", ["auto", "absorb", "expand"])
def test_the_mla_setting_selects_the_kernel(mla: MlaMode, folder: Callable[[str], Path], ways: list[str]) -> None:
    """A fixed setting applies to segments of any length; "auto" uses both. The native step absorbs all."""
    model = load_model(folder("deepseek_v3"), "float32", mla=mla)
    assert isinstance(runners_of(model.runner)[0], NativeRunner) == (mla != "expand")
    model = replace(model, runner=runners_of(model.runner)[-1])
    ways.clear()

    play(core(model, chunk=32), [Job(Request(id="a", prompt=tuple(range(40)), sampling=GREEDY, max_tokens=3))])

    assert {"auto": {"_absorbed", "_expanded"}, "absorb": {"_absorbed"}, "expand": {"_expanded"}}[mla] == set(ways)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of all segments, in order."""
    taken: list[str] = []
    for name in ("_absorbed", "_expanded"):
        own = getattr(latent, name)
        monkeypatch.setattr(latent, name, lambda *given, own=own, name=name: (taken.append(name), own(*given))[1])
    return taken


def test_a_cell_holds_one_latent(loaded: Callable[..., LoadedModel]) -> None:
    """And the rotary part once, not keys and values of every head."""
    model = loaded("deepseek_v3")

    assert {(1, 16 + 8, 0)} == {(plan.spec.heads, plan.spec.key_width, plan.spec.value_width) for plan in model.layers}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_rotary_part_shifts(family: str, loaded: Callable[..., LoadedModel]) -> None:
    """A context shift rotates the last columns of the cell only."""
    rotations = {plan.spec.rotation for plan in loaded(family).layers}

    assert all(rotation is not None and rotation.offset == 16 for rotation in rotations)
    assert all(rotation is not None and len(rotation.inverse_frequency) == 4 for rotation in rotations)


@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 30), (7, 12), (40, 0)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_absorbed_equals_expanded(rows: int, before: int, contiguous: bool) -> None:
    torch.manual_seed(rows)
    heads, width, value, rank, rotary = 4, 6, 5, 16, 4
    draw = {"dtype": torch.float64}
    projection = latent.LatentProjection(
        torch.randn(heads, width, rank, **draw), torch.randn(heads, value, rank, **draw)
    )
    cells = LayerKV(FloatKVBuffer(torch.randn(1, 1, 64, rank + rotary, **draw)), 0)
    query = torch.randn(heads, rows, width + rotary, **draw)
    length = before + rows
    index = slice(3, 3 + length) if contiguous else torch.randperm(64)[:length]
    segment = Segment(slice(0, rows), before, index)
    arguments = (AttentionInput(query, cells, cells, [segment], AttentionRange(), 0.3), segment, projection)

    assert torch.allclose(latent._absorbed(*arguments), latent._expanded(*arguments), atol=1e-12)


def test_expansion_is_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are expanded a few at a time, with the same output."""
    heads, width, value, rank, rotary, length = 6, 6, 5, 16, 4, 50
    draw = {"dtype": torch.float64}
    projection = latent.LatentProjection(
        torch.randn(heads, width, rank, **draw), torch.randn(heads, value, rank, **draw)
    )
    cells = LayerKV(FloatKVBuffer(torch.randn(1, 1, 64, rank + rotary, **draw)), 0)
    query = torch.randn(heads, 9, width + rotary, **draw)
    segment = Segment(slice(0, 9), length - 9, slice(0, length))
    arguments = (AttentionInput(query, cells, cells, [segment], AttentionRange(), 0.3), segment, projection)
    whole = latent._expanded(*arguments)
    seen: list[int] = []
    own = reference.attend_one
    monkeypatch.setattr(latent, "_EXPANDED_BYTES", 2 * length * (width + rotary + value) * 8)
    monkeypatch.setattr(
        reference, "attend_one", lambda inputs, q, *given: (seen.append(len(q)), own(inputs, q, *given))[1]
    )

    parts = latent._expanded(*arguments)

    assert [2, 2, 2] == seen
    assert torch.allclose(whole, parts, atol=1e-12)
