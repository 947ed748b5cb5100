"""The engine on a device that is not there: the text of the CPU, one upload and one wait for each step.

Numbers are computed by the CPU, so any difference is an error of the engine and not of rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.draft.depth import FixedDepth
from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.run.device import DeviceRunner
from engine.types.request import Dry, EmbeddingInput, SamplingParams
from tests.conftest import skip_without_gpu
from tests.engine.embedder.folders import load as load_embedding_model
from tests.engine.embedder.folders import save_embedder
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import Reference, core, load_model
from tests.engine.kit.play import Answer, Job, ask, play, texts
from tests.engine.kit.speculated import Case, played
from tests.engine.test_oracle import run
from tests.fake_device import FAKE, fake_device
from tests.selection import quick

# Full and sliding windows, chunks, latent attention, recurrent layers, sinks, learned positions.
FAMILIES = ("llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "gpt_oss", "gpt2")
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.2, seed=2),
    SamplingParams(temperature=1.0, min_p=0.1, logit_bias=((3, 2.0),), seed=3),
    SamplingParams(temperature=1.0, dry=Dry(1.0), allowed_tokens=tuple(range(0, 200, 2)), seed=4),
)


def logprobs(answers: dict[str, Answer]) -> list[tuple[int, float]]:
    """All tokens with log-probabilities."""
    scored = [entry for one in answers.values() for scores in one.scored for entry in scores.entries]
    entries = [*scored, *(entry for one in answers.values() for entry in one.logprobs)]
    found = [each for entry in entries if entry is not None for each in (entry.chosen, *entry.top, *entry.labels)]
    return [(each.token, each.logprob) for each in found]


@pytest.mark.parametrize(
    "device", [pytest.param(FAKE, marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_mix_equals_generate(
    family: str, device: str, folder: Callable[[str], Path], reference: Callable[..., Reference]
) -> None:
    """In float32, except for ties."""
    if device == "cuda":
        skip_without_gpu()
    with fake_device() if device == FAKE else nullcontext():
        loaded = load_model(folder(family), "float32", device=device)
        judged = run(lambda *_: loaded, reference, family, range(1000, 1006), "float32")

    assert 100 < judged


@pytest.mark.parametrize("family", quick(["llama"], FAMILIES))
def test_text_is_that_of_the_cpu(family: str, folder: Callable[[str], Path]) -> None:
    """Prompts in chunks, shared prefixes, cancels and preemption."""
    traffic = mix(3, prompts(len(family)), scarce=True)
    settings = {"slots": traffic.slots, "chunk": traffic.chunk, "cells": traffic.cells}
    expected = play(core(load_model(folder(family), "float32", kernels="torch"), **settings), traffic.jobs)
    with fake_device():
        loaded = load_model(folder(family), "float32", device=FAKE)
        answers = play(core(loaded, **settings), traffic.jobs)

    assert isinstance(loaded.runner, DeviceRunner)
    assert texts(expected) == texts(answers)


@pytest.mark.parametrize("family", quick(["llama"], ["llama", "gemma3", "deepseek_v3"]))
def test_a_step_is_one_upload_and_one_wait(family: str, folder: Callable[[str], Path]) -> None:
    """Of sequences with different filters, whose cells are not contiguous."""
    requests = [ask(f"{at}", range(3, 12 + at), 30, sampling=own) for at, own in enumerate(SAMPLING)]
    with fake_device() as device:
        engine = core(load_model(folder(family), "float32", device=FAKE), slots=8)
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


def test_log_probabilities_take_no_other_upload_and_no_other_wait(folder: Callable[[str], Path]) -> None:
    """Beside prompt scores, whose logits need no sampled token."""
    jobs = [
        Job(ask("top", range(3, 20), 12, sampling=SAMPLING[1], logprobs=3)),
        Job(ask("labels", range(30, 50), 12, logprobs=0, label_tokens=(7, 8), score_from=0)),
        Job(ask("neither", range(7, 20), 12)),
    ]
    expected = play(core(load_model(folder("llama"), "float32", kernels="torch"), chunk=8), jobs)
    with fake_device() as device:
        engine = core(load_model(folder("llama"), "float32", device=FAKE), chunk=8)
        device.clear()
        answers = play(engine, jobs)

    assert texts(expected) == texts(answers)
    assert [token for token, _ in logprobs(expected)] == [token for token, _ in logprobs(answers)]
    assert [value for _, value in logprobs(answers)] == pytest.approx([value for _, value in logprobs(expected)], 1e-4)
    assert [engine.stats().steps_total] * 2 == [len(device.uploads), len(device.waits)]


def test_a_row_that_is_sampled_on_the_host_delays_log_probabilities_once(folder: Callable[[str], Path]) -> None:
    """Its logits are waited for, and the log-probabilities of all rows take an upload and a wait of their own."""
    on_host = (SamplingParams(seed=1, typical_p=0.8), SamplingParams(seed=2, top_n_sigma=1.0))
    jobs = [Job(ask(f"{at}", range(3, 20 + at), 12, sampling=own, logprobs=20)) for at, own in enumerate(on_host)]
    jobs.append(
        Job(ask("scored", range(30, 50), 12, sampling=SAMPLING[1], logprobs=1, label_tokens=(7,), score_from=0))
    )
    jobs.append(Job(ask("neither", range(7, 20), 12)))
    expected = play(core(load_model(folder("llama"), "float32", kernels="torch"), chunk=64), jobs)
    with fake_device() as device:
        engine = core(load_model(folder("llama"), "float32", device=FAKE), chunk=64)
        device.clear()
        answers = play(engine, jobs)
    steps = engine.stats().steps_total

    assert texts(expected) == texts(answers)
    assert [token for token, _ in logprobs(expected)] == [token for token, _ in logprobs(answers)]
    assert [value for _, value in logprobs(answers)] == pytest.approx([value for _, value in logprobs(expected)], 1e-4)
    assert [2 * steps, 3 * steps] == [len(device.uploads), len(device.waits)]


def test_pooled_states_are_those_of_the_cpu(folder: Callable[[str], Path]) -> None:
    jobs = [Job(ask(kind, range(3, 40), 0, pooling=kind)) for kind in ("mean", "last")]
    expected = play(core(load_model(folder("llama"), "float32", kernels="torch"), chunk=8), jobs)
    with fake_device():
        answers = play(core(load_model(folder("llama"), "float32", device=FAKE), chunk=8), jobs)

    for kind in ("mean", "last"):
        vector, on_cpu = (np.frombuffer(found[kind].embedded[0].vector, "<f4") for found in (answers, expected))
        assert vector == pytest.approx(on_cpu, abs=1e-5)


CASES = (
    Case("lookup", "full", 3, 7, "preempt"),
    Case("model", "window", 3, 64, "nothing"),
    Case("itself", "hybrid", 3, 7, "shift"),
    Case("right", "latent", 8, 64, "cancel"),
    Case("random", "chunk", 3, 256, "preempt"),
    Case("partly", "recurrent", 3, 7, "nothing"),
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", quick((), CASES), ids=lambda case: f"{case.drafter}, {case.kind}")
def test_drafts_change_no_text(case: Case, folder: Callable[[str], Path]) -> None:
    """Verification waits for the tokens of a step once, like a step without drafts."""
    with fake_device():
        models = cache(lambda family: load_model(folder(family), "float32", device=FAKE))
        outcome = played(case, models)

    assert [] == outcome.wrong
    assert any(drafted for drafted, _ in outcome.drafts.values())


def test_verification_of_drafts_takes_no_other_wait(folder: Callable[[str], Path]) -> None:
    prompt = (5, 6, 7, 8, 9) * 4
    with fake_device() as device:
        loaded = load_model(folder("llama"), "float32", device=FAKE)
        drafts = Speculation(LookupDrafter(OutputStore(4096)), None, FixedDepth(4), lambda: 0.0)
        engine = core(loaded, speculation=drafts)
        device.clear()
        play(engine, [Job(ask("lookup", prompt, 30))])

    assert sum(sum(one.drafted) for one in engine.stats().drafts) > 0
    assert [engine.stats().steps_total] * 2 == [len(device.uploads), len(device.waits)]


def test_context_shift_and_disk_cache_run_on_a_device(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A shift, eviction to the disk cache, and a prefix that is read from it."""
    jobs = [
        Job(ask("shift", range(3, 60), 30, overflow="shift", ignore_eos=True)),
        Job(ask("again", range(3, 60), 9), 20),
    ]
    settings = {"slots": 1, "context": 64, "cells": 64}
    expected = play(
        core(load_model(folder("llama"), "float32", kernels="torch"), disk_cache=str(tmp_path / "cpu"), **settings),
        jobs,
    )
    with fake_device():
        loaded = load_model(folder("llama"), "float32", device=FAKE)
        engine = core(loaded, disk_cache=str(tmp_path / "device"), **settings)
        answers = play(engine, jobs)
        while engine.flush_when_idle():
            pass

    assert texts(expected) == texts(answers)
    assert engine.stats().context_shifts_total > 0
    assert engine.stats().written_tokens_total > 0


@pytest.mark.parametrize("family", quick(["llama"], ["llama", "gemma3", "qwen3_next"]))
def test_eviction_to_host_memory_waits_for_no_copy(family: str, folder: Callable[[str], Path]) -> None:
    """A step has one wait, that for its tokens; a prefix that is used again is copied back."""
    jobs = [Job(ask(f"{at}", range(3 + at, 45 + at), 9), 12 * at) for at in range(5)]
    again = [Job(ask("again", range(3, 45), 9))]
    settings = {"slots": 1, "context": 64, "cells": 96, "host_cache_bytes": 2**20}
    expected_engine = core(load_model(folder(family), "float32", kernels="torch"), **settings)
    expected = play(expected_engine, jobs) | play(expected_engine, again)
    with fake_device() as device:
        engine = core(load_model(folder(family), "float32", device=FAKE), **settings)
        device.clear()
        answers = play(engine, jobs)
        waits, evicted, steps = device.waits.copy(), engine.stats().evicted_tokens_total, engine.stats().steps_total
        answers |= play(engine, again)

    assert texts(expected) == texts(answers)
    assert 100 < evicted
    assert steps == sum(line.startswith("engine/sample/device_sampling.py") for line in waits) == len(waits)
    assert 40 < engine.stats().loaded_tokens_total


@pytest.mark.parametrize("kind", quick(["bert"], ["bert", "modernbert", "t5", "qwen3", "ranker"]))
def test_embeddings_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    texts = [EmbeddingInput((5, 6, 7)), EmbeddingInput((9, 10, 11, 12, 13, 14))]
    path = save_embedder(kind, tmp_path)
    expected = load_embedding_model(path).embedder.vectors(texts)
    with fake_device():
        vectors = load_embedding_model(path, device=FAKE).embedder.vectors(texts).cpu()

    assert torch.allclose(expected, vectors, atol=1e-5)
