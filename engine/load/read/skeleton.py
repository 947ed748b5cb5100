"""Models without weights: on torch's meta device, where tensors have shapes but no memory.

One forward of a few tokens finds the layers that store cells or states, and those to quantise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.errors import ModelUnsupported
from engine.load.read.checkpoint import READ_ERRORS, error_line
from engine.model import hooks, recurrence, rope
from engine.model.encoder import has_encoder
from engine.model.layers import cached_layers_without_rotation, calibrate
from engine.model.rope import RopeSwitch
from engine.quantize.plan import LayerSurvey, QuantizationPlan

_EXPERTS = "shapes"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model on the meta device with the outcome of one forward."""

    model: Any
    layers: Any
    state_bytes: int
    quantization: QuantizationPlan


def make_skeleton(name: str, config: Any, dtype: torch.dtype) -> Skeleton:
    """Raises ModelUnsupported for a model that needs values to run."""
    try:
        with torch.device("meta"):
            model = model_class(config).from_config(config, dtype=dtype, attn_implementation="eager")
            model = model.to("meta").eval().requires_grad_(False)
            model.tie_weights()
        install_rope(name, model)
        install_hooks(model)
        model.set_attn_implementation(hooks.ATTENTION_NAME)
        model.set_experts_implementation(_EXPERTS)
        survey = LayerSurvey(model)
        calls = calibrate(model, config.get_text_config().vocab_size)
    except (*READ_ERRORS, NotImplementedError) as error:
        raise ModelUnsupported(
            name, f"its layers cannot be found without its weights, as they decide how it runs ({error_line(error)})"
        ) from error
    layers = cached_layers_without_rotation(model, calls.calls)
    return Skeleton(model, layers, sum(calls.state_bytes.values()), survey.close())


def _experts_shape(module: nn.Module, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """The output of experts without values: the choice of experts would need some."""
    return torch.empty_like(hidden_states)


ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts_shape)


def model_class(config: Any) -> Any:
    """The Auto class of transformers: one with the encoder if the configuration has an encoder."""
    kinds = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
    classes = [kind for kind in kinds if has_encoder(config) and type(config) in kind._model_mapping]
    return classes[0] if classes else AutoModelForCausalLM


def install_rope(name: str, model: Any) -> RopeSwitch | None:
    """Install the rotary hooks; the length at which the model's rotary factors change.

    Dynamic NTK scaling starts beyond max_position_embeddings, the longest context that is served, so it never applies.
    """
    try:
        return rope.install(model)
    except ValueError as error:
        raise ModelUnsupported(name, str(error)) from error


def install_hooks(model: Any) -> bool:
    """Install the attention and recurrence hooks; whether some layers keep a recurrent state."""
    hooks.install_latent(model)
    hooks.install_bias(model)
    return recurrence.install(model)
