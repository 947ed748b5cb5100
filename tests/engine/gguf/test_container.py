"""Reading GGUF files: equal to the gguf package's reader, and safe with damaged files."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.gguf.container import (
    GgufError,
    GgufModel,
    GgufTensor,
    Metadata,
    parse,
    read_metadata,
    read_model,
    release_pages,
)

VALUES: dict[str, Any] = {
    "general.alignment": 32,
    "test.name": "näme",
    "test.count": 7,
    "test.flag": True,
    "test.factor": 0.5,
    "test.words": ["a", "", "žluť"],
    "test.numbers": [1, -2, 3],
    "test.factors": [0.5, 2.0],
    "test.flags": [True, False],
}
TENSORS = {
    "plain": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(8, dtype=np.float16).reshape(2, 2, 2),
    "quantised": gguf.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q8_0
    ),
}


def write(file: Path, tensors: dict[str, Any] | None = None, *, shard_tensors: int = 0) -> Path:
    """Write a small file, or its shards; the path of the file, or of the first shard."""
    writer = gguf.GGUFWriter(file, "llama", split_max_tensors=shard_tensors)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in VALUES.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            adders[type(value)](key, value)
    for name, data in (TENSORS if tensors is None else tensors).items():
        kind = gguf.GGMLQuantizationType.Q8_0 if data.dtype == np.uint8 else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if file.is_file() else sorted(file.parent.glob("*-00001-of-*"))[0]


def read_all(file: Path) -> GgufModel:
    """Read a file with every value of its metadata, and every byte of its tensors."""
    model = read_model(file)
    read_values(model.metadata, model.tensors)
    return model


def read_values(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> None:
    """Decode every value, and add every byte of the tensors."""
    for key in metadata:
        assert metadata[key] is not None
    for tensor in tensors.values():
        tensor.rows.sum()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small file."""
    return write(tmp_path / "small.gguf")


def test_metadata_and_tensors_are_those_of_the_package(file: Path) -> None:
    """Values, types, shapes and bytes."""
    model, reader = read_all(file), gguf.GGUFReader(file)

    assert {key: model.metadata[key] for key in VALUES} == VALUES
    own = {key for key in reader.fields if not key.startswith("GGUF.")}
    assert {key: model.metadata[key] for key in own} == {key: reader.fields[key].contents() for key in own}
    assert dict(read_metadata(file)) == dict(model.metadata)
    for expected in reader.tensors:
        tensor = model.tensors[expected.name]
        assert tensor.type == expected.tensor_type
        assert tensor.shape == tuple(reversed(expected.shape.tolist()))
        assert tensor.data.tobytes() == expected.data.tobytes()
    assert model.tensors["quantised"].rows.shape == (2, 68)


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_every_shard_opens_the_whole_model(tmp_path: Path, shard: int) -> None:
    """The metadata is that of the first shard."""
    write(tmp_path / "large.gguf", shard_tensors=1)
    files = sorted(tmp_path.glob("*.gguf"))
    model = read_all(files[shard])

    assert tuple(files) == model.files
    assert TENSORS.keys() == model.tensors.keys()
    assert model.metadata["test.name"] == VALUES["test.name"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """Also if a shard is renamed."""
    write(tmp_path / "large.gguf", shard_tensors=1)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(GgufError, match=f"lacks the shard {second.name}"):
        read_model(first)
    second.write_bytes(third.read_bytes())
    with pytest.raises(GgufError, match=r"another shard"):
        read_model(first)
    second.write_bytes(content)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(GgufError, match="one of 3 shards"):
        read_model(alone)
    with pytest.raises(GgufError, match="out of range"):
        read_model(tmp_path / "large-00004-of-00003.gguf")


def test_accessors_name_the_key(file: Path) -> None:
    """Without the key, and with a value of another type."""
    metadata = read_metadata(file)

    assert metadata.integer("test.count") == 7
    assert metadata.integer("test.other", 3) == 3
    assert metadata.number("test.count") == 7.0
    for access in (metadata.integer, metadata.number, metadata.boolean, metadata.text):
        with pytest.raises(GgufError, match=r"lacks test\.other"):
            access("test.other")
        with pytest.raises(GgufError, match=r"test\.words is no"):
            access("test.words")


HEADER = struct.Struct("<4sIQQ")


def text(value: str | bytes) -> bytes:
    """A string of a file."""
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def number(key: str, value: int) -> bytes:
    """A key with an unsigned integer."""
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """The header of a tensor."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def content(keys: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3) -> bytes:
    """The bytes of a file."""
    header = HEADER.pack(b"GGUF", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


ARRAY_OF = "<IIQ"
HOSTILE = {
    "empty": (b"", "empty"),
    "short": (b"GGUF", "truncated"),
    "other format": (b"PK\3\4" + bytes(40), "another kind of file"),
    "version 1": (content([], [], version=1), "version is 1"),
    "big-endian": (content([], [], version=3 << 24), "big-endian"),
    "tensor count": (HEADER.pack(b"GGUF", 3, 2**60, 0), "counts 1152921504606846976 tensors"),
    "key count": (HEADER.pack(b"GGUF", 3, 0, 2**60), "1152921504606846976 keys"),
    "fewer keys": (HEADER.pack(b"GGUF", 3, 0, 9), "truncated"),
    "long key": (HEADER.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q", 2**63), "has 9223372036854775808 bytes"),
    "key of no text": (content([text(b"\xff") + struct.pack("<II", 4, 1)], []), "not UTF-8"),
    "string beyond the file": (content([text("a") + struct.pack("<IQ", 8, 2**62)], []), "truncated"),
    "unknown value type": (content([text("a") + struct.pack("<II", 77, 1)], []), "unknown type 77"),
    "array of 2^60": (content([text("a") + struct.pack(ARRAY_OF, 9, 4, 2**60)], []), "1152921504606846976 items"),
    "array beyond the file": (content([text("a") + struct.pack(ARRAY_OF, 9, 4, 2**20)], []), "truncated"),
    "strings beyond the file": (content([text("a") + struct.pack(ARRAY_OF, 9, 8, 2**20)], []), "truncated"),
    "long string of an array": (content([text("a") + struct.pack("<IIQQ", 9, 8, 1, 2**64 - 1)], []), "truncated"),
    "nested array": (content([text("a") + struct.pack(ARRAY_OF, 9, 9, 1)], []), "nested"),
    "duplicate key": (content([number("a", 1), number("a", 2)], []), "key a twice"),
    "alignment 0": (content([number("general.alignment", 0)], []), "alignment is 0"),
    "alignment 3": (content([number("general.alignment", 3)], []), "alignment is 3"),
    "alignment text": (content([text("general.alignment") + struct.pack("<I", 8) + text("x")], []), "no integer"),
    "no dimensions": (content([], [tensor("t", ())]), "0 dimensions"),
    "five dimensions": (content([], [tensor("t", (1, 1, 1, 1, 1))]), "5 dimensions"),
    "dimension 0": (content([], [tensor("t", (4, 0))]), "has the shape"),
    "partial block": (content([], [tensor("t", (33, 1), 8)], bytes(64)), "Q8_0 cannot have"),
    "unknown tensor type": (content([], [tensor("t", (4,), 4)], bytes(64)), "unknown type 4"),
    "huge shape": (content([], [tensor("t", (2**63, 2**63))], bytes(64)), "truncated"),
    "wrong offset": (content([], [tensor("t", (4,), offset=2**40)], bytes(64)), "truncated"),
    "unaligned": (content([], [tensor("t", (4,), offset=4)], bytes(64)), "not aligned"),
    "overlap": (content([], [tensor("t", (16,)), tensor("u", (4,), offset=32)], bytes(64)), "t and u overlap"),
    "same place": (content([], [tensor("t", (4,)), tensor("u", (4,))], bytes(64)), "overlap"),
    "duplicate tensor": (content([], [tensor("t", (4,)), tensor("t", (4,), offset=32)], bytes(64)), "tensor t twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    """With the name of the file and the reason."""
    data, reason = HOSTILE[name]
    file = tmp_path / "bad.gguf"
    file.write_bytes(data)

    tracemalloc.start()
    with pytest.raises(GgufError, match=reason) as raised:
        read_model(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert str(raised.value).startswith("bad.gguf: ")


def test_text_of_metadata_that_is_not_utf_8_is_refused_at_access(tmp_path: Path) -> None:
    """Other metadata can be read."""
    file = tmp_path / "bad.gguf"
    file.write_bytes(content([text("a") + struct.pack("<I", 8) + text(b"\xff"), number("b", 1)], []))
    metadata = read_metadata(file)

    assert metadata["b"] == 1
    with pytest.raises(GgufError, match="a is not UTF-8"):
        metadata["a"]


def test_every_truncation_is_refused(file: Path) -> None:
    """At every fifth byte, up to the padding at the end."""
    whole = file.read_bytes()
    end = len(whole) - next(count for count, byte in enumerate(reversed(whole)) if byte)
    for length in range(0, end, 5):
        file.write_bytes(whole[:length])
        with pytest.raises(GgufError):
            read_model(file)


def mutants(whole: bytes, header: int, count: int, seed: int) -> Iterator[bytes]:
    """Files with damaged headers: replaced bytes and numbers, and removed, repeated or swapped ranges."""
    draw = random.Random(seed)
    numbers = [0, 1, 2, 8, 9, 255, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1]
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            at = draw.randrange(min(header, len(data)))
            match draw.randrange(5):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    data[at : at + 4] = struct.pack("<I", draw.choice(numbers) % 2**32)
                case 2:
                    data[at : at + 8] = struct.pack("<Q", draw.choice(numbers))
                case 3:
                    del data[at : at + draw.randrange(1, 40)]
                case _:
                    other = draw.randrange(header)
                    data[at : at + 16] = data[other : other + 16]
        yield bytes(data)


def fuzz(whole: bytes, count: int, seed: int) -> None:
    """Read mutants of a file's content: each is read, or refused with a GgufError."""
    header = whole.index(TENSORS["plain"].tobytes()[:32])
    refused = 0
    for data in mutants(whole, header, count, seed):
        try:
            metadata, tensors = parse(np.frombuffer(data, dtype=np.uint8))
            read_values(metadata, tensors)
        except GgufError:
            refused += 1

    assert count / 2 < refused < count


def test_damaged_headers(file: Path) -> None:
    """10,000 of them."""
    fuzz(file.read_bytes(), 10_000, 0)


@pytest.mark.slow
def test_many_damaged_headers(file: Path) -> None:
    """100,000 of them."""
    fuzz(file.read_bytes(), 100_000, 1)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system lists no resident pages")
def test_released_pages_leave_the_memory_and_are_read_again(tmp_path: Path) -> None:
    """Whole pages only: the first and the last one may hold another tensor."""
    write(tmp_path / "a.gguf", {"a.weight": np.arange(2**18, dtype=np.float32), "b.weight": np.ones(1, np.float32)})
    tensors = read_model(tmp_path / "a.gguf").tensors
    before = tensors["a.weight"].data.tobytes()
    touched = resident_bytes(tmp_path / "a.gguf")
    release_pages(tensors["a.weight"].data)

    assert touched - resident_bytes(tmp_path / "a.gguf") > 2**19
    assert before == tensors["a.weight"].data.tobytes()
    release_pages(tensors["b.weight"].data)
    release_pages(np.zeros(2**14, np.uint8))


def resident_bytes(file: Path) -> int:
    """Of the mapping of a file in this process."""
    _, _, content = Path("/proc/self/smaps").read_text().partition(f"{file}\n")
    return 1024 * int(content.partition("Rss:")[2].split()[0])
