"""Constructs models with layers in the formats of their files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, modeling_utils

from engine.gguf.container import GgufError
from engine.gguf.deferred import DeferredWeights, placeholder
from engine.gguf.matrices import FileMatrices
from engine.gguf.weights import read_parameters
from engine.load.machine.resources import processor_count
from engine.model.rope import original_length
from engine.quantize.plan import QuantizationPlanNames, plan_from_names


def file_skeleton(config: Any) -> Any:
    """The model on the meta device. Raises GgufError for a configuration that transformers refuses."""
    whole = type(config) in AutoModelForImageTextToText._model_mapping
    try:
        with torch.device("meta"):
            return (AutoModelForImageTextToText if whole else AutoModelForCausalLM).from_config(config)
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise GgufError(f"its metadata describes no model that transformers can construct ({reason})") from error


def file_model(
    matrices: FileMatrices,
    skeleton: Any,
    config: Any,
    dtype: torch.dtype,
    repacked: QuantizationPlanNames | None,
    *,
    defers: bool,
) -> tuple[Any, dict[str, Any]]:
    """The model with the weights of a file, and the report of transformers on them. Raises GgufError.

    skeleton  of `file_skeleton`
    repacked  a plan of matrices to replace before the model runs: the ones with an exact format are not dequantised
    defers    without such a plan, matrices with an exact format are dequantised at each call: `FileMatrices.deferred`
    """
    # Long rotary factors are calibrated by running the model at each start (engine/load/check/selftest.py).
    has_long_factors = original_length(skeleton) is not None
    plan = None if repacked is None or has_long_factors else plan_from_names(skeleton, repacked)
    unread = frozenset[str]() if plan is None else matrices.exact_parameters(skeleton, plan)
    deferred = matrices.deferrable(skeleton) if plan is None and defers else {}
    skipped, sources = unread | deferred.keys(), matrices.sources
    try:
        read = {name: source for name, source in sources.items() if name not in skipped}
        parameters = read_parameters(read, dtype, matrices.reader, threads=processor_count())
    except MemoryError as error:
        raise GgufError("its dequantised weights exceed the memory") from error
    parameters |= {name: placeholder(sources[name].shape, dtype) for name in skipped}
    with _without_renaming():
        model, report = type(skeleton).from_pretrained(
            None,
            config=config,
            state_dict=parameters,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    if deferred:
        matrices.deferred = DeferredWeights(model, deferred, dtype, matrices.reader)
    return model, report


@contextmanager
def _without_renaming() -> Iterator[None]:
    """Have transformers load parameters under their own names.

    It would compile the expressions for the older names of all its models: 0.2 s (measured).
    """
    renaming = modeling_utils.get_model_conversion_mapping
    modeling_utils.get_model_conversion_mapping = lambda *_, **__: []
    try:
        yield
    finally:
        modeling_utils.get_model_conversion_mapping = renaming
