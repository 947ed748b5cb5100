"""Captures the arguments of a multimodal model's decoder: its towers run, its decoder layers do not."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

# The arguments of the decoder in a forward that ends there; absent in all other forwards, also of other threads.
_arguments: ContextVar[dict[str, Any]] = ContextVar("engine.media.capture.arguments")


class ContentsUnsupported(Exception):
    """The model cannot read images or sounds here; `reason` continues a sentence about it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Captured(BaseException):
    """Ends a forward at the decoder."""


class DecoderCapture:
    """Hooks on the decoder of a model, which have no effect outside of `run`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        decoder = model.get_decoder()
        decoder.register_forward_pre_hook(_capture_decoder, with_kwargs=True)
        layers = next((module for module in decoder.modules() if isinstance(module, nn.ModuleList)), None)
        if layers is not None:
            layers[0].register_forward_pre_hook(_capture_layer, with_kwargs=True)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """The arguments of the decoder by name, `inputs_embeds` [1, tokens, width] among them.

        Of a decoder that merges contents and text itself, those of its first layer. Raises whatever the model raises.
        """
        arguments: dict[str, Any] = {}
        token = _arguments.set(arguments)
        try:
            with torch.inference_mode():
                self._model(**inputs)
        except _Captured:
            return arguments
        finally:
            _arguments.reset(token)
        raise ContentsUnsupported("it computes logits without its decoder")


def _capture_decoder(_: nn.Module, __: tuple[Any, ...], named: dict[str, Any]) -> None:
    arguments = _arguments.get(None)
    if arguments is not None and named.get("inputs_embeds") is not None:
        arguments.update(named)
        raise _Captured


def _capture_layer(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    arguments = _arguments.get(None)
    if arguments is not None:
        rows = inputs[0] if inputs else named["hidden_states"]
        arguments |= {"inputs_embeds": rows, "attention_mask": named.get("attention_mask")}
        raise _Captured
