"""What comes behind the transformer: the states of a text become a vector, or the logits of a pair become a score."""

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
# Where a ranker says what becomes of its logits: the newer place and the older one.
_CONFIG_FIELD, _OLD_CONFIG_FIELD = "sentence_transformers", "sbert_ce_default_activation_function"


class EmbeddingHead(Protocol):
    """Reads the output of a transformer for a batch."""

    def __call__(self, output: Any, inputs: Sequence[EmbeddingInput]) -> Tensor:
        """One vector each [inputs, dimensions]; rows of `output` are filled up behind the inputs' tokens."""
        ...


class VectorHead:
    """Pools the last layer's states, each text by itself, so that what fills a batch up cannot be seen."""

    def __init__(self, layout: Layout, pooled: Sequence[Pooling]) -> None:
        self._pooled, self._prompt = tuple(pooled), layout.prompt
        self._steps = tuple(normalized if step == "normalize" else DenseProjection(step) for step in layout.steps)

    def __call__(self, output: Any, inputs: Sequence[EmbeddingInput]) -> Tensor:
        """One vector each [inputs, dimensions]."""
        vectors = torch.stack(
            [
                self._pool(at_least_float32(states[: len(each.tokens)]), 0 if self._prompt else each.prompt_tokens)
                for states, each in zip(output.last_hidden_state, inputs, strict=True)
            ]
        )
        for step in self._steps:
            vectors = step(vectors)
        return vectors

    def _pool(self, states: Tensor, start: int) -> Tensor:
        """The vector of one text's states [tokens, width], those before `start` left out."""
        start = min(start, len(states) - 1)
        return torch.cat([_POOLS[way](states, start) for way in self._pooled])


class ScoreHead:
    """The one logit of a pair, behind the activation that the model's settings name."""

    def __init__(self, config: Any) -> None:
        named = (getattr(config, _CONFIG_FIELD, None) or {}).get("activation_fn") or getattr(
            config, _OLD_CONFIG_FIELD, None
        )
        self._activation = activation((named or "torch.nn.Sigmoid").split(".")[-1])

    def __call__(self, output: Any, inputs: Sequence[EmbeddingInput]) -> Tensor:
        """One number each [inputs, 1]."""
        return self._activation(at_least_float32(output.logits))


class DenseProjection:
    """A linear layer of the folder's own and its activation."""

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
        """The vectors [inputs, width] as the layer turns them."""
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
    """An activation by its name in torch.nn; ValueError for one that is not known to be a plain function."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"the activation {name} is not known here")
    made: nn.Module = getattr(nn, name)()
    return made


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
