"""Heads of the embedding model: hidden states are pooled to a vector, or the logits of a pair become a score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from engine.embedder.layout import Dense, Layout, Pooling
from engine.sample.logprobs import at_least_float32
from engine.types.request import EmbeddingInput

_ACTIVATIONS = ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU", "SiLU", "Mish", "Softplus", "ELU", "LeakyReLU")
# Configuration fields with the activation of a reranker: the current one and the older one.
_CONFIG_FIELD, _OLD_CONFIG_FIELD = "sentence_transformers", "sbert_ce_default_activation_function"


class EmbeddingHead(Protocol):
    """Computes vectors or scores from the output of a transformer."""

    def __call__(self, output: Any, inputs: Sequence[EmbeddingInput]) -> Tensor:
        """One vector for each input [inputs, dimensions]; rows of `output` are padded at the end."""
        ...


class VectorHead:
    """Pools the hidden states of the last layer, one text at a time, so that padding has no effect."""

    def __init__(self, layout: Layout, pooling: Sequence[Pooling]) -> None:
        self._pooling, self._pools_prompt = tuple(pooling), layout.pools_prompt
        self._steps = tuple(normalized if step == "normalize" else DenseProjection(step) for step in layout.steps)

    def __call__(self, output: Any, inputs: Sequence[EmbeddingInput]) -> Tensor:
        """One vector for each input [inputs, dimensions]."""
        vectors = torch.stack(
            [
                self._pool(
                    at_least_float32(states[: len(text.tokens)]), 0 if self._pools_prompt else text.prompt_tokens
                )
                for states, text in zip(output.last_hidden_state, inputs, strict=True)
            ]
        )
        for step in self._steps:
            vectors = step(vectors)
        return vectors

    def _pool(self, states: Tensor, start: int) -> Tensor:
        """The vector of a text's hidden states [tokens, width], without the first `start`."""
        start = min(start, len(states) - 1)
        return torch.cat([_POOLS[mode](states, start) for mode in self._pooling])


class ScoreHead:
    """The single logit of a pair, with the activation of the model's configuration."""

    def __init__(self, config: Any) -> None:
        named = (getattr(config, _CONFIG_FIELD, None) or {}).get("activation_fn") or getattr(
            config, _OLD_CONFIG_FIELD, None
        )
        self._activation = activation((named or "torch.nn.Sigmoid").split(".")[-1])

    def __call__(self, output: Any, inputs: Sequence[EmbeddingInput]) -> Tensor:
        """One score for each input [inputs, 1]."""
        return self._activation(at_least_float32(output.logits))


class DenseProjection:
    """A linear layer with an activation, from a module folder of sentence-transformers."""

    def __init__(self, dense: Dense) -> None:
        try:
            weights = load_file(dense.folder / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"its module {dense.folder.name} has no safetensors weights that can be read") from error
        self._weight, self._bias = weights["linear.weight"], weights.get("linear.bias")
        self._activation = activation(dense.activation)
        self._residual = dense.residual
        self._residual_weight = weights.get("residual.weight")

    def __call__(self, vectors: Tensor) -> Tensor:
        """The projected vectors [inputs, outputs]."""
        bias = None if self._bias is None else self._bias.to(vectors)
        projected = self._activation(linear(vectors, self._weight.to(vectors), bias))
        if not self._residual:
            return projected
        return projected + (
            vectors if self._residual_weight is None else linear(vectors, self._residual_weight.to(vectors))
        )


def normalized(vectors: Tensor) -> Tensor:
    """Vectors of length 1."""
    return normalize(vectors, dim=-1)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by its name in torch.nn; ValueError for a name outside the supported list."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"the activation {name} is not supported")
    module: nn.Module = getattr(nn, name)()
    return module


def _weighted(states: Tensor, start: int) -> Tensor:
    weights = torch.arange(start + 1, len(states) + 1, dtype=states.dtype, device=states.device)
    return weights @ states[start:] / weights.sum()


_POOLS: dict[Pooling, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda states, start: states[start],
    "max": lambda states, start: states[start:].amax(0),
    "mean": lambda states, start: states[start:].mean(0),
    "mean_sqrt_len_tokens": lambda states, start: states[start:].sum(0) / math.sqrt(len(states) - start),
    "weightedmean": _weighted,
    "lasttoken": lambda states, start: states[-1],
}
