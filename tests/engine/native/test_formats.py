"""Quantised matrices of all formats in the native step, several formats in a layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.native.runner import NativeRunner
from engine.run.runner import runners_of
from tests.engine.kit.tiny import settings
from tests.engine.native.decoders import Steps, TinyModel, model_of_config
from tests.libraries import built
from tests.selection import quick

built("step")

STEPS: Steps = (((0, 9), (1, 30)), ((2, 17), (0, 1), (1, 3)), ((0, 1), (1, 1), (2, 1)), ((0, 40), (2, 1)))
# Layers have a superblock and a part of one.
SIZES = {"hidden_size": 288, "intermediate_size": 320}
MIXES: dict[str, Sequence[WeightFormat]] = {
    "q4_k_m": ("q4_k", "q4_k", "q6_k"),
    "small columns": ("q5_0", "q8_0", "q5_0"),
    "all": tuple(LAYOUTS),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def quantised(family: str, formats: Sequence[WeightFormat], gate_parts: int = 1, **others: int) -> TinyModel:
    """A tiny model with matrices of some formats, in the native step."""
    config = AutoConfig.for_model(family, **{**settings(family), **others})
    model = model_of_config(config, formats=formats, gate_parts=gate_parts)
    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    return model


def errors(model: TinyModel) -> Tensor:
    """The differences of the logits to those of the modules by rows, relative to the largest logit."""
    expected, actual = (model.states(runner, STEPS)[0] for runner in (model.packed, model.runner))
    return (expected - actual).abs().amax(1) / expected.abs().max()


@pytest.mark.parametrize(
    ("family", "mix"),
    quick(
        [("llama", "q4_k_m"), ("llama", "small columns"), ("gemma3_text", "all")],
        itertools.product(("llama", "gemma3_text"), MIXES),
    ),
)
def test_mixed_formats_equal_the_modules(family: str, mix: str) -> None:
    """In the other rows a code of a row differs by rounding, in this layer or a row before."""
    found = errors(quantised(family, MIXES[mix], **SIZES))

    assert float(found.quantile(0.25)) < 1e-5
    assert float(found.max()) < 0.1


@pytest.mark.parametrize(
    ("family", "formats"),
    quick(
        [("gpt_oss", ("mxfp4",)), ("mixtral", ("q4_k", "q6_k")), ("gpt_oss", ("q5_1", "iq4_xs"))],
        itertools.product(("gpt_oss", "mixtral"), (("mxfp4",), ("q4_k", "q6_k"), ("q5_1", "iq4_xs"))),
    ),
    ids=str,
)
def test_experts_equal_the_modules(family: str, formats: Sequence[WeightFormat]) -> None:
    """In some rows a code of a row or the choice of an expert differs by rounding."""
    found = errors(quantised(family, formats))

    assert float(found.quantile(0.5)) < 1e-5
    assert float(found.max()) < 0.2


def test_gates_and_ups_of_two_formats_equal_the_modules() -> None:
    """As above; the matrices of an expert are those of the gates, of the ups, and down projections."""
    model = quantised("mixtral", ("q4_k", "q6_k"), gate_parts=2)
    found = errors(model)

    assert float(found.quantile(0.5)) < 1e-5
    assert float(found.max()) < 0.2


def test_gates_and_ups_that_alternate_are_not_native_in_two_formats() -> None:
    config = AutoConfig.for_model("gpt_oss", **settings("gpt_oss"))

    assert not isinstance(
        runners_of(model_of_config(config, formats=("q4_k", "q6_k"), gate_parts=2).runner)[0], NativeRunner
    )


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "lfm2"])
def test_bits_do_not_depend_on_batch_or_chunks(family: str) -> None:
    model, length = quantised(family, MIXES["all"]), 21
    alone = [((slot, 1),) for slot in range(8) for _ in range(length)]
    batch = [[(slot, 1) for slot in range(8)] for _ in range(length)]
    chunks = [((slot, rows),) for slot in range(8) for rows in (7, 1, 13)]
    expected = model.states(model.runner, alone)

    for steps in (batch, chunks):
        actual = model.states(model.runner, steps)

        assert torch.equal(expected[0], actual[0])
        assert torch.equal(expected[1], actual[1])
