"""Quantised weights on disk, so that a model is quantised once: one safetensors file for each model and format.

The name of a file is a digest of all dependencies of its content; it is written in a scratch folder and renamed
atomically. A file that cannot be read or does not fit is ignored.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.kernels.cache_folder import cache_folder, mark_used, scratch_folder, trim
from engine.kernels.packing import PackedMatrix, PackedStorage
from engine.kernels.rounding import FORMATS, Bits

log = logging.getLogger("cellar.engine")

# Version of the order of codes and the choice of scales (engine/kernels/rounding.py); part of the file name.
FORMAT = 1
# Smaller models are quantised as fast as a file is read.
MIN_BYTES = 64 * 2**20


class WeightStore:
    """The quantised layers of one model in one file."""

    def __init__(self, identity: str, bits: Bits, folder: Path | None = None) -> None:
        """`identity` is that of the original weights; the default `folder` is the user's cache folder."""
        key = hashlib.sha256(repr((FORMAT, identity, bits)).encode()).hexdigest()
        self.bits, self._name, self._folder = bits, f"int{bits}-{key[:32]}.safetensors", folder

    @property
    def file(self) -> Path:
        """Path of the file. Raises OSError if the user has no home folder."""
        return (self._folder or cache_folder("weights")) / self._name

    def read(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, PackedMatrix] | None:
        """The layers of the given shapes (outputs, columns) by name; None unless all are stored."""
        try:
            mark_used(self.file)
            matrices = {name: (*shape, FORMATS[self.bits]) for name, shape in shapes.items()}
            buffer = PackedStorage(matrices.values())
            with safe_open(self.file, framework="pt") as content:
                return {name: _read(content, name, buffer.allocate(*shape)) for name, shape in matrices.items()}
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, RuntimeError) as error:
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
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with scratch_folder(self.file.parent) as folder:
                scratch = folder / self.file.name
                save_file(tensors, scratch)
                os.replace(scratch, self.file)
        except (OSError, SafetensorError) as error:
            log.warning("the quantised weights are not stored for the next start: %s", error)
            return
        mark_used(self.file)
        trim()


def _read(content: safe_open, name: str, packed: PackedMatrix) -> PackedMatrix:
    for buffer, kind in ((packed.codes, "codes"), (packed.scales, "scales")):
        stored: Tensor = content.get_tensor(f"{name}.{kind}")  # type: ignore[no-untyped-call]
        if stored.shape != buffer.shape or stored.dtype != buffer.dtype:
            raise SafetensorError(f"{name}.{kind} has another shape or dtype")
        buffer.copy_(stored)
    return packed
