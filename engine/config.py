"""The settings of the engine. server/settings.py fills them from the command line and the environment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.types.request import MAX_DRAFT_TOKENS, DrafterChoice, MlaMode, Overflow

# What the bundled model is called where nobody gave it another name.
BUNDLED_NAME = "cellar-tiny"

Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
KvDtype = Literal["auto", "float32", "float64", "bfloat16", "float16", "int8"]
Kernels = Literal["auto", "torch"]
Quantize = Literal["none", "int8", "int4", "auto"]


class ConfigError(ValueError):
    """A setting cannot work, for a reason that goes on behind its name."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(f"{setting} {reason}")
        self.setting, self.reason = setting, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine can be told.

    model        a local folder, a hub id such as Qwen/Qwen3-0.6B, or None for the bundled model
    dtype        of weights and computation; "auto" takes what this machine computes fastest
    kv_dtype     of the keys and values in the cache (kvcache/kv_buffer.py); "auto": the same
    quantize     what weights of linear layers and experts become at load, on a CPU; "auto": int8 or int4 where faster
    context      tokens a sequence may hold; None: what the model and the memory allow
    slots        sequences that run at once; None: what the memory allows, 8 at most
    cells        tokens that the shared cache holds; None: slots x context, so that no sequence ever waits for cells
    checkpoint   tokens of a prompt between places to resume at, for recurrent models: their states are megabytes
    overflow     what happens when a sequence fills its context
    max_waiting  requests that may wait for a slot; one more is refused, unless its owner has less than an even share
    chunk        rows of prompt that one step computes at most; decoding rows come on top
    itl_target_ms  milliseconds from token to token that rows of prompt should not exceed (inter-token latency); 0:
                 prompts first; None: 40, or where that is more, three times a step without prompts
    device       where torch computes
    threads      that torch computes with; None: all cores, or one for a model too small to share out
    drafter      who may guess at tokens ahead; "auto": whoever there is
    draft_model  a smaller model with the same tokenizer that guesses; None: the bundled model brings its own
    draft_tokens that are guessed at a time unless a request says otherwise, 0 to MAX_DRAFT_TOKENS; None: as many as seem
                 to pay, none included
    draft_quantize  as `quantize`, for the draft model; None: the same
    embedding_model  that makes the vectors of texts, or scores pairs of them, beside the model; None: the model does it
    kernels      who computes attention and quantised weights; "auto": what is fastest of all that this machine can have
    mla          how latent attention is computed; "auto" takes what costs less for each sequence of a step
    media        whether requests can bring media; if not, models that need them are refused before weights are read
    shelf        folder where remembered content is kept for the next start; None: nowhere
    shelf_bytes  that its files may take together
    shelf_memory_bytes  of host memory for remembered content that has no cells any more; on a CPU cells are host memory
    """

    model: str | None = None
    dtype: Dtype = "auto"
    kv_dtype: KvDtype = "auto"
    quantize: Quantize = "none"
    context: int | None = None
    slots: int | None = None
    cells: int | None = None
    overflow: Overflow = "length"
    max_waiting: int = 64
    chunk: int = 256
    itl_target_ms: float | None = None
    device: str = "cpu"
    threads: int | None = None
    drafter: DrafterChoice = "auto"
    draft_model: str | None = None
    draft_tokens: int | None = None
    draft_quantize: Quantize | None = None
    embedding_model: str | None = None
    kernels: Kernels = "auto"
    mla: MlaMode = "auto"
    checkpoint: int = 1024
    media: bool = True
    shelf: str | None = None
    shelf_bytes: int = 8 * 2**30
    shelf_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that cannot work; ConfigError names the setting."""
        for name in ("context", "slots", "cells", "chunk", "threads", "checkpoint"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, f"must be at least 1, not {value}")
        if self.context is not None and self.context < 8:
            raise ConfigError("context", f"must be at least 8, not {self.context}")
        for name in ("max_waiting", "shelf_bytes", "shelf_memory_bytes", "itl_target_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(name, f"must be 0 or more, not {value}")
        if self.quantize in ("int8", "int4") and self.device != "cpu":
            raise ConfigError("quantize", f"{self.quantize} is for the device cpu, not {self.device}")
        self._check_drafts()

    @property
    def itl_target_seconds(self) -> float | None:
        """`itl_target_ms` in seconds."""
        return None if self.itl_target_ms is None else self.itl_target_ms / 1000

    def _check_drafts(self) -> None:
        if self.draft_tokens is not None and not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError("draft_tokens", f"must be between 0 and {MAX_DRAFT_TOKENS}, not {self.draft_tokens}")
        if self.draft_model is not None and self.drafter not in ("auto", "model"):
            raise ConfigError("drafter", f"{self.drafter} does not use the draft model {self.draft_model}")
        drafts = self.drafter in ("auto", "model") and (self.draft_model is not None or self.model is None)
        if self.draft_quantize is not None and not drafts:
            raise ConfigError("draft_quantize", "needs a draft model: name it with --draft-model")
        if self.drafter == "model" and self.draft_model is None and self.model is not None:
            raise ConfigError("drafter", "model needs a draft model: name it with --draft-model")
