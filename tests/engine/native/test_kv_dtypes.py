"""The native step stores keys and values as kvcache/kv_buffer.py does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engine.native.runner import NativeRunner
from engine.native.step_library import step_library
from engine.run.runner import runners_of
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.kv_buffer import CellIndex, Int8KVBuffer
from kvcache.spec import Span
from tests.engine.kit.models import load_model
from tests.engine.kit.tiny import settings
from tests.engine.native.decoders import Steps, TinyModel, Weights, model_of_config, native, token
from tests.engine.native.test_step import MIXED, SOME, decoder_of
from tests.libraries import built
from tests.selection import quick

built("step")
pytestmark = pytest.mark.usefixtures("one_thread")

INT8 = torch.int8


# Sums of float32 in another order change a code by at most this before it is rounded.
TIE = 3e-4


def all_buffers(cache: Cache) -> list[Int8KVBuffer]:
    """The KV buffers of all groups."""
    found = [buffer for group in cache.groups for buffer in (group.pool.keys, group.pool.values)]
    assert all(isinstance(buffer, Int8KVBuffer) for buffer in found)
    return cast("list[Int8KVBuffer]", found)


def adopt_codes(to: Int8KVBuffer, native: Int8KVBuffer, layer: int, cells: CellIndex, rows: Tensor) -> int:
    """Replace the codes of `rows` by the native ones, asserted to be these rows rounded; the number of codes.

    A native code may differ from the modules' by one, where the number before rounding is within TIE of a tie.
    """
    if not to.parts:
        return 0
    scales = to.scales[layer][:, cells].repeat_interleave(torch.tensor(to.parts), -1)
    exact = to.transform(rows) / scales
    codes = native.codes[layer][:, cells]
    torch.testing.assert_close(native.scales[layer][:, cells], to.scales[layer][:, cells], rtol=1e-5, atol=0)
    assert float((codes - exact).abs().max()) < 0.5 + TIE
    to.codes[layer][:, cells] = codes
    return codes.numel()


def largest_error(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> float:
    """The error of the native step with int8 cells, relative to the largest logit.

    The modules adopt the native codes: after a code that is rounded the other way all following numbers differ.
    """
    reference, own = (model.cache(runner, INT8) for runner in (model.packed, model.runner))
    native_buffers = dict(zip(all_buffers(reference), all_buffers(own), strict=True))
    write, checked = Int8KVBuffer.write, 0

    def write_native_codes(buffer: Int8KVBuffer, layer: int, cells: CellIndex, rows: Tensor) -> None:
        nonlocal checked
        write(buffer, layer, cells, rows)
        checked += adopt_codes(buffer, native_buffers[buffer], layer, cells, rows)

    monkeypatch.setattr(Int8KVBuffer, "write", write_native_codes)
    sizes, errors = [], []
    for step in MIXED:
        actual, _ = model.step(own, model.runner, step)
        expected, _ = model.step(reference, model.packed, step)
        sizes.append(float(expected.abs().max()))
        errors.append(float((expected - actual).abs().max()))
    of_a_token = sum(buffer.codes[:, :, 0].numel() for buffer in native_buffers)
    assert checked == of_a_token * sum(rows for step in MIXED for _, rows in step)
    return max(errors) / max(sizes)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gpt_neox", "gpt_oss", "olmo2", "lfm2", "deepseek_v3", "gemma4_text"]
)
def test_int8_cells_equal_the_modules(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and logits, within rounding."""
    assert largest_error(native(family), monkeypatch) < 1e-5


@pytest.mark.parametrize("width", [6, 10, 12, 20])
def test_int8_heads_of_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hadamard block is the largest power of two that divides the width."""
    model = model_of_config(AutoConfig.for_model("llama", **{**settings("llama"), "head_dim": width}))

    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    assert largest_error(model, monkeypatch) < 1e-5


@pytest.mark.parametrize("weights", quick((8,), (32, 8, 4)))
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_int8_bits_do_not_depend_on_the_batch(family: str, weights: Weights) -> None:
    """Nor on chunks and threads."""
    model, length = native(family, weights), 21
    alone: Steps = [((slot, 1),) for slot in range(8) for _ in range(length)]
    batch: Steps = [[(slot, 1) for slot in range(8)] for _ in range(length)]
    chunks: Steps = [((slot, rows),) for slot in range(8) for rows in (7, 1, 13)]
    expected, _ = model.states(model.runner, alone, INT8)

    assert torch.equal(expected, model.states(model.runner, batch, INT8)[0])
    torch.set_num_threads(3)
    assert torch.equal(expected, model.states(model.runner, chunks, INT8)[0])


@pytest.mark.parametrize("variant", SOME)
def test_int8_codes_of_every_variant_equal_the_modules(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = native("qwen3")
    runner = NativeRunner(model.packed, decoder_of(model), step_library(variant))

    assert largest_error(replace(model, runner=runner), monkeypatch) < 1e-5


def test_nan_row_in_int8_affects_its_sequence_only() -> None:
    model, steps = native("llama"), (((0, 5), (1, 5)), ((0, 1), (1, 1)))
    expected, _ = model.states(model.runner, steps, INT8)
    weight = model.model.get_input_embeddings().weight
    before = weight[token(1, 0)].clone()
    weight[token(1, 0)] = torch.nan
    try:
        actual, _ = model.states(model.runner, steps, INT8)
    finally:
        weight[token(1, 0)] = before

    assert torch.equal(expected[:6], actual[:6])
    assert actual[6:].isnan().all()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_kv_dtype_int8_runs_natively(family: str, quantize: str, folder: Callable[[str], Path]) -> None:
    loaded = load_model(folder(family), "float32", kv_dtype="int8", quantize=quantize)
    some = Cache([plan.spec for plan in loaded.layers], slots=1, capacity=8, cells=8, dtype=loaded.kv_dtype)

    assert isinstance(runners_of(loaded.runner)[0], NativeRunner)
    with some.forward([Span(0, 0, 3)]) as forward:
        loaded.runner.run(StepInput(forward, [5, 6, 7], [2]))


def test_unsupported_kv_dtype_is_logged(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cellar.engine"):
        loaded = load_model(folder("llama"), "float32", kv_dtype="float16")

    assert not isinstance(runners_of(loaded.runner)[0], NativeRunner)
    assert 1 == sum("keys and values are stored as torch.float16" in line for line in caplog.messages)
