"""The GGUF container: metadata, and tensors in memory-mapped files.

The gguf package provides the types, but not the reader. Its reader makes an array object of each item of metadata (12 s
for a vocabulary of 262,144 tokens, here 0.15 s), loops over counts that the file cannot hold, and accepts overlapping
tensors. This parser compares each length with the remaining bytes before it reads.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

# Bounds of counts, far above the counts of any model: a small hostile file must not cost minutes or gigabytes.
_MAX_KEYS, _MAX_TENSORS, _MAX_ITEMS, _MAX_SHARDS, _MAX_NAME_BYTES = 2**16, 2**18, 2**24, 2**10, 2**16
# Of ggml.
_MAX_DIMENSIONS = 4
_MAGIC, _VERSIONS, _DEFAULT_ALIGNMENT = b"GGUF", (2, 3), 32
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}

Bytes = NDArray[np.uint8]
Scalar = str | bool | int | float
Value = Scalar | list[str] | list[bool] | list[int] | list[float]


class GgufError(ValueError):
    """A GGUF file is damaged, or has a form that is not supported."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    shape  outermost dimension first: a matrix has [outputs, columns]
    data   its bytes in the mapped file
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: Bytes

    @property
    def rows(self) -> Bytes:
        """The blocks, uint8 [product of the outer dimensions, bytes of a row]."""
        return self.data.reshape(math.prod(self.shape[:-1]), -1)


class Metadata(Mapping[str, Value]):
    """The metadata of a model: scalars and lists by key, such as "general.architecture".

    Values are decoded at access. Access raises GgufError for text that is not UTF-8.
    """

    def __init__(self, content: Bytes, entries: Mapping[str, tuple[int, GGUFValueType]]) -> None:
        """`content` ends after the last value; `entries` are the offset and the type of each value in it."""
        self._content, self._entries = content, entries

    @property
    def digest(self) -> str:
        """A digest of all keys and values."""
        return hashlib.sha256(self._content.data).hexdigest()

    def __getitem__(self, key: str) -> Value:
        offset, kind = self._entries[key]
        try:
            return _Cursor(self._content, offset).value(kind)
        except UnicodeDecodeError as error:
            raise GgufError(f"its metadata {key} is not UTF-8") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find_strings(self, key: str, texts: Iterable[str]) -> tuple[int, dict[str, int]]:
        """The length of a list of strings, and the last position of each of some texts in it; others are not decoded.

        Raises GgufError for another type, or without the list.
        """
        if key not in self._entries:
            raise GgufError(f"its metadata lacks {key}")
        offset, kind = self._entries[key]
        cursor = _Cursor(self._content, offset)
        if kind != GGUFValueType.ARRAY or cursor.value_type() != GGUFValueType.STRING:
            raise GgufError(f"its metadata {key} is no list of strings")
        return cursor.find_strings(cursor.integer(8, key), texts)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer. Raises GgufError without one if there is no default."""
        value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise GgufError(f"its metadata {key} is no integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises GgufError without one if there is no default."""
        value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise GgufError(f"its metadata {key} is no finite number")
        # The shortest decimal number of a float32 is the original: 1e-06, not 9.999999974752427e-07.
        return float(str(np.float32(value))) if np.float32(value) == value else float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """A boolean. Raises GgufError without one if there is no default."""
        value = self._default(key, default)
        if not isinstance(value, bool):
            raise GgufError(f"its metadata {key} is no boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises GgufError without one if there is no default."""
        value = self._default(key, default)
        if not isinstance(value, str):
            raise GgufError(f"its metadata {key} is no string")
        return value

    def _default(self, key: str, default: Value | None) -> Value:
        value = self.get(key, default)
        if value is None:
            raise GgufError(f"its metadata lacks {key}")
        return value


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The metadata and the tensors of all shards of a model."""

    files: tuple[Path, ...]
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


def read_model(file: Path) -> GgufModel:
    """The model of a file, or of all shards if the file is a shard; tensors are mapped, not read.

    Raises GgufError for a damaged file, OSError if a file cannot be read.
    """
    files = shard_files(file)
    metadata, tensors = _read_file(files[0])
    count = metadata.integer("split.count", 1)
    if count > 1 and len(files) != count:
        raise GgufError(f"{files[0].name} is one of {count} shards, but its name does not end in -00001-of-{count:05d}")
    for number, shard in enumerate(files[1:], 1):
        shard_metadata, more = _read_file(shard)
        if (shard_metadata.integer("split.no", -1), shard_metadata.integer("split.count", -1)) != (number, len(files)):
            raise GgufError(f"{shard.name} is another shard than its name says")
        if duplicates := tensors.keys() & more.keys():
            raise GgufError(f"{shard.name} has the tensor {min(duplicates)} of another shard")
        tensors |= more
    if len(tensors) != metadata.integer("split.tensors.count", len(tensors)):
        raise GgufError(f"its shards have {len(tensors)} tensors of {metadata['split.tensors.count']}")
    return GgufModel(files, metadata, tensors)


def read_metadata(file: Path) -> Metadata:
    """The metadata of a model, that of the first shard. Raises as `read_model`."""
    return _read_file(shard_files(file)[0])[0]


def shard_files(file: Path) -> tuple[Path, ...]:
    """All shards of the model of a file by their names, the first one first. Raises GgufError if one is missing."""
    match = _SHARD_NAME.fullmatch(file.name)
    if match is None:
        return (file,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= _MAX_SHARDS:
        raise GgufError(f"{file.name} is no shard of a model: its number is out of range")
    suffix = file.name[-len("-of-00000.gguf") :]
    files = tuple(file.with_name(f"{match['stem']}-{number:05d}{suffix}") for number in range(1, count + 1))
    missing = next((shard.name for shard in files if not shard.is_file()), None)
    if missing is not None:
        raise GgufError(f"it lacks the shard {missing}")
    return files


def _read_file(file: Path) -> tuple[Metadata, dict[str, GgufTensor]]:
    try:
        return parse(_map_file(file))
    except GgufError as error:
        raise GgufError(f"{file.name}: {error}") from error


def release_pages(content: Bytes) -> None:
    """Remove the pages of a mapped file from the memory of this process; the next access reads them again."""
    mapped: object = content
    while isinstance(mapped, np.ndarray):
        mapped = mapped.base
    if not isinstance(mapped, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = content.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    # Other content shares the first and the last page.
    first, end = -(-start // mmap.PAGESIZE), (start + content.nbytes) // mmap.PAGESIZE
    if first < end:
        mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)


def _map_file(file: Path) -> Bytes:
    """The content of a file; pages are private if they are written, because torch has no read-only tensors."""
    if not file.stat().st_size:
        raise GgufError("the file is empty")
    return np.memmap(file, dtype=np.uint8, mode="c").view(np.ndarray)


def parse(content: Bytes) -> tuple[Metadata, dict[str, GgufTensor]]:
    """The metadata and the tensors of one file's content. Raises GgufError."""
    cursor = _Cursor(content)
    key_count, tensor_count = _read_counts(cursor)
    entries = dict[str, tuple[int, GGUFValueType]]()
    for number in range(key_count):
        key, kind = cursor.name(f"key {number}"), cursor.value_type()
        if key in entries:
            raise GgufError(f"its metadata has the key {key} twice")
        entries[key] = cursor.offset, kind
        cursor.skip_value(kind, key)
    metadata = Metadata(content[: cursor.offset], entries)
    alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
    if not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise GgufError(f"its alignment is {alignment}, no power of two")
    headers = [cursor.tensor_header(f"tensor {number}") for number in range(tensor_count)]
    data = content[-(-cursor.offset // alignment) * alignment :]
    _check_places(headers, len(data), alignment)
    return metadata, _tensors(headers, data)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of keys and tensors."""
    if len(cursor.content) < 24:
        raise GgufError("the file is truncated: it ends inside its header")
    if cursor.take(4, "magic").tobytes() != _MAGIC:
        raise GgufError("it does not begin with GGUF: it is another kind of file")
    version = cursor.integer(4, "version")
    if version not in _VERSIONS:
        swapped = version >= 2**16
        reason = "it is big-endian" if swapped else f"its version is {version}; versions 2 and 3 are supported"
        raise GgufError(reason)
    tensor_count, key_count = cursor.integer(8, "number of tensors"), cursor.integer(8, "number of keys")
    if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
        raise GgufError(f"its header counts {tensor_count} tensors and {key_count} keys, beyond the limits")
    return key_count, tensor_count


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return int(math.prod(self.shape) // block * block_bytes)


def _check_places(headers: list[_TensorHeader], size: int, alignment: int) -> None:
    """Raise GgufError unless all tensors are aligned, inside `size` bytes and apart from each other."""
    end, previous = 0, ""
    for header in sorted(headers, key=lambda header: (header.offset, header.bytes)):
        if header.offset % alignment:
            raise GgufError(f"the tensor {header.name} is not aligned to {alignment} bytes")
        if header.offset < end:
            raise GgufError(f"the tensors {previous} and {header.name} overlap")
        end, previous = header.offset + header.bytes, header.name
        if end > size:
            raise GgufError(f"the file is truncated: it ends inside the tensor {header.name}")


def _tensors(headers: list[_TensorHeader], data: Bytes) -> dict[str, GgufTensor]:
    tensors = dict[str, GgufTensor]()
    for header in headers:
        if header.name in tensors:
            raise GgufError(f"it has the tensor {header.name} twice")
        content = data[header.offset : header.offset + header.bytes]
        tensors[header.name] = GgufTensor(header.name, header.type, header.shape, content)
    return tensors


class _Cursor:
    """Reads a header in order; every read is checked against the end of the content."""

    def __init__(self, content: Bytes, offset: int = 0) -> None:
        self.content, self.offset = content, offset
        self._view = content.data

    def take(self, count: int, field: str) -> Bytes:
        """The next bytes. Raises GgufError if fewer are left."""
        self._require(count, field)
        self.offset += count
        return self.content[self.offset - count : self.offset]

    def integer(self, size: int, field: str) -> int:
        """The next unsigned integer of 4 or 8 bytes."""
        self._require(size, field)
        self.offset += size
        return int.from_bytes(self._view[self.offset - size : self.offset], "little")

    def name(self, field: str) -> str:
        """The next string, that of a key or a tensor."""
        length = self.integer(8, field)
        if not 0 < length <= _MAX_NAME_BYTES:
            raise GgufError(f"the name of {field} has {length} bytes")
        try:
            return self.take(length, field).tobytes().decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"the name of {field} is not UTF-8") from error

    def value_type(self) -> GGUFValueType:
        """The next type of a value."""
        number = self.integer(4, "type of a value")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise GgufError(f"its metadata has values of the unknown type {number}") from error

    def skip_value(self, kind: GGUFValueType, key: str) -> None:
        """Check the next value, and continue after it."""
        if kind == GGUFValueType.ARRAY:
            item, count = self.value_type(), self.integer(8, key)
            if item == GGUFValueType.ARRAY or count > _MAX_ITEMS:
                raise GgufError(f"its metadata {key} is a nested array, or has {count} items")
            self._skip_items(item, count, key)
        else:
            self._skip_items(kind, 1, key)

    def _skip_items(self, kind: GGUFValueType, count: int, key: str) -> None:
        if kind != GGUFValueType.STRING:
            self.take(count * np.dtype(_SCALARS[kind]).itemsize, key)
            return
        unpack, view, offset, last = struct.Struct("<Q").unpack_from, self._view, self.offset, len(self._view) - 8
        for _ in range(count):
            if offset > last:
                raise GgufError(f"the file is truncated: it ends inside {key}")
            offset += 8 + unpack(view, offset)[0]
        self.offset = offset
        self._require(0, key)

    def value(self, kind: GGUFValueType) -> Value:
        """The next value, which `skip_value` has checked. Raises UnicodeDecodeError."""
        if kind != GGUFValueType.ARRAY:
            return self._items(kind, 1)[0]
        item, count = self.value_type(), self.integer(8, "array")
        return self._items(item, count)

    def _items(self, kind: GGUFValueType, count: int) -> list[str] | list[bool] | list[int] | list[float]:
        if kind == GGUFValueType.STRING:
            return self._strings(count)
        dtype = np.dtype(_SCALARS[kind])
        items = self.take(count * dtype.itemsize, "array").view(dtype)
        values: list[int] = (items != 0 if kind == GGUFValueType.BOOL else items).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        unpack, view, offset = struct.Struct("<Q").unpack_from, self._view, self.offset
        strings = []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(view, offset)[0]
            strings.append(str(view[start:offset], "utf-8"))
        self.offset = offset
        return strings

    def find_strings(self, count: int, texts: Iterable[str]) -> tuple[int, dict[str, int]]:
        """See Metadata.find_strings, for the next strings."""
        unpack, view, ends = struct.Struct("<Q").unpack_from, self._view, [self.offset]
        for _ in range(count):
            ends.append(ends[-1] + 8 + unpack(view, ends[-1])[0])
        starts = np.array(ends) + 8
        lengths, ids = np.diff(starts) - 8, dict[str, int]()
        for text in texts:
            encoded = text.encode()
            [same] = np.nonzero(lengths == len(encoded))
            for offset, byte in enumerate(encoded):
                same = same[self.content[starts[same] + offset] == byte]
            if len(same):
                ids[text] = int(same[-1])
        return count, ids

    def tensor_header(self, field: str) -> _TensorHeader:
        """The next header of a tensor."""
        name = self.name(field)
        dimensions = self.integer(4, field)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise GgufError(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self.integer(8, name) for _ in range(dimensions)]))
        number, offset = self.integer(4, name), self.integer(8, name)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise GgufError(f"the tensor {name} has the unknown type {number}") from error
        if not all(shape) or shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise GgufError(f"the tensor {name} has the shape {list(shape)}, which {kind.name} cannot have")
        return _TensorHeader(name, kind, shape, offset)

    def _require(self, count: int, field: str) -> None:
        if count > len(self.content) - self.offset:
            raise GgufError(f"the file is truncated: it ends inside {field}")
