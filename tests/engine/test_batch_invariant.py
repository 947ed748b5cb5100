"""`--batch-invariant`: a text has the same bits in any batch and with any chunks, on a CPU and on a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from engine.errors import ModelUnsupported
from engine.load.check import selftest
from engine.run.graphs import CallRecorder, GraphRunner
from tests.conftest import skip_without_gpu
from tests.engine.kit import models
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import Answer, Job, ask, play
from tests.fake_device import FAKE, fake_device
from tests.selection import quick

Folder = Callable[[str], Path]
FAMILIES = ("qwen3_moe", "llama", "gemma3", "deepseek_v3", "gpt2", "qwen3_next")

pytestmark = pytest.mark.usefixtures("one_thread")


def scores(answer: Answer) -> list[tuple[int, float]]:
    """Tokens and log-probabilities, which show every bit of a logit."""
    return [(entry.chosen.token, entry.chosen.logprob) for entry in answer.logprobs if entry is not None]


@pytest.mark.parametrize(
    ("family", "device"),
    quick([("qwen3_moe", FAKE)], [(family, device) for family in FAMILIES for device in (FAKE, "cpu")])
    + [pytest.param(family, "cuda", marks=pytest.mark.gpu) for family in FAMILIES],
)
def test_bits_of_a_text_do_not_depend_on_the_batch(
    family: str, device: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, in recorded steps too: alone in one chunk, and among others in small chunks."""
    if device == "cuda":
        skip_without_gpu()
    monkeypatch.setattr(selftest, "recorder_for", lambda device: CallRecorder())
    jobs = [Job(ask(f"{at}", range(3 + at, 14 + 5 * at), 5, logprobs=1, ignore_eos=True)) for at in range(3)]
    with fake_device() if device == FAKE else nullcontext():
        loaded = load_model(folder(family), "bfloat16", device=device, batch_invariant=True)
        together = play(core(loaded, chunk=7), jobs)
        for job in jobs:
            alone = play(core(loaded, slots=1), [job])
            assert scores(alone[job.request.id]) == scores(together[job.request.id])

    assert loaded.info.batch_invariant
    assert isinstance(loaded.runner, GraphRunner) == (device != "cpu")


# The hidden size and the experts of Qwen3-30B-A3B: in bfloat16 torch's products show no other algorithm below.
WIDE: dict[str, Any] = {"hidden_size": 2048, "moe_intermediate_size": 768, "initializer_range": 0.02}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{family}_wide": (models.FAMILIES[family][0], models.FAMILIES[family][1] | WIDE)
        for family in ("qwen3_moe", "deepseek_v2", "deepseek_v3")
    },
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}
# One for each mechanism: no refusal is accepted.
SUPPORTED = [
    ("qwen3_moe_wide", "bfloat16", "none", "auto"),
    ("deepseek_v3", "bfloat16", "none", "int8"),
    ("bloom", "float32", "none", "int8"),
    ("llama", "float32", "int8", "int8"),
    ("opt", "bfloat16", "none", "float16"),
]
CASES = list(
    itertools.product(
        sorted({*models.FAMILIES, *MORE}),
        ("float32", "bfloat16", "float16"),
        ("none", "int8", "int4"),
        ("auto", "int8", "bfloat16", "float16"),
    )
)


@pytest.mark.parametrize(
    ("family", "dtype", "quantize", "kv_dtype"),
    quick(SUPPORTED, CASES),
)
def test_capabilities_hold(
    family: str, dtype: str, quantize: str, kv_dtype: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a text alone are those in chunks among others, unless the load refuses the option."""
    for name, entry in MORE.items():
        monkeypatch.setitem(models.FAMILIES, name, entry)
    settings = {"quantize": quantize, "kv_dtype": kv_dtype, "batch_invariant": True}
    try:
        loaded = load_model(folder(family), dtype, **settings)
    except ModelUnsupported as error:
        if (family, dtype, quantize, kv_dtype) in SUPPORTED:
            raise
        pytest.skip(str(error))
    jobs = [Job(ask(f"{at}", range(3 + at, 14 + 5 * at), 5, logprobs=1, ignore_eos=True)) for at in range(8)]
    together = play(core(loaded, chunk=7), jobs)

    assert loaded.info.batch_invariant
    for job in jobs:
        alone = play(core(loaded, slots=1), [job])
        assert scores(alone[job.request.id]) == scores(together[job.request.id])


@pytest.mark.slow
def test_any_mix_has_the_bits_of_each_text_alone(folder: Folder) -> None:
    """Prefix hits, cancels and preemption."""
    with fake_device():
        loaded = load_model(folder("llama"), "bfloat16", device=FAKE, batch_invariant=True)
        traffic = mix(3, prompts(5), scarce=True)
        answers = play(traffic.core(loaded), traffic.jobs)
        for job in traffic.jobs:
            alone = play(core(loaded, slots=1), [Job(job.request)])[job.request.id].tokens
            tokens = answers[job.request.id].tokens
            assert tokens == (alone if job.leaves is None else alone[: len(tokens)])


def test_settings_that_exclude_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_invariant is for float32, bfloat16 and float16, not float64"):
        EngineConfig(batch_invariant=True, dtype="float64")
    with pytest.raises(ConfigError, match="batch_invariant True is not supported with --tensor-parallel 2"):
        EngineConfig(batch_invariant=True, tensor_parallel=2)
