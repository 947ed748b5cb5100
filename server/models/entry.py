"""A model that the server can load: its names and settings, and the states that it passes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.configuration.settings import Settings

# queued    a request waits until the model fits into the memory
# draining  it takes no new requests, and is unloaded after the running ones
State = Literal["unloaded", "queued", "loading", "ready", "draining", "failed"]
ModelKind = Literal["generate", "embedding"]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model with its names and settings.

    name      the main name in requests
    aliases   its other names, those of its adapters included
    settings  of its engine; `model`, or `embedding_model` for the kind "embedding", is its source
    pinned    loaded at the start and never unloaded
    preloads  loaded at the start
    scanned   of the folder of models: the model ends with its files
    """

    name: str
    settings: Settings
    aliases: tuple[str, ...] = ()
    kind: ModelKind = "generate"
    pinned: bool = False
    preloads: bool = False
    scanned: bool = False

    @property
    def source(self) -> str | None:
        """The folder, file or hub id; None for the bundled model."""
        return self.settings.embedding_model if self.kind == "embedding" else self.settings.model


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The state of a model at this moment.

    phase         of the load, such as "loading weights 43 %"; "" if it is not loading
    reason        of the last failure; "" if there is none
    memory_bytes  granted to its process; 0 without one
    leases        requests that use it
    expires_in    seconds until it is unloaded, if no request comes; None: not by time
    """

    state: State
    phase: str = ""
    reason: str = ""
    memory_bytes: int = 0
    leases: int = 0
    expires_in: float | None = None
