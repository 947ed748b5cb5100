"""Quantised weights on disk, so that a model is quantised once: one safetensors file for each model and format.

The name of a file is a digest of all dependencies of its content; it is written in a scratch folder and renamed
atomically. A file that cannot be read or does not fit is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.kernels.cache_folder import cache_folder, mark_used, replacing, trim
from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.packing import PackedMatrix, PackedStorage
from engine.kernels.rounding import Bits

log = logging.getLogger("cellar.engine")

# Version of the order of codes and the choice of scales and formats (engine/kernels/rounding.py, fit.py, formats.py);
# part of the file name.
FORMAT = 2
# Smaller models are quantised as fast as a file is read.
MIN_BYTES = 64 * 2**20


class WeightStore:
    """The quantised layers of one model in one file."""

    def __init__(self, identity: str, bits: Bits, folder: Path | None = None) -> None:
        """`identity` is that of the original weights; the default `folder` is the user's cache folder."""
        self.key = hashlib.sha256(repr((FORMAT, identity, bits)).encode()).hexdigest()[:32]
        self.bits, self._name, self._folder = bits, f"int{bits}-{self.key}.safetensors", folder

    @property
    def file(self) -> Path:
        """Path of the file. Raises OSError if the user has no home folder."""
        return (self._folder or cache_folder("weights")) / self._name

    def read(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, PackedMatrix] | None:
        """The layers of the given shapes (outputs, columns) by name; None unless all are stored."""
        try:
            mark_used(self.file)
            with safe_open(self.file, framework="pt") as content:
                formats = _formats(content)
                matrices = {name: (*shape, formats[name]) for name, shape in shapes.items()}
                buffer = PackedStorage(matrices.values())
                return {name: _read(content, name, buffer.allocate(*shape)) for name, shape in matrices.items()}
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
            log.warning("%s is not read (%s)", self._name, error)
            return None

    def write(self, layers: Mapping[str, PackedMatrix]) -> None:
        """Store the layers for the next start; a failure is logged."""
        tensors: dict[str, Tensor] = {}
        for name, packed in layers.items():
            tensors |= {f"{name}.codes": packed.codes, f"{name}.scales": packed.scales}
        if sum(tensor.nbytes for tensor in tensors.values()) < MIN_BYTES:
            return
        try:
            with replacing(self.file) as scratch:
                formats = {name: packed.format for name, packed in layers.items()}
                save_file(tensors, scratch, metadata={"formats": json.dumps(formats)})
        except (OSError, SafetensorError) as error:
            log.warning("the quantised weights are not stored for the next start: %s", error)
            return
        mark_used(self.file)
        trim()


def _formats(content: safe_open) -> dict[str, WeightFormat]:
    """The weight format of each matrix. Raises KeyError or ValueError for a file without valid formats."""
    formats = json.loads((content.metadata() or {})["formats"])  # type: ignore[no-untyped-call]
    if not isinstance(formats, dict) or not set(formats.values()) <= set(LAYOUTS):
        raise ValueError("unknown weight formats")
    return formats


def _read(content: safe_open, name: str, packed: PackedMatrix) -> PackedMatrix:
    for buffer, kind in ((packed.codes, "codes"), (packed.scales, "scales")):
        stored: Tensor = content.get_tensor(f"{name}.{kind}")  # type: ignore[no-untyped-call]
        if stored.shape != buffer.shape or stored.dtype != buffer.dtype:
            raise SafetensorError(f"{name}.{kind} has another shape or dtype")
        buffer.copy_(stored)
    return packed
