"""Two ranks give the text of one process.

The sums of row-parallel products are rounded in another order, so logits differ in their last bits: texts are compared,
of random models with logits far apart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.errors import ModelUnsupported
from engine.load.load import load
from engine.parallel.channel import RankLost
from engine.parallel.loading import loaded_model
from engine.parallel.runner import TensorParallelRunner
from engine.parallel.workers import Workers
from tests.engine.models import CONTEXT
from tests.engine.parallel.stories import COUNTED, STORIES, core_of, outcome, prompts
from tests.engine.play import ask

Folder = Callable[[str], Path]


def config(folder: Path, dtype: str, ranks: int) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype=dtype, context=CONTEXT, slots=4, threads=2, tensor_parallel=ranks)


def ignore(_: str) -> None:
    """Phases, and the ends of ranks, which fail the next step."""


def check_stories(folder: Path, dtype: str, ranks: int = 2) -> None:
    """Every story has the same tokens and numbers on `ranks` ranks as in one process, and did what it is about."""
    alone = load(config(folder, dtype, 1), ignore)
    expected = {name: story(alone) for name, story in STORIES.items()}
    with loaded_model(config(folder, dtype, ranks), ignore, ignore, reserved_bytes=0) as divided:
        actual = {name: story(divided) for name, story in STORIES.items()}

    for name, each in actual.items():
        assert expected[name].tokens == each.tokens, name
        assert expected[name].numbers == pytest.approx(each.numbers, abs=1e-4), name
        assert expected[name].counts == each.counts, name
        assert 0 == each.counts["failed"]
        # Cells of chunks alone never run out.
        has_full = any(layer.spec.attention_range.kind == "full" for layer in alone.layers)
        assert name not in COUNTED or each.counts[COUNTED[name]] > 0 or not has_full, name


def test_two_ranks_repeat_all_stories(folder: Folder) -> None:
    check_stories(folder("llama"), "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "mixtral", "qwen3_moe", "llama_long", "llama4", "deepseek_v3", "phi3"]
)
def test_families_repeat_all_stories(folder: Folder, family: str) -> None:
    check_stories(folder(family), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_float64_repeats_all_stories(folder: Folder, family: str) -> None:
    check_stories(folder(family), "float64")


@pytest.mark.slow
def test_recurrent_models_are_refused(folder: Folder) -> None:
    """Their layers are known when they are loaded."""
    settings = config(folder("qwen3_next"), "float32", 2)
    with (
        pytest.raises(ModelUnsupported, match="it has recurrent layers, which --tensor-parallel 2 does not support"),
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
