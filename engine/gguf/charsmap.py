"""The character map of SentencePiece, by which Unigram tokenizers normalise text.

It is a trie in a double array [units], uint32, and the replacements, each ended by a zero byte. The tokenizers library
follows its offsets unchecked and panics beyond the end, so every path is checked here before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.gguf.container import GgufError

_LABEL, _VALUE = np.uint32(2**31 | 0xFF), np.uint32(2**31 - 1)


def checked_charsmap(items: Any, key: str) -> bytes:
    """The bytes of a character map. Raises GgufError for one with an offset beyond its end."""
    if not isinstance(items, list | tuple) or not set(map(type, items)) <= {int}:
        raise GgufError(f"its metadata {key} is no list of bytes")
    # Converters store bytes as signed or unsigned integers.
    content = bytes(item & 0xFF for item in items)
    units = int.from_bytes(content[:4], "little")
    if len(content) < 8 or units % 4 or not 4 <= units <= len(content) - 4:
        raise GgufError(f"its metadata {key} is truncated")
    _check_trie(np.frombuffer(content, "<u4", units // 4, 4), content[4 + units :], key)
    return content


def _check_trie(units: NDArray[np.uint32], replacements: bytes, key: str) -> None:
    """Raise GgufError if a text can lead beyond the end of the trie, or to no replacement."""
    labels = np.arange(1, 256, dtype=np.uint32)
    starts = _character_starts(replacements, key)
    seen = np.zeros(len(units), bool)
    nodes = _offsets(units[:1])
    while len(nodes):
        children = nodes[:, None] ^ labels
        if children.max() >= len(units):
            raise GgufError(f"its metadata {key} leads beyond its end")
        matches = children[(units[children] & _LABEL) == labels]
        leaf = (units[matches] >> np.uint32(8)) & np.uint32(1) == 1
        nodes = matches ^ _offsets(units[matches])
        if len(nodes) and nodes.max() >= len(units):
            raise GgufError(f"its metadata {key} leads beyond its end")
        values = units[nodes[leaf]] & _VALUE
        if len(values) and (values.max() >= len(starts) or not starts[values].all()):
            raise GgufError(f"its metadata {key} has no such replacement")
        nodes = np.unique(nodes[~seen[nodes]])
        seen[nodes] = True


def _offsets(units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The distances from units to their children, as operands of XOR."""
    return (units >> np.uint32(10)) << ((units & np.uint32(512)) >> np.uint32(6))


def _character_starts(text: bytes, key: str) -> NDArray[np.bool_]:
    """Whether each byte of UTF-8 begins a character. Raises GgufError for other bytes."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise GgufError(f"its metadata {key} has replacements that are not UTF-8") from error
    starts: NDArray[np.bool_] = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
    return starts
