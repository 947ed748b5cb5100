"""The head that some models were trained with to guess the token after next (MTP), over cells of its own.

A checkpoint keeps it beside the model's layers, and transformers has the module (MtpModel), made of the model's own
decoder layer, embedding and output layer. It reads pairs: the model's last state behind a token, and the token that
came next. Where a checkpoint has several such layers, the first one is used over and over, as it says one token ahead.
Pinned to transformers 5.23, like hooks.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from engine.errors import ModelUnsupported
from engine.load.checkpoint import weight_files
from engine.load.load import LoadedModel
from engine.model import hooks
from engine.model.layers import CachedLayer, find_cached_layers
from engine.model.runner import PackedRunner
from engine.native.runner import NativeRunner
from kvcache.forward import Forward


@dataclass(frozen=True, slots=True)
class _Guess:
    """Logits [1, wanted, vocabulary], and the states [1, rows, width] to read the next pair with."""

    logits: Tensor
    states: Tensor


class Head(nn.Module):
    """One layer of transformers' module, called like a model."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers, self.config = layers, layers.config

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        logits_to_keep: Tensor,
        states: Tensor | None = None,
    ) -> _Guess:
        """What comes behind tokens [1, rows], each read with the state [1, rows, width] behind the one before it."""
        if states is None:
            states = self.layers.embed_tokens.weight.new_zeros(*input_ids.shape, self.config.hidden_size)
        made = self.layers.forward_layer(0, states, position_ids + 1, past_key_values, input_ids=input_ids)
        return _Guess(self.layers._project_to_logits(made[:, logits_to_keep]), made)


class HeadRunner(PackedRunner):
    """A head whose attention reads and writes a cache of its own. Belongs to the engine thread."""

    def __init__(self, head: Head, layers: Sequence[CachedLayer], target: PackedRunner) -> None:
        """Attention is computed as by the runner of the target model."""
        super().__init__(head, layers, target.mla, target.attend)
        self._head = head

    def read(self, forward: Forward, tokens: Sequence[int], states: Tensor, wanted: Sequence[int]) -> _Guess:
        """Read pairs: tokens of all spans, one after the other, and the states [rows, width] before them."""
        positions = self._tensor([position for span in forward.spans for position in range(span.start, span.stop)])
        rows = {"input_ids": self._tensor(tokens)[None], "position_ids": positions[None]}
        with torch.inference_mode(), hooks.use_backend(self._backend(forward, ())):
            made: _Guess = self._head(
                **rows,
                past_key_values=hooks.CacheFacade(positions),
                logits_to_keep=self._tensor(wanted),
                states=states[None],
            )
        return _Guess(made.logits[0], made.states[0])


class LastStates:
    """The states [rows, width] behind the last layer of a model, of its latest forward."""

    def __init__(self, model: Any) -> None:
        self.rows = torch.empty(0)
        model.get_decoder().register_forward_hook(self._take)

    def _take(self, module: nn.Module, inputs: tuple[Any, ...], made: Any) -> None:
        self.rows = made[0][0]


@dataclass(frozen=True, slots=True)
class Heads:
    """A head that is ready, and where the states come from that it reads."""

    runner: HeadRunner
    states: LastStates
    weights_bytes: int


def has_heads(target: LoadedModel) -> bool:
    """Whether the model's checkpoint has such a head, in one of the places where they are published."""
    pattern = re.compile(_places(target.model))
    return any(pattern.search(key) for file in weight_files(Path(target.info.folder)) for key in _keys(file))


def load_heads(target: LoadedModel) -> Heads:
    """The head of a model that has one. Raises ModelUnsupported."""
    runner = target.runner.fallback if isinstance(target.runner, NativeRunner) else target.runner
    if not isinstance(runner, PackedRunner):
        raise ModelUnsupported(target.info.name, "it runs one sequence at a time, and its head guesses for batches")
    if target.encoder is not None:
        raise ModelUnsupported(target.info.name, "its head reads tokens, and not what an encoder makes")
    try:
        layers = _read(target.model, target.dtype)
        head = Head(layers)
        plans = find_cached_layers(head, vocabulary=target.info.vocabulary)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelUnsupported(
            target.info.name, f"its head cannot be used ({type(error).__name__}: {reason})"
        ) from error
    weights = sum(parameter.numel() * parameter.element_size() for parameter in layers.layers.parameters())
    return Heads(HeadRunner(head, plans, runner), LastStates(target.model), weights)


def _places(model: Any) -> str:
    """Keys of the first such layer: behind the model's own layers (DeepSeek, GLM), or apart from them (Qwen)."""
    return rf"^mtp\.(?!layers\.[1-9])|^model\.layers\.{model.config.get_text_config().num_hidden_layers}\."


def _keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as content:
        return list(content.keys())


def _read(model: Any, dtype: torch.dtype) -> Any:
    """transformers' own loader, told of one layer that attends to everything: not all configurations tell it so."""
    text = model.config.get_text_config()
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None) is not None:
        text.mtp_layer_types = ["full_attention"]
    if getattr(text, "mlp_layer_types", None) is not None:
        text.mtp_mlp_layer_types = text.mlp_layer_types[-1:]
    # Its own pattern is fit for one published size of each kind.
    model._keys_to_ignore_on_load_unexpected = [_places(model)]
    layers = MtpModel.from_pretrained(model)
    layers.set_attn_implementation(hooks.ATTENTION_NAME)
    if dtype == torch.float64:
        layers.set_experts_implementation("eager")
    layers = layers.to(device=model.device, dtype=dtype).eval().requires_grad_(False)
    hooks.install_latent(layers)
    return layers
