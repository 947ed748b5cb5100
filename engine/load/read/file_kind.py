"""What a file is, by its first bytes: for the refusal of files that are not models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# Bytes that are read; a tar archive has its mark at 257.
_HEAD_BYTES = 1024
GGUF_FILE, SAFETENSORS_FILE, JSON_FILE = "a GGUF file", "a safetensors file", "a JSON file"
_PICKLE = "PyTorch weights in Python's pickle format, which can run code"
_MARKS: dict[bytes, str] = {
    b"GGUF": GGUF_FILE,
    **dict.fromkeys((b"tjgg", b"fmgg", b"lmgg"), "a GGML file from before GGUF"),
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, such as Keras weights",
    b"\x89PNG\r\n\x1a\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF-": "a PDF document",
    b"\x1f\x8b": "a gzip archive: unpack it",
    b"(\xb5/\xfd": "a Zstandard archive: unpack it",
    b"\xfd7zXZ": "an xz archive: unpack it",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"Rar!": "a RAR archive: unpack it",
    b"\x93NUMPY": "a NumPy array",
    b"PAR1": "a Parquet table",
    b"version https://git-lfs.": "a Git LFS pointer in place of the file: run git lfs pull",
}
_html = re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE)
# A protobuf whose first fields are a small number (the version) and a text (the producer).
_onnx = re.compile(rb"\x08[\x01-\x20]\x12[\x01-\x7f][\x20-\x7e]")
_pickle = re.compile(rb"\x80[\x02-\x05]")
# A JSON header after its length in 8 bytes.
_safetensors = re.compile(rb".{8}\{", re.DOTALL)


def file_kind(path: Path) -> str:
    """The kind of an existing file in words, with an article. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return next(_kinds(head))


def _kinds(head: bytes) -> Iterator[str]:
    """The kinds that fit, the most certain one first."""
    if not head:
        yield "an empty file"
    yield from (kind for mark, kind in _MARKS.items() if head.startswith(mark))
    if head.startswith(b"PK\x03\x04"):
        yield _PICKLE if b"/data.pkl" in head else "a zip archive: unpack it"
    if head[257:262] == b"ustar":
        yield "a tar archive: unpack it"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        yield "a WebP image"
    if head[4:8] == b"TFL3":
        yield "a TensorFlow Lite model"
    if _pickle.match(head):
        yield _PICKLE
    if _onnx.match(head):
        yield "an ONNX model"
    if _safetensors.match(head) and int.from_bytes(head[:8], "little") < 2**32:
        yield SAFETENSORS_FILE
    if _html.match(head):
        yield "an HTML page, such as the answer to a failed download"
    yield _text_kind(head)


def _text_kind(head: bytes) -> str:
    # The last character may be incomplete.
    text = head.decode(errors="ignore")
    if "\0" in text or len(text.encode()) < len(head) - 3:
        return "a file of an unknown kind"
    return JSON_FILE if text.lstrip().startswith(("{", "[")) else "a text file"
