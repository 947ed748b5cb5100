"""The decoder architecture of a model, stored in the user's cache folder beside the outcome of the checks.

The native step's detection recomputes every layer (engine/native/detection.py): 0.6 s for 18 layers (measured). A file
holds the decoder with references to the model's own tensors, and the values of the tensors derived from them. Its name
is that of the outcome, a digest of checkpoint, code, machine and settings; a file of other values of norms and biases,
or one that cannot be read, is replaced.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from engine.kernels import packing
from engine.kernels.cache_folder import mark_used, replacing
from engine.native import decoder
from engine.native.decoder import DecoderSpec
from engine.quantize.experts import QuantizedExperts
from kvcache import spec

log = logging.getLogger("cellar.engine")

# The decoder, and the one with the rotation beyond the original length.
Decoders: TypeAlias = tuple[DecoderSpec, DecoderSpec | None]

# Modules of the classes in a file.
_MODULES = (decoder.__name__, packing.__name__, spec.__name__)
# Bytes of the largest tensor that is stored by value.
_VALUE_BYTES = 4 * 2**20


class DecoderFile:
    """The stored decoder of one model."""

    def __init__(self, file: Path, model: nn.Module) -> None:
        self._file, self._named = file, dict(_named(model))
        self._digest = _digest_of_values(model)

    def read(self) -> Decoders | None:
        """The decoder, with the model's own tensors; None if there is none that can be read."""
        try:
            content = self._file.read_bytes()
            mark_used(self._file)
            length = len(self._digest)
            if content[:length] != self._digest or content[length : 2 * length] != _digest(content[2 * length :]):
                return None
            decoders: Decoders = _DecoderUnpickler(io.BytesIO(content[2 * length :]), self._named).load()
        except FileNotFoundError:
            return None
        except Exception as error:
            # The type of the error depends on the damaged bytes.
            log.warning("%s is not read, and the layers are detected (%s)", self._file.name, error)
            return None
        return decoders

    def write(self, decoders: Decoders) -> None:
        """Store the decoder; a failure is logged."""
        try:
            buffer = io.BytesIO()
            _DecoderPickler(buffer, self._named).dump(decoders)
            content = buffer.getvalue()
            with replacing(self._file) as scratch:
                scratch.write_bytes(self._digest + _digest(content) + content)
        except (OSError, ValueError, pickle.PicklingError) as error:
            log.info("the layers are detected again at the next start: %s", error)


def _named(model: nn.Module) -> Iterator[tuple[str, object]]:
    """The objects that a file refers to: parameters, buffers and the matrices of quantised experts."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            for at, matrix in enumerate((*module.up, *module.down)):
                yield f"{name}.{at}", matrix


def _digest_of_values(model: nn.Module) -> bytes:
    """A digest of the parameters that decoders hold converted: norms, biases and convolutions."""
    digest = hashlib.sha256()
    for name, own in model.named_parameters():
        if own.dim() != 2 and own.nbytes <= _VALUE_BYTES:
            digest.update(f"{name} {own.dtype} {tuple(own.shape)} ".encode())
            digest.update(_bytes(own))
    return digest.digest()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(dtype: str, shape: tuple[int, ...], content: bytes) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(bytearray(content), dtype=kind).view(shape)


class _DecoderPickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, named: dict[str, object]) -> None:
        super().__init__(buffer, protocol=5)
        self._names = {id(own): name for name, own in named.items()}

    def persistent_id(self, value: Any) -> str | None:
        """The name of an object of the model."""
        return self._names.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        """Replace other tensors by the arguments of `_tensor`."""
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.nbytes > _VALUE_BYTES or value.numel() == 0:
            raise ValueError(f"a tensor of the shape {tuple(value.shape)} is no parameter of the model")
        return _tensor, (str(value.dtype).removeprefix("torch."), tuple(value.shape), _bytes(value))


class _DecoderUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, named: dict[str, object]) -> None:
        super().__init__(buffer)
        self._named = named

    def persistent_load(self, name: Any) -> object:
        """The object of the model with this name."""
        return self._named[name]

    def find_class(self, module: str, name: str) -> Any:
        """Allow the dataclasses of a decoder and `_tensor` only."""
        if (module, name) == (__name__, "_tensor"):
            return _tensor
        found = super().find_class(module, name) if module in _MODULES else None
        if isinstance(found, type) and found.__module__ == module:
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")
