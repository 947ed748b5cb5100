"""The settings of the engine; the server fills them from the command line and the environment."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from engine.types.request import MAX_DRAFT_TOKENS, DrafterChoice, MlaMode, Overflow

# The default name of the bundled model.
BUNDLED_NAME = "cellar-tiny"

Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
KvDtype = Literal["auto", "float32", "float64", "bfloat16", "float16", "int8"]
Kernels = Literal["auto", "torch"]
Quantize = Literal["none", "int8", "int4", "auto"]


# The words of the settings that have a closed set of them.
_WORDS: dict[str, Any] = {
    "dtype": Dtype,
    "kv_dtype": KvDtype,
    "quantize": Quantize,
    "draft_quantize": Quantize,
    "overflow": Overflow,
    "drafter": DrafterChoice,
    "kernels": Kernels,
    "mla": MlaMode,
}


# Units of a size: g, Gi and GiB are powers of 1024 as in Docker and Kubernetes, GB is a power of 1000.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= dict.fromkeys((_letter, f"{_letter}i", f"{_letter}ib"), 1024**_power) | {f"{_letter}b": 1000**_power}
# Bytes: a smaller number without a unit lacks one.
_LEAST_BARE_SIZE = 2**20
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_COUNT = re.compile(r"([+-]?[0-9]+)\s*([km]?)", re.IGNORECASE)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*|%)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as 8GiB, or of a plain number; ValueError for anything else."""
    found = _SIZE.fullmatch(text.strip().removeprefix("-"))
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"must be a size such as 8GiB, or a number of bytes, not {text}")
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    return -size if text.strip().startswith("-") else size


def parse_count(text: str) -> int:
    """A count such as 4096, or 4k for it: k and m are powers of 1024; ValueError for anything else."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"must be a whole number, or one with k or m such as 32k, not {text}")
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]


def parse_memory(text: str) -> Callable[[int], int]:
    """Bytes of a size such as 8GiB, or of a share such as 40% of a total in bytes; ValueError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    number, unit = (float(found[1]), found[2].lower()) if found else (0.0, "")
    if unit == "%" and 0 < number <= 100:
        return lambda total: int(total * number / 100)
    if found and not unit and 1 <= number < _LEAST_BARE_SIZE:
        raise ValueError(f"needs a unit: {text.strip()} would be bytes; write {text.strip()}GiB")
    if unit in _UNITS and number * _UNITS[unit] >= 1:
        return lambda _: int(number * _UNITS[unit])
    raise ValueError(f"must be a size such as 8GiB or a share of the memory such as 40%, not {text}")


class ConfigError(ValueError):
    """A setting is invalid; `reason` continues a sentence that begins with its name."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(f"{setting} {reason}")
        self.setting, self.reason = setting, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine.

    model              a local folder or GGUF file, a hub id such as Qwen/Qwen3-0.6B, or None for the bundled model
    dtype              of weights and activations; "auto": the fastest on this machine
    kv_dtype           of keys and values in the cache; "auto": `dtype`
    quantize           of linear layers and experts at load; "auto": int8 or int4, on a CPU where that is faster, on a
                       GPU where the weights do not fit as stored
    calibration        text file for the choice of formats and codes of int4 weights; None: a built-in text
    chat_template      file with a chat template in Jinja; None: the model's own
    context            tokens of a sequence; None: the limit of the model and of the memory
    slots              concurrent sequences; None: up to 8, on a GPU up to 64, within the memory
    cells              tokens in the shared KV cache; None: slots x context, so that no sequence waits for cells
    checkpoint         prompt tokens between the checkpoints of recurrent states, each of which takes megabytes
    overflow           at a full context: finish with "length", or shift the context
    max_waiting        requests that wait for a slot; further ones are refused, unless their owner has less than an
                       even share
    chunk              prompt tokens of a step at most, beside the tokens of decoding sequences; the default of a GPU is
                       2048
    itl_target_ms      limit of the inter-token latency while prompts are computed, in milliseconds; 0: prompts first;
                       None: 60, or three times the duration of a step without prompts if that is more
    device             cpu, a GPU of CUDA such as cuda or cuda:1, or auto: the first GPU if there is one, else cpu
    enforce_eager      no CUDA graphs
    compile            on a GPU, norms, rotations and dense MLPs are fused by torch.compile at load
    batch_invariant    each text has the same bits in any batch, with any chunks and cached prefix; slower
    memory             limit of the process's memory on the device: a size such as 8GiB, or a share of the machine or
                       the GPU such as 40%; None: all free memory
    threads            of torch, of all ranks together; None: all cores, or one for a small model
    tensor_parallel    processes (ranks) that divide the heads and the matrices of the model; 1: it is not divided
    drafter            for speculative decoding; "auto": each that is available
    draft_model        a smaller model with the same tokenizer; None: that of the bundled pair, or none
    draft_tokens       of a draft, 0 to MAX_DRAFT_TOKENS, unless a request sets them; None: chosen at run time
    draft_quantize     as `quantize`, for the draft model; None: the same
    embedding_model    for embeddings or reranking, beside the model; None: the model computes embeddings
    kernels            for attention and quantised weights; "auto": the fastest that this machine supports
    mla                how latent attention is computed; "auto": the cheaper of both for each sequence of a step
    media              whether requests may bring media; if not, models that need them are refused before the load
    disk_cache         folder of cached prefixes that outlive the process; None: none
    disk_cache_bytes   of its files
    host_cache_bytes   of host memory for evicted prefixes; on a CPU cells are in host memory already

    is_draft           whether the model is the draft model of another one; see `for_draft`
    """

    model: str | None = None
    dtype: Dtype = "auto"
    kv_dtype: KvDtype = "auto"
    quantize: Quantize = "none"
    calibration: str | None = None
    chat_template: str | None = None
    context: int | None = None
    slots: int | None = None
    cells: int | None = None
    overflow: Overflow = "length"
    max_waiting: int = 64
    chunk: int = 256
    itl_target_ms: float | None = None
    device: str = "cpu"
    enforce_eager: bool = False
    compile: bool = False
    batch_invariant: bool = False
    memory: str | None = None
    threads: int | None = None
    tensor_parallel: int = 1
    drafter: DrafterChoice = "auto"
    draft_model: str | None = None
    draft_tokens: int | None = None
    draft_quantize: Quantize | None = None
    embedding_model: str | None = None
    kernels: Kernels = "auto"
    mla: MlaMode = "auto"
    checkpoint: int = 1024
    is_draft: bool = False
    media: bool = True
    disk_cache: str | None = None
    disk_cache_bytes: int = 8 * 2**30
    host_cache_bytes: int = 0

    def for_draft(self, model: str, *, context: int, slots: int, cells: int) -> EngineConfig:
        """The settings of the draft model `model`: it has no drafter itself, and one process."""
        return replace(
            self,
            model=model,
            is_draft=True,
            quantize=self.draft_quantize or self.quantize,
            drafter="none",
            draft_model=None,
            draft_quantize=None,
            chat_template=None,
            context=context,
            slots=slots,
            cells=cells,
            # Rank 0 drafts alone.
            tensor_parallel=1,
        )

    @property
    def records_steps(self) -> bool:
        """Whether decoding steps may be recorded as CUDA graphs: not those that several ranks compute together."""
        return not self.enforce_eager and self.tensor_parallel == 1

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid setting."""
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value is not None and value not in get_args(words):
                raise ConfigError(name, f"must be one of {', '.join(get_args(words))}, not {value}")
        for name in ("context", "slots", "cells", "chunk", "threads", "checkpoint", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, f"must be at least 1, not {value}")
        if self.batch_invariant and self.dtype == "float64":
            raise ConfigError("batch_invariant", "is for float32, bfloat16 and float16, not float64")
        if self.context is not None and self.context < 8:
            raise ConfigError("context", f"must be at least 8, not {self.context}")
        for name in ("max_waiting", "disk_cache_bytes", "host_cache_bytes", "itl_target_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(name, f"must be 0 or more, not {value}")
        self._check_memory()
        self._check_device()
        self._check_text_file("calibration", self.calibration)
        self._check_text_file("chat_template", self.chat_template)
        self._check_drafts()
        if self.tensor_parallel > 1:
            self._check_tensor_parallel()

    @property
    def itl_target_seconds(self) -> float | None:
        """`itl_target_ms` in seconds."""
        return None if self.itl_target_ms is None else self.itl_target_ms / 1000

    def _check_device(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError("device", f"must be auto, cpu, cuda or one GPU such as cuda:1, not {self.device}")
        if self.compile and self.device == "cpu":
            raise ConfigError("compile", "is for GPUs: choose one with --device")
        if self.compile and self.batch_invariant:
            raise ConfigError("compile", "fuses sums whose bits change with the batch; leave out --batch-invariant")

    def _check_memory(self) -> None:
        if self.memory is None:
            return
        try:
            parse_memory(self.memory)
        except ValueError as error:
            raise ConfigError("memory", str(error)) from error

    def _check_text_file(self, setting: str, file: str | None) -> None:
        if file is None:
            return
        try:
            text = Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(setting, f"{file} cannot be read as UTF-8 text: {error}") from error
        if not text.strip():
            raise ConfigError(setting, f"{file} is empty")

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

    def _check_tensor_parallel(self) -> None:
        """Raise ConfigError for settings that need the whole of a matrix, or the cells of all heads, in one process."""
        refused = {
            "quantize": self.quantize != "none",
            "disk_cache": self.disk_cache is not None,
            "host_cache_bytes": self.host_cache_bytes > 0,
            "drafter": self.drafter == "mtp",
            "batch_invariant": self.batch_invariant,
            "compile": self.compile,
            "device": self.device not in ("auto", "cpu", "cuda"),
        }
        for setting, is_set in refused.items():
            if is_set:
                value = getattr(self, setting)
                raise ConfigError(setting, f"{value} is not supported with --tensor-parallel {self.tensor_parallel}")
