"""Two ranks give the text of one process.

The sums of row-parallel products are rounded in another order, so logits differ in their last bits: texts are compared,
of random models with logits far apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from engine.config import EngineConfig
from engine.draft.loading import load_draft, make_speculation
from engine.errors import ModelUnsupported
from engine.load.load import LoadedModel, load
from engine.parallel.channel import RankLost
from engine.parallel.loading import loaded_model
from engine.parallel.runner import TensorParallelRunner
from engine.parallel.workers import Workers
from tests.engine.kit.models import CONTEXT
from tests.engine.kit.play import ask
from tests.engine.parallel.stories import COUNTED, STORIES, core_of, outcome, prompts

Folder = Callable[[str], Path]


def config(folder: Path, dtype: str, ranks: int, **settings: Any) -> EngineConfig:
    """Two threads in all."""
    options = {"context": CONTEXT, "slots": 4, "threads": 2, "tensor_parallel": ranks, **settings}
    return EngineConfig(model=str(folder), dtype=dtype, **options)


def ignore(_: str) -> None:
    """Phases, and the ends of ranks, which fail the next step."""


def check_stories(folder: Path, dtype: str, names: Collection[str] = STORIES.keys(), **settings: Any) -> None:
    """Every story has the same tokens and numbers on two ranks as in one process, and did what it is about."""
    alone = load(config(folder, dtype, 1, **settings), ignore)
    stories = {name: STORIES[name] for name in names}
    expected = {name: story(alone) for name, story in stories.items()}
    with loaded_model(config(folder, dtype, 2, **settings), ignore, ignore, reserved_bytes=0) as divided:
        assert 1 == torch.get_num_threads()
        actual = {name: story(divided) for name, story in stories.items()}

    for name, each in actual.items():
        assert expected[name].tokens == each.tokens, name
        assert expected[name].numbers == pytest.approx(each.numbers, abs=1e-4), name
        assert expected[name].counts == each.counts, name
        assert 0 == each.counts["failed"]
        # Cells of chunks alone never run out.
        has_full = any(layer.spec.attention_range.kind == "full" for layer in alone.layers)
        assert name not in COUNTED or each.counts[COUNTED[name]] > 0 or not has_full, name


def test_two_ranks_repeat_shifts(folder: Folder) -> None:
    check_stories(folder("llama"), "float32", ("shifts",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3", "mixtral", "qwen3_moe", "llama_long", "llama4", "deepseek_v3", "phi3"]
)
def test_families_repeat_all_stories(folder: Folder, family: str) -> None:
    check_stories(folder(family), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_float64_repeats_all_stories(folder: Folder, family: str) -> None:
    check_stories(folder(family), "float64")


@pytest.mark.slow
def test_int8_cells_repeat_all_stories(folder: Folder) -> None:
    check_stories(folder("llama"), "float32", kv_dtype="int8")


@pytest.mark.slow
def test_a_draft_model_is_whole_on_rank_0(folder: Folder) -> None:
    """Its drafts are nearly always right here: it is the model itself."""
    settings = config(folder("llama"), "float32", 2, drafter="model", draft_model=str(folder("llama")), draft_tokens=3)
    jobs = [ask(f"{at}", prompt, 24, ignore_eos=True) for at, prompt in enumerate(prompts())]
    alone = load(config(folder("llama"), "float32", 1), ignore)
    expected = outcome(core_of(alone, slots=4, cells=512, context=128), jobs)
    with loaded_model(settings, ignore, ignore, reserved_bytes=0) as divided:
        draft = load_draft(settings, divided, ignore)
        assert isinstance(draft, LoadedModel)
        heads = [model.layers[0].spec.heads for model in (draft, divided)]
        speculation = make_speculation(settings, divided, draft, time.monotonic)
        actual = outcome(core_of(divided, slots=4, cells=512, context=128, speculation=speculation), jobs)

    assert [2, 1] == heads
    assert expected.tokens == actual.tokens
    assert actual.counts["accepted"] > 0.9 * actual.counts["drafted"] > 0


@pytest.mark.slow
def test_a_step_that_fails_on_rank_0_ends_the_engine(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers wait inside the forward: their processes are ended, not waited for."""
    reasons: list[str] = []

    def fail(*_: object) -> None:
        raise MemoryError

    with loaded_model(config(folder("llama"), "float32", 2), ignore, reasons.append, reserved_bytes=0) as divided:
        assert isinstance(divided.runner, TensorParallelRunner)
        workers = divided.runner.workers
        monkeypatch.setattr(divided.runner, "_runner", SimpleNamespace(run=fail))
        core = core_of(divided, slots=4, cells=512, context=128)
        failed = [outcome(core, [ask(name, prompts()[0], 8)]).counts["failed"] for name in ("one", "two")]

    assert [1, 2] == failed
    assert ["a step failed on rank 0, which left the ranks out of step"] == reasons
    assert not any(psutil.pid_exists(pid) for pid in workers.pids)


@pytest.mark.slow
def test_recurrent_models_are_refused(folder: Folder) -> None:
    """Their layers are known when they are loaded."""
    settings = config(folder("qwen3_next"), "float32", 2)
    with (
        pytest.raises(ModelUnsupported, match="--tensor-parallel 2 does not support it: it has recurrent layers"),
        loaded_model(settings, ignore, ignore, reserved_bytes=0),
    ):
        pass


@pytest.mark.slow
def test_a_step_is_one_broadcast(folder: Folder) -> None:
    """Of 2 KiB, for four sequences with short chunks of prompts; so is the size of the cache before."""
    with loaded_model(config(folder("llama"), "float32", 2), ignore, ignore, reserved_bytes=0) as divided:
        assert isinstance(divided.runner, TensorParallelRunner)
        before = divided.runner.workers.sent_bytes
        core = core_of(divided, slots=4, cells=512, context=128)
        outcome(core, [ask(f"{at}", prompt, 24, ignore_eos=True) for at, prompt in enumerate(prompts())])
        sent = divided.runner.workers.sent_bytes - before

    assert 2048 * (core.stats().steps_total + 1) == sent


def test_a_worker_that_dies_before_it_joins_is_an_error(folder: Folder) -> None:
    """Not a wait: the reason is reported, too."""
    reasons: list[str] = []
    workers = Workers(config(folder("llama"), "float32", 2), reasons.append)
    psutil.Process(workers.pids[0]).kill()

    with pytest.raises(RankLost):
        workers.join()
    workers.close()
    assert ["the process of rank 1 ended with code -9"] == reasons
