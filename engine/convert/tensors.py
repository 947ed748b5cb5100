"""The parameters of a transformers model as GGUF tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from engine.gguf.architectures.layouts import TensorNames, layout_of
from engine.gguf.architectures.rotary import rotary_factors
from engine.gguf.architectures.table import writable


def gguf_tensors(parameters: Mapping[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the GGUF tensors of a model's parameters (may be meta tensors), by name. Raises Inexpressible."""
    architecture = writable(config)
    names = TensorNames(architecture.name, config)
    for name, values in parameters.items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            yield from layout_of(name, architecture.layouts).write(name, values, names)
    yield from rotary_factors(config)
