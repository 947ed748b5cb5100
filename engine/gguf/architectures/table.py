"""The table of architectures that are read and written."""

from __future__ import annotations

from typing import Any

from engine.gguf.architectures.architecture import Architecture
from engine.gguf.architectures.attention import ATTENTION
from engine.gguf.architectures.delta_net import DELTA_NETS
from engine.gguf.architectures.experts import MIXTURES
from engine.gguf.architectures.latent import LATENT
from engine.gguf.architectures.per_layer import PER_LAYER
from engine.gguf.architectures.recurrent import RECURRENT
from engine.gguf.architectures.settings import Hyperparameters, Inexpressible
from engine.gguf.architectures.state_space import STATE_SPACES
from engine.gguf.container import GgufError, GgufModel

# Models with experts first, as their files may have the name of an architecture without.
ARCHITECTURES: tuple[Architecture, ...] = (
    *MIXTURES,
    *ATTENTION,
    *LATENT,
    *RECURRENT,
    *DELTA_NETS,
    *STATE_SPACES,
    *PER_LAYER,
)
# Architectures that are served from other files only, with the unsupported part.
_REFUSED = {
    "gemma3n": "its alternating updates of several hidden states are not read; the safetensors of the model are",
    "kimi-linear": "its delta attention is not read; the safetensors of the model are",
    "llama4": "its chunked attention is not read; the safetensors of the model are",
}


def unreadable_reason(name: str) -> str | None:
    """Why files of an architecture cannot be read; None: they can."""
    names = list(dict.fromkeys(row.name for row in ARCHITECTURES))
    if name in names:
        return None
    reason = f" ({_REFUSED[name]})" if name in _REFUSED else ""
    return f"the architecture {name} is not supported in GGUF files{reason}; supported: {', '.join(names)}"


def readable(model: GgufModel) -> Architecture:
    """The architecture of a file. Raises GgufError."""
    file = Hyperparameters(model)
    reason = unreadable_reason(file.architecture)
    if reason is not None:
        raise GgufError(reason)
    return next(row for row in ARCHITECTURES if row.name == file.architecture and row.applies(file))


def writable(config: Any) -> Architecture:
    """The architecture of a model. Raises Inexpressible."""
    kind = config.model_type
    rows = (row for row in ARCHITECTURES if kind in (row.model, *row.written) and row.fits(config))
    row = next(rows, None)
    if row is None:
        names = ", ".join(sorted({name for row in ARCHITECTURES for name in (row.model, *row.written)}))
        raise Inexpressible(f"models of type {kind} are not written; {names} are")
    return row
