"""The engine on a device that is not there: the text of the CPU, one upload and one wait for each step.

Numbers are computed by the CPU, so any difference is an error of the engine and not of rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.load.load import LoadedModel
from engine.model.device_runner import DeviceRunner
from engine.types.request import Dry, SamplingParams
from tests.engine.mixes import mix, prompts
from tests.engine.models import core, load_model
from tests.engine.play import Answer, Job, ask, play
from tests.fake_device import FAKE, fake_device
from tests.selection import quick

Models = Callable[..., LoadedModel]
# Full and sliding windows, chunks, latent attention, recurrent layers, sinks, learned positions.
FAMILIES = ("llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "gpt2")
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.2, seed=2),
    SamplingParams(temperature=1.0, min_p=0.1, logit_bias=((3, 2.0),), seed=3),
    SamplingParams(temperature=1.0, dry=Dry(1.0), allowed_tokens=tuple(range(0, 200, 2)), seed=4),
)


def texts(answers: dict[str, Answer]) -> dict[str, list[int]]:
    """The tokens of each answer."""
    return {name: answer.tokens for name, answer in answers.items()}


@pytest.mark.parametrize("family", quick(["llama"], FAMILIES))
def test_text_is_that_of_the_cpu(family: str, folder: Callable[[str], Path]) -> None:
    """Prompts in chunks, shared prefixes, cancels and preemption."""
    traffic = mix(3, prompts(len(family)), scarce=True)
    settings = {"slots": traffic.slots, "chunk": traffic.chunk, "cells": traffic.cells}
    expected = play(core(load_model(folder(family), "float32", kernels="torch"), **settings), traffic.jobs)
    with fake_device():
        loaded = load_model(folder(family), "float32", device=FAKE)
        answers = play(core(loaded, device=FAKE, **settings), traffic.jobs)

    assert isinstance(loaded.runner, DeviceRunner)
    assert texts(expected) == texts(answers)


@pytest.mark.parametrize("family", quick(["llama"], ["llama", "gemma3", "deepseek_v3"]))
def test_a_step_is_one_upload_and_one_wait(family: str, folder: Callable[[str], Path]) -> None:
    """Of sequences with different filters, whose cells are not contiguous."""
    requests = [ask(f"{at}", range(3, 12 + at), 30, sampling=own) for at, own in enumerate(SAMPLING)]
    with fake_device() as device:
        engine = core(load_model(folder(family), "float32", device=FAKE), slots=8, device=FAKE)
        for request in requests:
            engine.submit(request)
        transfers = []
        for _ in range(12):
            device.clear()
            engine.step()
            transfers.append(device.transfers.copy())

    assert [("kvcache/staging.py", "engine/sample/device_sampling.py")] * 12 == [
        tuple(transfer.line.split(":")[0] for transfer in step) for step in transfers
    ]


def test_context_shift_and_disk_cache_run_on_a_device(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A shift, eviction to the disk cache, and a prefix that is read from it."""
    jobs = [
        Job(ask("shift", range(3, 60), 90, overflow="shift", ignore_eos=True)),
        Job(ask("again", range(3, 60), 9), 60),
    ]
    settings = {"slots": 1, "context": 64, "cells": 64}
    expected = play(
        core(load_model(folder("llama"), "float32", kernels="torch"), disk_cache=str(tmp_path / "cpu"), **settings),
        jobs,
    )
    with fake_device():
        loaded = load_model(folder("llama"), "float32", device=FAKE)
        engine = core(loaded, device=FAKE, disk_cache=str(tmp_path / "device"), **settings)
        answers = play(engine, jobs)
        while engine.flush_when_idle():
            pass

    assert texts(expected) == texts(answers)
    assert engine.stats().context_shifts_total > 0
    assert engine.stats().written_tokens_total > 0
