"""Outcomes of the checks at load, in the user's cache folder, so that the next start can skip the checks.

The name of an outcome is a digest of its dependencies: the checkpoint, this code, torch and transformers, the processor
and the settings. Only a model that passed every check is stored; a failed check, or an outcome that cannot be read, is
checked again at the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

import kvcache.spec
from engine.kernels.cache_folder import cache_folder, mark_used, replacing, trim
from engine.model.layers import CachedLayer
from engine.quantize.plan import QuantizationPlanNames
from kvcache.spec import AttentionRange, LayerSpec, Rotation

log = logging.getLogger("cellar.engine")

_SOURCES = ("*.py", "*.cpp", "*.h")
_PROCESSOR = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of the checks of a model that has the same logits in packed batches as alone.

    layers             the attention layers that store cells
    has_hidden_states  whether the hidden states of the last layer can be captured
    quantised          the layers to quantise; None: nothing was surveyed
    format             name of the format of quantised weights; None: weights keep their dtype
    native             whether the native step runs the model
    batch_invariant    see ModelInfo
    """

    layers: tuple[CachedLayer, ...]
    has_hidden_states: bool
    quantised: QuantizationPlanNames | None
    format: str | None
    native: bool
    batch_invariant: bool


class OutcomeFile:
    """The stored outcome for one model, code, machine and configuration."""

    def __init__(self, identity: object, folder: Path | None = None) -> None:
        """`identity` is that of the checkpoint and the settings; the default `folder` is the user's cache folder."""
        key = hashlib.sha256(repr((_software(), _processor(), identity)).encode()).hexdigest()
        self._name, self._folder = f"{key[:32]}.json", folder

    @property
    def file(self) -> Path:
        """Path of the outcome. Raises OSError if the user has no home folder."""
        return (self._folder or cache_folder("checks")) / self._name

    def read(self) -> Outcome | None:
        """The outcome; None if there is none that can be read."""
        try:
            outcome = _outcome(json.loads(self.file.read_text(encoding="utf-8")))
            mark_used(self.file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("%s is not read, and the model is checked (%s)", self._name, error)
            return None
        return outcome

    def discard(self) -> None:
        """Delete the outcome: the next start checks the model."""
        with suppress(OSError):
            self.file.unlink(missing_ok=True)

    def write(self, outcome: Outcome) -> None:
        """Store the outcome; a failure is logged."""
        try:
            with replacing(self.file) as scratch:
                scratch.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        except OSError as error:
            log.info("the checks are repeated at the next start: %s", error)
            return
        trim()


def _outcome(content: dict[str, Any]) -> Outcome:
    quantised = content["quantised"]
    return Outcome(
        layers=tuple(map(_layer, content["layers"])),
        has_hidden_states=bool(content["has_hidden_states"]),
        quantised=None if quantised is None else _names(quantised),
        format=content["format"],
        native=bool(content["native"]),
        batch_invariant=bool(content["batch_invariant"]),
    )


def _names(content: dict[str, Any]) -> QuantizationPlanNames:
    return QuantizationPlanNames(
        tuple(map(tuple, content["groups"])), dict(content["skipped"]), tuple(content["experts"])
    )


def _layer(content: dict[str, Any]) -> CachedLayer:
    spec = dict(content["spec"])
    rotation = spec["rotation"]
    if rotation is not None:
        rotation = Rotation(**rotation | {"inverse_frequency": tuple(rotation["inverse_frequency"])})
    spec |= {"attention_range": AttentionRange(**spec["attention_range"]), "rotation": rotation}
    return CachedLayer(int(content["index"]), LayerSpec(**spec), tuple(content["sharing_layers"]))


@cache
def _software() -> tuple[str, ...]:
    """Versions of the libraries, and a digest of the code that runs models."""
    # One update of a digest: each waits for the interpreter lock, which the tokenizer's thread holds.
    content = bytearray()
    for folder in (Path(__file__).resolve().parents[2], Path(kvcache.spec.__file__).resolve().parent):
        for file in sorted(match for kind in _SOURCES for match in folder.rglob(kind)):
            code = file.read_bytes()
            content += f"{file.relative_to(folder)} {len(code)} ".encode() + code
    digest = hashlib.sha256(content).hexdigest()
    return (torch.__version__, transformers.__version__, tokenizers.__version__, digest)


def _processor() -> tuple[str, ...]:
    """The properties of the processor that choose the instructions of kernels."""
    lines = _PROCESSOR.read_text().splitlines() if _PROCESSOR.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    # platform.processor starts a process.
    return (platform.machine(), torch.backends.cpu.get_cpu_capability(), flags or platform.processor())
