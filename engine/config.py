"""The settings of the engine. server/settings.py fills them from the command line and the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.types import Overflow

# What the bundled model is called where nobody gave it another name.
BUNDLED_NAME = "cellar-tiny"

Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine can be told.

    model        a local folder, a hub id such as Qwen/Qwen3-0.6B, or None for the bundled model
    dtype        of weights and cache; "auto" takes what this machine computes fastest
    context      tokens a sequence may hold; None: what the model and the memory allow
    slots        sequences that run at once; None: what the memory allows, 8 at most
    cells        tokens that the shared cache holds; None: slots x context, so that no sequence ever waits for cells
    overflow     what happens when a sequence fills its context
    max_waiting  requests that may wait for a slot; one more is refused
    chunk        rows of prompt that one step computes at most; decoding rows come on top
    device       where torch computes
    threads      that torch computes with; None: all cores, or one for a model too small to share out
    """

    model: str | None = None
    dtype: Dtype = "auto"
    context: int | None = None
    slots: int | None = None
    cells: int | None = None
    overflow: Overflow = "length"
    max_waiting: int = 64
    chunk: int = 256
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse settings that cannot work; ValueError names the setting."""
        for name in ("context", "slots", "cells", "chunk", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.context is not None and self.context < 8:
            raise ValueError(f"context must be at least 8, not {self.context}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting must not be negative, not {self.max_waiting}")
