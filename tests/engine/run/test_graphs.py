"""Recorded steps, replayed by calls on a device that is not there: the text of the CPU in any mix.

A replay computes what was recorded for other sequences, so any number that is not read anew is an error of the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.draft.depth import FixedDepth
from engine.draft.forced import ForcedDrafter
from engine.draft.loading import make_speculation
from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.kernels import reference
from engine.load.check import selftest
from engine.load.check.checking import EarlierChecks, ModelChecks
from engine.load.recording import record_steps
from engine.run.graphs import CallRecorder, GraphRunner, Replay
from engine.types.request import SamplingParams
from kvcache.spec import Span
from tests.conftest import skip_without_gpu
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import CONTEXT, Reference, core, load_model
from tests.engine.kit.play import Job, ask, play, texts
from tests.engine.kit.speculated import Case, played
from tests.engine.test_oracle import run
from tests.fake_device import FAKE, fake_device
from tests.selection import quick

Folder = Callable[[str], Path]
LOOPS = (
    Case("itself", "full", 3, 7, "nothing"),
    Case("model", "window", 8, 64, "preempt"),
    Case("itself", "latent", 3, 256, "shift"),
    Case("itself", "hybrid", 3, 7, "cancel"),
)
# Full and sliding windows, chunks, latent attention, sinks, learned positions, recurrent layers.
FAMILIES = (
    *("llama", "gemma3", "llama4", "deepseek_v3", "gpt_oss", "gpt2"),
    *("qwen3_next", "mamba", "mamba2", "jamba", "lfm2"),
)


class CountingRecorder(CallRecorder):
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, function: Callable[[], Tensor]) -> Replay:
        self.recorded += 1
        function()

        def replay() -> Tensor:
            self.replayed += 1
            return function()

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingRecorder]:
    """That of all models loaded in the test."""
    counting = CountingRecorder()
    monkeypatch.setattr(selftest, "recorder_for", lambda device: counting)
    with fake_device():
        yield counting


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    quick([("gemma3", "float32"), ("qwen3_next", "float32")], itertools.product(FAMILIES, ("float32", "int8"))),
)
def test_text_is_that_of_the_cpu(family: str, kv_dtype: str, folder: Folder, recorder: CountingRecorder) -> None:
    """Batches of all sizes, prompts in chunks, shared prefixes, cancels and preemption."""
    expected_model = load_model(folder(family), "float32", kernels="torch", kv_dtype=kv_dtype)
    loaded = load_model(folder(family), "float32", device=FAKE, kv_dtype=kv_dtype)
    traffic = mix(3, prompts(len(family)), scarce=True)
    jobs = traffic.jobs[:7]
    settings = {"slots": traffic.slots, "chunk": traffic.chunk, "cells": traffic.cells}
    expected = play(core(expected_model, **settings), jobs)
    answers = play(core(loaded, **settings), jobs)

    assert texts(expected) == texts(answers)
    assert recorder.replayed > 3 * recorder.recorded > 0


def test_a_recorded_step_serves_many_batches(folder: Folder, recorder: CountingRecorder) -> None:
    """One upload and one wait a step; a shift moves its cells, and logprobs are those of the step."""
    loaded = load_model(folder("llama"), "float32", device=FAKE)
    jobs = [
        Job(ask("shift", range(3, 50), 40, overflow="shift", ignore_eos=True)),
        Job(ask("logprobs", range(3, 12), 20, logprobs=2, sampling=SamplingParams(temperature=0.7, seed=1)), 5),
    ]
    settings = {"slots": 2, "context": 64}
    before = recorder.recorded
    answers = play(core(loaded, **settings), jobs)
    expected = play(core(load_model(folder("llama"), "float32", kernels="torch"), **settings), jobs)

    assert texts(expected) == texts(answers)
    own, other = ([each.chosen.logprob for each in found["logprobs"].logprobs] for found in (expected, answers))
    assert 20 == len(own)
    assert own == pytest.approx(other, abs=1e-4)
    assert 2 == recorder.recorded - before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mixes"), [("llama", 6), ("gemma3", 6), ("gpt_oss", 6), ("deepseek_v3", 6), ("qwen3_next", 3)]
)
def test_any_mix_equals_generate(
    family: str, mixes: int, folder: Folder, reference: Callable[..., Reference], recorder: CountingRecorder
) -> None:
    """The text of transformers' `generate`, in float32 except for ties."""
    loaded = load_model(folder(family), "float32", device=FAKE)
    judged = run(lambda *_: loaded, reference, family, range(1006 - mixes, 1006), "float32")
    judged += run(lambda *_: loaded, reference, family, range(1006, 1008), "float32", scarce=True)

    assert 100 < judged
    assert recorder.replayed > 17 * mixes


@pytest.mark.parametrize("family", quick(("llama",), ("llama", "deepseek_v3", "qwen3_next")))
def test_all_steps_are_recorded_before_the_first_request(
    family: str, folder: Folder, recorder: CountingRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """None is recorded later, and a recorded one has none of the recording's tokens. The log has their number."""
    loaded = load_model(folder(family), "float32", device=FAKE)
    jobs = [Job(ask(f"{at}", range(3, 12 + at), 20, ignore_eos=True), at) for at in range(5)]
    engine, config = core(loaded, slots=5), EngineConfig(device=FAKE, drafter="none")
    phases: list[str] = []
    with caplog.at_level("INFO", "cellar.engine"):
        record_steps(config, loaded, engine.cache, phases.append)
    recorded = recorder.recorded
    answers = play(engine, jobs)

    assert texts(play(core(load_model(folder(family), "float32", kernels="torch"), slots=5), jobs)) == texts(answers)
    assert recorded == recorder.recorded
    assert recorder.replayed > 20
    assert ["graphs"] == phases
    # Batches of 1, 2, 4 and 8 tokens, over the only size of the context.
    assert "graphs: 4 recorded in" in caplog.text


def test_draft_tokens_are_rows_of_a_recorded_step(folder: Folder, recorder: CountingRecorder) -> None:
    """Accepted and rejected ones, of repeated text; the text is that without drafts."""
    prompt = [*range(3, 20), *range(3, 15)]
    jobs = [Job(ask(f"{at}", prompt[at:], 40, ignore_eos=True), at) for at in range(3)]
    loaded = load_model(folder("gemma3"), "float32", device=FAKE)
    settings = {"slots": 3, "context": 128}
    lookup = Speculation(LookupDrafter(OutputStore(4096)), None, FixedDepth(4), lambda: 0.0, forced=ForcedDrafter())
    engine = core(loaded, speculation=lookup, **settings)
    answers = play(engine, jobs)
    expected = play(core(load_model(folder("gemma3"), "float32", kernels="torch"), **settings), jobs)
    drafted, accepted = (
        sum(sum(getattr(one, name)) for one in engine.stats().drafts) for name in ("drafted", "accepted")
    )

    assert texts(expected) == texts(answers)
    assert drafted > accepted > 2
    assert recorder.replayed > 5 * recorder.recorded > 0


SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.1, top_p=0.9, top_k=30, min_p=0.01, seed=2),
)


def test_a_draft_is_one_upload_and_one_wait(folder: Folder, recorder: CountingRecorder) -> None:
    """Drafts of the model itself: nearly all are accepted, so their noise and filters are those of the text."""
    target, draft = (load_model(folder("llama"), "float32", device=FAKE) for _ in range(2))
    expected_target = load_model(folder("llama"), "float32", kernels="torch")
    jobs = [Job(ask(f"{at}", range(3, 12 + at), 40, sampling=own, ignore_eos=True)) for at, own in enumerate(SAMPLING)]
    config = EngineConfig(device=FAKE, drafter="model", draft_tokens=5)
    with fake_device() as device:
        speculation = make_speculation(config, target, draft, lambda: 0.0)
        engine = core(target, slots=3, speculation=speculation)
        record_steps(config, target, engine.cache, lambda phase: None)
        recorded = recorder.recorded
        device.clear()
        answers = play(engine, jobs)
        transfers = [each.line.split(":")[0] for each in device.transfers]
    drafts = next(one for one in engine.stats().drafts if one.kind == "model")
    loops = sum(line == "engine/run/graphs.py" for line in transfers)

    assert texts(play(core(expected_target, slots=3), jobs)) == texts(answers)
    assert sum(drafts.drafted) > 60
    assert sum(drafts.accepted) > 0.95 * sum(drafts.drafted)
    # Upload and wait of a draft, then upload and wait of a step.
    assert loops > 5
    assert engine.stats().steps_total + loops == transfers.count("kvcache/staging.py")
    assert engine.stats().steps_total == transfers.count("engine/sample/device_sampling.py")
    assert recorder.recorded == recorded


def test_a_draft_model_records_the_graphs_of_its_plan(folder: Folder, recorder: CountingRecorder) -> None:
    """Steps of up to 6 tokens, and loops of up to 3 sequences; a longer first step is computed before the loop."""
    draft, config = load_model(folder("llama"), "float32", device=FAKE), EngineConfig(device=FAKE)
    cache, before = core(draft, slots=3).cache, recorder.recorded
    record_steps(config, draft, cache, lambda phase: None, draft_vocabulary=50)
    runner = draft.runner
    forward = cache.forward([Span(slot, 0, 4) for slot in range(3)])

    assert 4 + 3 == recorder.recorded - before
    assert isinstance(runner, GraphRunner)
    assert [True, False] == [runner.supports_draft_loop(forward, tokens) for tokens in (8, 9)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", quick((), LOOPS), ids=lambda case: f"{case.drafter}, {case.kind}")
def test_drafts_of_a_loop_change_no_text(case: Case, folder: Folder, recorder: CountingRecorder) -> None:
    """With grammars, penalties and biases too, for which there is no loop."""
    models = cache(lambda family: load_model(folder(family), "float32", device=FAKE))
    outcome = played(case, models)

    assert [] == outcome.wrong
    assert any(drafted for drafted, _ in outcome.drafts.values())


def test_a_model_that_cannot_be_recorded_runs_as_before(
    folder: Folder, recorder: CountingRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning that has the reason."""

    def fail(function: Callable[[], Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "record", fail)
    loaded = load_model(folder("llama"), "float32", device=FAKE)
    job = Job(ask("one", range(3, 30), 9))
    answers = play(core(loaded), [job])

    assert texts(play(core(load_model(folder("llama"), "float32", kernels="torch")), [job])) == texts(answers)
    assert 1 == caplog.text.count("steps are not recorded, and slower: operation not permitted")


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_of_several_ranks_are_not_recorded(folder: Folder, recorder: CountingRecorder, ranks: int) -> None:
    """A replay of rank 0 alone would not broadcast its step; the reason of the runner names it."""
    loaded = load_model(folder("llama"), "float32", device=FAKE)
    checks = EarlierChecks("", torch.float32, torch.float32, reference.attend, file=None, outcome=None)
    load = ModelChecks(EngineConfig(kernels="torch", tensor_parallel=ranks), loaded.model, checks, surveys=False)
    load.set_traits(loaded.info.vocabulary, recurrent=False, encoder=None)
    load.find_runner("some")
    selection, _ = load.select(None, context=CONTEXT)

    assert (ranks == 1) == isinstance(selection.runner, GraphRunner)
    assert (ranks > 1) == ("--tensor-parallel 2 is computed by torch, without CUDA graphs" == selection.reason)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_has_the_bits_of_its_kernels(family: str, dtype: str, folder: Folder) -> None:
    """Of a batch without padding: the libraries of a GPU choose kernels by the size of the batch."""
    skip_without_gpu()
    jobs = [Job(ask(f"{at}", range(3 + at, 20 + at), 30, ignore_eos=True, logprobs=2)) for at in range(4)]
    graphs, eager = (
        play(core(load_model(folder(family), dtype, device="cuda", enforce_eager=each)), jobs) for each in (False, True)
    )

    for job in jobs:
        assert eager[job.request.id].tokens == graphs[job.request.id].tokens
        assert eager[job.request.id].logprobs == graphs[job.request.id].logprobs
