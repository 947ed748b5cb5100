"""Keys and values stored in another type than that of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ModelUnsupported
from engine.load.load import LoadedModel, load
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import Answer, Job, ask, play
from tests.selection import quick

Load = Callable[..., LoadedModel]
HALVES = ("bfloat16", "float16")
# The largest mean divergence, in nats.
ROUNDING = {"float16": 1e-6, "bfloat16": 1e-4, "int8": 5e-4}
TEXT = "Cellar keeps the keys and values of every token in cells, and sequences that begin alike share them."


@pytest.fixture(scope="module")
def stored(folder: Callable[[str], Path]) -> Load:
    """A tiny model with a KV cache of some type."""
    torch.set_num_threads(1)
    return cache(lambda family, kv_dtype, dtype="float64": load_model(folder(family), dtype, kv_dtype=kv_dtype))


@pytest.fixture(scope="module")
def bundled() -> Load:
    """The bundled model with a KV cache of some type."""
    return cache(lambda kv_dtype: load(EngineConfig(kv_dtype=kv_dtype, context=256, slots=2), lambda phase: None))


def logits(loaded: LoadedModel, tokens: list[int], *chunks: int) -> Tensor:
    """The logits after each token of a prompt that is computed in chunks."""
    specs = [plan.spec for plan in loaded.layers]
    some = Cache(specs, slots=1, capacity=len(tokens), cells=len(tokens), dtype=loaded.kv_dtype)
    rows, start = [], 0
    for length in chunks or (len(tokens),):
        with some.forward([Span(0, start, length)]) as forward:
            rows.append(
                loaded.runner.run(
                    StepInput(forward, tokens[start : start + length], list(range(length)), encoder_masks=[None])
                ).logits
            )
        start += length
    return torch.cat(rows)


def divergence(right: Tensor, other: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of each row, in nats."""
    expected, actual = right.log_softmax(-1), other.log_softmax(-1)
    return (expected.exp() * (expected - actual)).sum(-1)


def alone(loaded: LoadedModel, job: Job) -> Answer:
    """The answer of an engine without other requests and an empty cache."""
    return play(core(loaded, slots=1, chunk=256), [Job(job.request)])[job.request.id]


@pytest.mark.parametrize(
    ("family", "scarce"),
    quick(
        [("gemma2", False), ("deepseek_v3", True)], itertools.product(("llama", "gemma2", "deepseek_v3"), (False, True))
    ),
)
def test_any_mix_equals_separate_runs(family: str, scarce: bool, stored: Load) -> None:
    """With chunks, shared prefixes, copies and preemption, int8 cells included."""
    loaded, pool = stored(family, "int8"), prompts(5)
    for seed in range(2):
        some = mix(seed, pool, scarce=scarce)
        answers = play(some.core(loaded), some.jobs)
        for job in some.jobs:
            expected = alone(loaded, job).tokens
            output = answers[job.request.id].tokens
            assert output == (expected if job.leaves is None else expected[: len(output)])


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_logits_are_equal_in_any_chunks(family: str, stored: Load) -> None:
    """Tokens read the quantised keys of their own chunk as well."""
    loaded = stored(family, "int8")
    tokens = list(range(3, 43))
    expected = logits(loaded, tokens)

    torch.testing.assert_close(logits(loaded, tokens, *[1] * 40), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(loaded, tokens, 17, 1, 22), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    quick(
        [("llama", "float16"), ("gemma2", "bfloat16"), ("minicpm3", "int8"), ("gpt2", "int8")],
        itertools.product(("llama", "gemma2", "minicpm3", "gpt2"), ROUNDING),
    ),
)
def test_kv_rounding_of_a_float32_model_is_small(family: str, kv_dtype: str, stored: Load) -> None:
    """The distributions hardly change."""
    tokens = list(range(7, 47))
    exact, rounded = (logits(stored(family, name, "float32"), tokens) for name in ("auto", kv_dtype))
    lost = divergence(exact, rounded)

    assert 0 < float(lost.mean()) < ROUNDING[kv_dtype]


@pytest.mark.parametrize(("kv_dtype", "most"), [("float16", 1e-6), ("bfloat16", 1e-4), ("int8", 1e-3)])
def test_kv_rounding_of_the_bundled_model_is_small(kv_dtype: str, most: float, bundled: Load) -> None:
    """On English text: a thousandth of a nat a token at most; the text has several."""
    exact, rounded = bundled("auto"), bundled(kv_dtype)
    tokens = exact.tokenizer.encode(TEXT)

    assert 0 < float(divergence(logits(exact, tokens), logits(rounded, tokens)).mean()) < most


def test_cell_bytes_follow_the_kv_dtype(bundled: Load) -> None:
    """In 16 bits half of float32; in int8 a byte a column, and the scales."""
    plans = {name: bundled(name).memory for name in ("float32", *HALVES, "int8")}
    whole = plans["float32"].cell_bytes
    (width,) = {plan.spec.key_width for plan in bundled("auto").layers}

    assert {whole // 2} == {plans[name].cell_bytes for name in HALVES}
    assert whole * (width + 4) == plans["int8"].cell_bytes * 4 * width
    for name, plan in plans.items():
        groups = core(bundled(name), slots=2, context=256).cache.groups
        planes = [plane for group in groups for plane in (group.pool.keys, group.pool.values)]
        assert plan.cache_bytes == sum(tensor.nbytes for plane in planes for tensor in plane.tensors.values())


@pytest.mark.parametrize("kv_dtype", ["float32", "float64", *HALVES, "int8"])
def test_context_shifts_with_every_kv_dtype(kv_dtype: str, stored: Load) -> None:
    """And all cells have that type."""
    loaded = stored("llama", kv_dtype, "float32")
    engine = core(loaded, slots=2, context=32)
    answer = play(engine, [Job(ask("one", range(3, 20), 60, overflow="shift", ignore_eos=True))])["one"]

    assert getattr(torch, kv_dtype) == loaded.kv_dtype == engine.cache.groups[0].pool.dtype
    assert 60 == len(answer.tokens)


def test_a_kv_dtype_too_small_for_the_keys_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Keys beyond the largest float16 would be infinite: an error at load names the setting."""
    for file in folder("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: tensor * (1e6 if "k_proj" in name else 1) for name, tensor in weights.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    assert load_model(tmp_path, "float32").layers
    with pytest.raises(ModelUnsupported, match=r"do not fit into torch.float16; choose another --kv-dtype"):
        load_model(tmp_path, "float32", kv_dtype="float16")
