"""Derived merges of large vocabularies in the user's cache folder: 262,144 tokens take longer to derive than to read.

The name of a file is a digest of all that the merges depend on. A file that cannot be read, or that has other content
than was written, is replaced.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engine.gguf.merges import Merge, derive_merges
from engine.gguf.vocabulary import Vocabulary
from engine.kernels.cache_folder import cache_folder, mark_used, replacing, trim

log = logging.getLogger("cellar.engine")

# Version of the derivation (engine/gguf/merges.py); part of the file name.
FORMAT = 1
# Merges of smaller vocabularies are derived in less than 0.3 s.
MIN_TOKENS = 65_536


def cached_merges(vocabulary: Vocabulary, mergeable: Sequence[int]) -> list[Merge]:
    """The merges of derive_merges, from the cache folder if they were derived before. Raises GgufError."""
    tokens = vocabulary.tokens
    if len(tokens) < MIN_TOKENS:
        return derive_merges(tokens, vocabulary.scores, mergeable)
    name = f"{_digest(vocabulary, mergeable)}.safetensors"
    if (pairs := _read(name, len(tokens))) is not None:
        left, right = pairs.T.tolist()
        return list(zip(map(tokens.__getitem__, left), map(tokens.__getitem__, right), strict=True))
    merges = derive_merges(tokens, vocabulary.scores, mergeable)
    parts = map(vocabulary.ids.__getitem__, itertools.chain.from_iterable(merges))
    _write(name, np.fromiter(parts, np.int32).reshape(-1, 2))
    return merges


def _digest(vocabulary: Vocabulary, mergeable: Sequence[int]) -> str:
    lengths = np.fromiter(map(len, vocabulary.tokens), np.int64)
    digest = hashlib.sha256(repr((FORMAT, len(lengths), len(mergeable))).encode())
    for values in (lengths, np.array(vocabulary.scores, np.float64), np.array(mergeable, np.int64)):
        digest.update(values.tobytes())
    digest.update("".join(vocabulary.tokens).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def _read(name: str, size: int) -> NDArray[np.int32] | None:
    """The ids of the pairs; None unless the file has what was written, for a vocabulary of `size` tokens."""
    try:
        file = cache_folder("tokenizers") / name
        with safe_open(file, framework="np") as content:
            pairs: NDArray[np.int32] = content.get_tensor("merges")
            checksum = (content.metadata() or {}).get("sha256")
        if pairs.dtype != np.int32 or pairs.ndim != 2 or pairs.shape[1] != 2:
            raise ValueError(f"its array is {pairs.dtype} of shape {pairs.shape}")
        if not 0 <= pairs.min() <= pairs.max() < size or checksum != hashlib.sha256(pairs.tobytes()).hexdigest():
            raise ValueError("its content is damaged")
        mark_used(file)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError) as error:
        log.warning("%s is not read, and the merges of the tokenizer are derived (%s)", name, error)
        return None
    return pairs


def _write(name: str, pairs: NDArray[np.int32]) -> None:
    """Store the pairs for the next start; a failure is logged."""
    try:
        with replacing(cache_folder("tokenizers") / name) as scratch:
            save_file({"merges": pairs}, scratch, metadata={"sha256": hashlib.sha256(pairs.tobytes()).hexdigest()})
    except (OSError, SafetensorError) as error:
        log.info("the merges of the tokenizer are derived again at the next start: %s", error)
    else:
        trim()
