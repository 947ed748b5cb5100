"""Reads the folder of a PEFT adapter: adapter_config.json and adapter_model.safetensors, no other file."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Container, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from engine.adapters.adapter import Adapter, LowRank
from engine.adapters.config import CONFIG_FILE, AdapterConfig
from engine.errors import AdapterUnsupported

WEIGHTS_FILE = "adapter_model.safetensors"
# A pickle, which is never read.
_PICKLE_FILE = "adapter_model.bin"
_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_CONFIG_BYTES = 2**20


def read_adapter(
    name: str,
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    root: Path | None = None,
) -> Adapter:
    """The adapter in a folder. Raises AdapterUnsupported, without the path: clients get the text.

    shapes  [outputs, columns] of the layers that can be adapted, by the name of the module
    dtype   of its factors in memory; float32 ones stay bfloat16 where the file has it and the scaling is exact
    root    symbolic links are followed inside of it only; None: everywhere
    """
    # Each file is read once: what is validated, loaded and part of the digest is the same.
    content, weights = _read_files(name, folder, root)
    config = AdapterConfig.parse(name, content)
    try:
        tensors = safetensors.torch.load(weights)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterUnsupported(name, f"{WEIGHTS_FILE} cannot be read ({error})") from error
    pairs = _pairs(name, tensors, shapes)
    layers = {layer: _factors(name, layer, pair, shapes, config, dtype) for layer, pair in pairs.items()}
    if not layers:
        raise AdapterUnsupported(name, f"{WEIGHTS_FILE} is empty")
    return Adapter(name, _digest(content, weights), layers)


def _read_files(name: str, folder: Path, root: Path | None) -> tuple[bytes, bytes]:
    """The contents of the configuration and of the weights, of one version of the folder."""
    if not (folder / CONFIG_FILE).is_file():
        raise AdapterUnsupported(name, f"its folder has no {CONFIG_FILE}")
    if not (folder / WEIGHTS_FILE).is_file():
        remedy = f"; {_PICKLE_FILE} is not read: save it as safetensors" if (folder / _PICKLE_FILE).exists() else ""
        raise AdapterUnsupported(name, f"its folder has no {WEIGHTS_FILE}{remedy}")
    files = (folder / CONFIG_FILE, folder / WEIGHTS_FILE)
    try:
        if root is not None and not all(file.resolve().is_relative_to(root) for file in files):
            raise AdapterUnsupported(name, "a symbolic link leaves the folder of adapters")
        versions = [file_version(file) for file in files]
        with files[0].open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
        if len(content) > _MAX_CONFIG_BYTES:
            raise AdapterUnsupported(name, f"{CONFIG_FILE} has more than {_MAX_CONFIG_BYTES} bytes")
        weights = files[1].read_bytes()
        # A configuration with the weights of another version would scale them wrongly.
        if versions != [file_version(file) for file in files]:
            raise AdapterUnsupported(name, "its files changed while they were read")
        return content, weights
    except OSError as error:
        raise AdapterUnsupported(name, f"its files cannot be read ({error.strerror})") from error


def least_bytes(path: Path) -> int:
    """The least memory of the adapter in a folder or a GGUF file, by the size of its file; 0 if there is none."""
    try:
        size = (path if path.suffix == ".gguf" else path / WEIGHTS_FILE).stat().st_size
    except OSError:
        return 0
    # A file of float64 numbers; the factors of others are no smaller than their files, but for a header.
    return size // 2


def file_version(file: Path) -> tuple[int, ...]:
    """Differs after a write to the file, or when another file has its name."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _pairs(name: str, tensors: Mapping[str, Tensor], layers: Container[str]) -> dict[str, dict[str, Tensor]]:
    """The stored matrices A and B of each layer. Raises AdapterUnsupported for other tensors and layers."""
    pairs: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, matrix in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterUnsupported(name, f"{key[:200]} is no low-rank matrix of a linear layer")
        if match["layer"] not in layers:
            raise AdapterUnsupported(name, f"the model has no linear layer {match['layer'][:200]}")
        if matrix.dtype not in _DTYPES:
            raise AdapterUnsupported(name, f"{key[:200]} has the dtype {matrix.dtype}")
        pairs[match["layer"]][match["side"]] = matrix
    return dict(pairs)


def _factors(
    name: str,
    layer: str,
    pair: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, int]],
    config: AdapterConfig,
    dtype: torch.dtype,
) -> LowRank:
    """The validated factors of one layer. Raises AdapterUnsupported."""
    if len(pair) < 2:
        raise AdapterUnsupported(name, f"{layer} has only one of the matrices lora_A and lora_B")
    rank, scaling = config.rank_of(layer), config.scaling_of(layer)
    return scaled_factors(name, layer, (pair["A"], pair["B"]), shapes[layer], rank, scaling, dtype)


def scaled_factors(
    name: str,
    layer: str,
    pair: tuple[Tensor, Tensor],
    shape: tuple[int, int],
    rank: int,
    scaling: float,
    dtype: torch.dtype,
) -> LowRank:
    """The factors of a layer from its stored matrices. Raises AdapterUnsupported for other shapes than those of
    `shape` [outputs, columns] and of a rank above 0, and for numbers that are not finite.
    """
    (down, up), (outputs, columns) = pair, shape
    # The rank of the file must be that of its configuration, which the scaling is computed from.
    if rank < 1 or (*down.shape,) != (rank, columns) or (*up.shape,) != (outputs, rank):
        raise AdapterUnsupported(
            name,
            f"the matrices of {layer} have the shapes {[*down.shape]} and {[*up.shape]}, "
            f"not {[rank, columns]} and {[outputs, rank]}",
        )
    # Copies: the bits of a product may depend on the alignment of a matrix.
    factors = LowRank(down.to(dtype, copy=True), up.to(dtype, copy=True).mul_(scaling))
    if not (factors.down.isfinite().all() and factors.up.isfinite().all()):
        raise AdapterUnsupported(name, f"the matrices of {layer} have numbers that are not finite")
    stored = dtype == torch.float32 and down.dtype == up.dtype == torch.bfloat16
    return _narrowed(factors) if stored else factors


def _narrowed(factors: LowRank) -> LowRank:
    """bfloat16 factors where the scaling leaves the numbers of the file exact, such as 2; else the same ones."""
    narrow = LowRank(factors.down.bfloat16(), factors.up.bfloat16())
    return narrow if torch.equal(narrow.up.float(), factors.up) else factors


def _digest(content: bytes, weights: bytes) -> str:
    digest = hashlib.sha256(len(content).to_bytes(8, "little"))
    digest.update(content)
    digest.update(weights)
    return digest.hexdigest()
