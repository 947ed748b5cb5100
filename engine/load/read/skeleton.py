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
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.errors import ModelUnsupported
from engine.load.read.checkpoint import error_line
from engine.load.read.text_part import RUN_ERRORS, text_class
from engine.model import hooks, recurrence, rope
from engine.model.encoder import has_encoder
from engine.model.layers import CalibrationBackend, cached_layers_without_rotation, calibrate
from engine.model.rope import RopeSwitch
from engine.quantize.plan import LayerSurvey, QuantizationPlan

_EXPERTS = "shapes"
# The configuration of the tower for each modality.
_TOWERS = {"image": "vision_config", "audio": "audio_config"}


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model on the meta device with the outcome of one forward."""

    model: Any
    layers: Any
    state_bytes: int
    quantization: QuantizationPlan


def make_skeleton(name: str, config: Any, dtype: torch.dtype, *, contents: bool = False) -> Skeleton:
    """As `model_class`. Raises ModelUnsupported for a model that needs values to run."""
    try:
        with torch.device("meta"):
            model = model_class(config, contents=contents).from_config(config, dtype=dtype, attn_implementation="eager")
            model = model.to("meta").eval().requires_grad_(False)
            model.tie_weights()
        survey = LayerSurvey(model, skipped=tower_modules(model))
        calls = _run_packed(name, model)
    except RUN_ERRORS as error:
        raise ModelUnsupported(
            name, f"its layers cannot be found without its weights, as they decide how it runs ({error_line(error)})"
        ) from error
    layers = cached_layers_without_rotation(model, calls.calls)
    return Skeleton(model, layers, sum(calls.state_bytes.values()), survey.close())


def _experts_shape(module: nn.Module, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """The output of experts without values: the choice of experts would need some."""
    return torch.empty_like(hidden_states)


ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts_shape)


def model_class(config: Any, *, contents: bool = False) -> Any:
    """The Auto class of transformers: one with the encoder if the configuration has an encoder.

    contents  whether prompts may have images or audio; if not, the class has no modules that a text does not use
    """
    kinds = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
    classes = [kind for kind in kinds if has_encoder(config) and type(config) in kind._model_mapping]
    if classes:
        return classes[0]
    whole = _multimodal_class(config)
    if whole is None:
        return AutoModelForCausalLM
    if contents:
        return whole
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else whole
    return text_class(auto, config, lambda model: _run_packed(config.model_type, model))


def unread_modalities(config: Any) -> tuple[str, ...]:
    """The inputs other than text of a model of this configuration whose weights `model_class` leaves out, by name.

    It leaves out none if prompts may have contents.
    """
    whole = None if has_encoder(config) else _multimodal_class(config)
    if whole is None:
        return ()
    inputs = whole._model_mapping[type(config)].input_modalities
    names = (inputs,) if isinstance(inputs, str) else inputs
    return tuple(name for name in names if name != "text" and has_tower(config, name))


def has_tower(config: Any, modality: str) -> bool:
    """Whether a model may have a tower for inputs of a modality: its configuration is not null."""
    return getattr(config, _TOWERS.get(modality, ""), "") is not None


def tower_modules(model: Any) -> frozenset[nn.Module]:
    """The modules of a multimodal model beside its decoder, embeddings and output layer."""
    if has_encoder(model.config) or _multimodal_class(model.config) is None:
        return frozenset()
    return hooks.tower_modules(model)


def _multimodal_class(config: Any) -> Any | None:
    """The Auto class of a configuration with inputs other than text; None if it has none."""
    wholes = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    return next((kind for kind in wholes if type(config) in kind._model_mapping), None)


def _run_packed(name: str, model: Any) -> CalibrationBackend:
    """The calls of one forward of a model on the meta device."""
    install_rope(name, model)
    install_hooks(model)
    hooks.set_attention(model, hooks.ATTENTION_NAME)
    model.set_experts_implementation(_EXPERTS)
    return calibrate(model, model.config.get_text_config().vocab_size)


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
    hooks.set_tower_attention(model)
    return recurrence.install(model)
