"""The exact transfers of each kind of step on a device that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine.core import Core
from engine.step.input import StepInput
from kvcache.forward import Forward
from kvcache.spec import Span
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import Job, ask, play, texts
from tests.fake_device import FAKE, Recorder, fake_device
from tests.selection import quick

Folder = Callable[[str], Path]
UPLOAD = ("upload", "kvcache/staging.py")
STEP = [UPLOAD, ("wait", "engine/sample/device_sampling.py")]
JOBS = (
    Job(ask("shift", range(3, 50), 40, overflow="shift", ignore_eos=True)),
    Job(ask("beside", range(60, 97), 9), 4),
    Job(ask("shared", [*range(3, 28), *range(100, 115)], 5), 6),
)
SETTINGS = {"slots": 3, "context": 64, "chunk": 12}


def transfers(device: Recorder) -> list[tuple[str, str]]:
    """Kind and file of each transfer since the last call."""
    found = [(each.kind, each.line.split(":")[0]) for each in device.transfers]
    device.clear()
    return found


def step_transfers(engine: Core, device: Recorder, jobs: Sequence[Job]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """The tokens of jobs; by kind of step the transfers of each."""
    by_kind: dict[str, list[Any]] = {}
    kinds: list[str] = []
    begin, step = engine.cache.forward, engine.step

    def forward(spans: Sequence[Span]) -> Forward:
        lengths = {span.length > 1 for span in spans}
        kinds.append("mixed" if len(lengths) > 1 else "prompt" if True in lengths else "decode")
        return begin(spans)

    def observed() -> Any:
        device.clear()
        events = step()
        by_kind.setdefault(kinds[-1], []).append(transfers(device))
        return events

    with patch.object(engine.cache, "forward", forward), patch.object(engine, "step", observed):
        return texts(play(engine, jobs)), by_kind


@pytest.mark.parametrize("family", quick(["gemma3"], ["llama", "gemma3", "deepseek_v3", "qwen3_next"]))
def test_every_step_is_one_upload_and_one_wait(family: str, folder: Folder) -> None:
    """Of prompts, of decoded tokens, and of both; a shift before it uploads the cells that move."""
    expected = texts(play(core(load_model(folder(family), "float32", kernels="torch"), **SETTINGS), JOBS))
    with fake_device() as device:
        engine = core(load_model(folder(family), "float32", device=FAKE), **SETTINGS)
        found, by_kind = step_transfers(engine, device, JOBS)
    others = [each for steps in by_kind.values() for each in steps if each != STEP]

    assert expected == found
    assert {"prompt", "mixed", "decode"} == by_kind.keys()
    assert engine.stats().context_shifts_total > 0
    assert len(others) <= engine.stats().context_shifts_total
    # The cells that move, of each group.
    assert [[UPLOAD] * len(engine.cache.groups) + STEP] * len(others) == others


def test_a_copied_prefix_is_in_the_upload_of_the_next_step(folder: Folder) -> None:
    """The copy itself transfers nothing."""
    models = [load_model(folder("llama"), "float32", device=device) for device in ("cpu",)]
    logits = []
    with fake_device() as device:
        models.append(load_model(folder("llama"), "float32", device=FAKE))
        for loaded in models:
            cache = core(loaded, slots=2).cache
            with cache.forward([Span(0, 0, 20)]) as forward:
                loaded.runner.run(StepInput(forward, range(3, 23), [19]))
            device.clear()
            assert cache.copy_prefix(0, 1, 10) == 10
            assert transfers(device) == []
            with cache.forward([Span(0, 20, 1), Span(1, 10, 5)]) as forward:
                logits.append(loaded.runner.run(StepInput(forward, range(40, 46), [0, 5])).logits)
                assert transfers(device) == ([UPLOAD] if loaded is models[1] else [])
                is_run = isinstance(forward.segments(0)[1].cells, slice)
        on_cpu, on_device = logits[0], logits[1].cpu()

    assert not is_run
    assert torch.allclose(on_cpu, on_device, atol=1e-5)
