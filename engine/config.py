"""The settings of the engine, declared once: type, default and help text.

The server makes the options of its command line from them, its environment variables, the keys of its configuration
file and the tables of docs/options.md. A field without `Setting` is not an option.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

from engine.types.request import MAX_DRAFT_TOKENS, DrafterChoice, MlaMode, Overflow
from engine.types.setting import Setting, literal_words

# The default name of the bundled model.
BUNDLED_NAME = "cellar-tiny"
# Default slots of each of several models: the memory that is left is for other models.
SLOTS_OF_SEVERAL = 4

Dtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]
KvDtype = Literal["auto", "float32", "float64", "bfloat16", "float16", "int8"]
Kernels = Literal["auto", "torch"]
Quantize = Literal["none", "int8", "int4", "auto"]

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
    match = _SIZE.fullmatch(text.strip().removeprefix("-"))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"must be a size such as 8GiB, or a number of bytes, not {text}")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    return -size if text.strip().startswith("-") else size


def parse_count(text: str) -> int:
    """A count such as 4096, or 4k for it: k and m are powers of 1024; ValueError for anything else."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a whole number, or one with k or m such as 32k, not {text}")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def parse_memory(text: str) -> Callable[[int], int]:
    """Bytes of a size such as 8GiB, or of a share such as 40% of a total in bytes; ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    number, unit = (float(match[1]), match[2].lower()) if match else (0.0, "")
    if unit == "%" and 0 < number <= 100:
        return lambda total: int(total * number / 100)
    if match and not unit and 1 <= number < _LEAST_BARE_SIZE:
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
    """The settings of an engine. Those that are no options:

    model       a local folder or GGUF file, a hub id such as Qwen/Qwen3-0.6B, or None for the bundled model
    cells       tokens in the shared KV cache; None: slots x context, so that no sequence waits for cells
    chunk       maximum prompt tokens of a step, besides the tokens of decoding sequences; the default of a GPU is 2048
    checkpoint  prompt tokens between the checkpoints of recurrent states, each of which takes megabytes
    shares_memory  the process shares pages with others: `memory` limits what its end would return
    kernels     for attention and quantised weights; "auto": the fastest that this machine supports
    media       whether requests may bring media; if not, models that need them are refused before the load
    is_draft    whether the model is the draft model of another one; see `for_draft`
    """

    device: Annotated[
        str,
        Setting(
            "Where models run: cpu; cuda or one GPU such as cuda:1; auto: the first GPU if there is one, else cpu. "
            "CUDA was tested without a GPU (docs/gpu.md)."
        ),
    ] = "cpu"
    enforce_eager: Annotated[bool, Setting("On a GPU, launch kernels one by one, without CUDA graphs.")] = False
    compile: Annotated[
        bool,
        Setting(
            "On a GPU, fuse norms, rotations and dense MLPs with torch.compile; the start takes longer (docs/gpu.md)."
        ),
    ] = False
    batch_invariant: Annotated[
        bool,
        Setting(
            "Compute each text with the same bits in any batch, also in bfloat16 and on a GPU (docs/gpu.md); slower."
        ),
    ] = False
    dtype: Annotated[
        Dtype,
        Setting(
            "Number format of weights and computation. auto: bfloat16 checkpoints keep their format where the "
            "processor multiplies bfloat16, computation is float32 in the native step."
        ),
    ] = "auto"
    kv_dtype: Annotated[KvDtype, Setting("Number format of the KV cache. auto: the same as the computation.")] = "auto"
    quantize: Annotated[
        Quantize,
        Setting(
            "Weight quantisation of linear layers and experts. auto: the format that fits the memory, on a CPU where "
            "it is faster, on a GPU where the weights do not fit as stored."
        ),
    ] = "none"
    calibration: Annotated[
        str | None,
        Setting(
            "Text file for the choice of formats and codes of int4 weights; the first 256 tokens of each quarter are "
            "used. It should be typical of the use.",
            default_text="a built-in text",
        ),
    ] = None
    no_media: Annotated[
        bool,
        Setting(
            "Serve the text of models with images or audio: the weights of their vision or audio towers are not read."
        ),
    ] = False
    chat_template: Annotated[
        str | None,
        Setting("File with a chat template in Jinja, also for GGUF files.", default_text="the model's own"),
    ] = None
    context: Annotated[
        int | None,
        Setting(
            "Context length in tokens, such as 4096 or 4k. Default: up to the model's trained length, 8192 for each "
            "slot first.",
            default_text="what memory allows",
            parse=parse_count,
        ),
    ] = None
    slots: Annotated[
        int | None,
        Setting(
            "Sequences that are computed at the same time.",
            default_text="what memory allows, at most 8, or 64 on a GPU",
        ),
    ] = None
    overflow: Annotated[
        Overflow,
        Setting(
            "At a full context: length ends the answer with finish_reason length, shift drops the older half (context "
            "shift) and continues."
        ),
    ] = "length"
    max_waiting: Annotated[
        int,
        Setting(
            "Length of the queue. One more request is answered 429 with Retry-After, unless its owner has less than an "
            "even share of the queue."
        ),
    ] = 64
    itl_target_ms: Annotated[
        Literal["auto"] | float,
        Setting(
            "Inter-token latency in milliseconds to keep while prompts are computed. 0: prompts first. auto: 60, or "
            "three times a step without prefill where that is more."
        ),
    ] = "auto"
    memory: Annotated[
        str | None,
        Setting(
            "Memory of the process, for several servers on one machine: a size such as 8GiB, or a share of the "
            "machine, container or GPU such as 40%.",
            default_text="all free memory",
        ),
    ] = None
    threads: Annotated[
        int | None,
        Setting(
            "Threads of the computation. Default: the processors of the affinity mask and the container's quota; 1 for "
            "models too small to be divided.",
            default_text="all",
        ),
    ] = None
    tensor_parallel: Annotated[
        int,
        Setting(
            "Processes (ranks) that divide the heads and the matrices of the model (docs/scale.md). Threads and memory "
            "are divided by it, and the native step is not used."
        ),
    ] = 1
    mla: Annotated[
        MlaMode,
        Setting(
            "Latent attention (MLA): absorb the projections, expand the latents, or auto: the cheaper one for each "
            "sequence and step."
        ),
    ] = "auto"
    drafter: Annotated[
        DrafterChoice,
        Setting(
            "Speculative decoding: lookup (n-gram lookup), model (a draft model), mtp (the model's own MTP heads), "
            "auto (lookup and one of the others) or none. The output is unchanged."
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        Setting("Folder or hub id of a draft model with the same tokenizer.", default_text="the bundled model's own"),
    ] = None
    draft_tokens: Annotated[
        Literal["auto"] | int,
        Setting(
            f"Tokens of a draft, 0 to {MAX_DRAFT_TOKENS}. auto: the number with the highest expected tokens per "
            "second, often 0. 0: drafts only for requests that set a number."
        ),
    ] = "auto"
    draft_quantize: Annotated[
        Quantize | None, Setting("Weight quantisation of the draft model.", default_text="as --quantize")
    ] = None
    lora: Annotated[
        tuple[str, ...],
        Setting(
            "LoRA adapter as name=FOLDER, of PEFT with safetensors, or as name=FILE.gguf; requests choose it by the "
            "name as their model (docs/adapters.md). Repeatable.",
            default_text="none",
        ),
    ] = ()
    lora_dir: Annotated[
        str | None,
        Setting(
            "Folder of LoRA adapters: requests choose a subfolder or GGUF file by its name as their model, which "
            "loads it at the first request, and POST /v1/load_lora_adapter loads paths below it.",
            default_text="none",
        ),
    ] = None
    max_loras: Annotated[int, Setting("Most adapters of --lora-dir in memory.")] = 8
    lora_memory: Annotated[
        int | None,
        Setting(
            "Memory of the adapters of --lora-dir, such as 1GiB.",
            default_text="512 MiB, or 5 % of the free memory if that is less",
            parse=parse_size,
        ),
    ] = None
    embedding_model: Annotated[
        str | None,
        Setting("Folder or hub id of a second model, for embeddings or for ranking.", default_text="none"),
    ] = None
    disk_cache: Annotated[
        str | None,
        Setting(
            "Folder of the prefix cache's disk tier: computed prompts survive a restart. Its files contain text of "
            "users.",
            default_text="none",
            older_name="shelf",
        ),
    ] = None
    disk_cache_bytes: Annotated[
        int,
        Setting(
            "Size limit of the disk cache, such as 8GiB; the least recently used files are deleted.",
            default_text="8 GiB",
            older_name="shelf_bytes",
            parse=parse_size,
        ),
    ] = 8 * 2**30
    host_cache_bytes: Annotated[
        int,
        Setting(
            "Host memory, such as 4GiB, for prompts evicted from the prefix cache. On a CPU the cache is host memory "
            "already. With 0, the write buffer of a disk cache still takes up to 64 MiB.",
            older_name="shelf_memory_bytes",
            parse=parse_size,
        ),
    ] = 0

    model: str | None = None
    cells: int | None = None
    chunk: int = 256
    checkpoint: int = 1024
    kernels: Kernels = "auto"
    media: bool = True
    is_draft: bool = False
    shares_memory: bool = False

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
            lora=(),
            lora_dir=None,
            no_media=True,
            chat_template=None,
            context=context,
            slots=slots,
            cells=cells,
            # Rank 0 drafts alone.
            tensor_parallel=1,
        )

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of adapters by name."""
        return {name: folder for name, _, folder in (entry.partition("=") for entry in self.lora)}

    @property
    def has_adapters(self) -> bool:
        """Whether requests may have adapters, of the start or loaded at run time."""
        return bool(self.lora or self.lora_dir)

    @property
    def records_steps(self) -> bool:
        """Whether decoding steps may be recorded as CUDA graphs: not those that several ranks compute together."""
        return not self.enforce_eager and self.tensor_parallel == 1

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid setting."""
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in words:
                raise ConfigError(name, f"must be one of {', '.join(words)}, not {value}")
        for name in ("context", "slots", "cells", "chunk", "threads", "checkpoint", "tensor_parallel", "max_loras"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, f"must be at least 1, not {value}")
        if self.batch_invariant and self.dtype == "float64":
            raise ConfigError("batch_invariant", "is for float32, bfloat16 and float16, not float64")
        if self.context is not None and self.context < 8:
            raise ConfigError("context", f"must be at least 8, not {self.context}")
        for name in ("max_waiting", "disk_cache_bytes", "host_cache_bytes", "itl_target_ms", "lora_memory"):
            value = getattr(self, name)
            if value not in ("auto", None) and not 0 <= value < math.inf:
                raise ConfigError(name, f"must be 0 or more, not {value}")
        self._check_memory()
        self._check_device()
        self._check_text_file("calibration", self.calibration)
        self._check_text_file("chat_template", self.chat_template)
        self._check_drafts()
        self._check_adapters()
        if self.tensor_parallel > 1:
            self._check_tensor_parallel()

    @property
    def itl_target_seconds(self) -> float | None:
        """`itl_target_ms` in seconds; None: chosen at run time."""
        return None if self.itl_target_ms == "auto" else self.itl_target_ms / 1000

    @property
    def disk_cache_folder(self) -> str | None:
        """The folder of the disk cache; None: there is no disk cache."""
        return None if self.disk_cache in (None, "", "none") else self.disk_cache

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

    def _check_adapters(self) -> None:
        for entry in self.lora:
            name, _, folder = entry.partition("=")
            if not name or not folder or not name.isprintable() or name != name.strip():
                raise ConfigError("lora", f"must be name=FOLDER, not {entry}")
        if len(self.adapters) < len(self.lora):
            raise ConfigError("lora", "has a name twice")
        if self.lora_dir and not Path(self.lora_dir).expanduser().is_dir():
            raise ConfigError("lora_dir", f"{self.lora_dir} is no folder")
        if self.has_adapters and self.tensor_parallel > 1:
            raise ConfigError("lora" if self.lora else "lora_dir", "is not supported with --tensor-parallel")

    def _check_drafts(self) -> None:
        if self.draft_tokens != "auto" and not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
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
            "disk_cache": self.disk_cache_folder is not None,
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


# The words of the settings that have a closed set of them.
_WORDS = {name: words for name, hint in get_type_hints(EngineConfig).items() if (words := literal_words(hint))}
