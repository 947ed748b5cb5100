"""Tokenizers of large vocabularies in the user's cache folder, in a form that loads in a third of the time.

transformers parses tokenizer.json up to three times. A cache entry holds the tokenizer's Python state, with its backend
as the arguments of tokenizers' constructors, and the summary of its vocabulary. Its name is a digest of the tokenizer's
files and of the versions of the libraries; it is written only if the rebuilt backend serialises to the same text. An
entry that cannot be read is replaced.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import pickle
import platform
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import AddedToken, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine import gguf
from engine.gguf.container import Metadata, read_metadata
from engine.gguf.tokenizer import read_tokenizer as read_gguf_tokenizer
from engine.kernels.cache_folder import cache_folder, mark_used, replacing, trim
from engine.load.checkpoint import is_gguf
from engine.text.vocabulary import VocabularySummary, summarize

log = logging.getLogger("cellar.engine")

# Bytes of tokenizer files from which an entry loads faster than the files.
_LARGE_BYTES = 4 * 2**20
_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
_FORMAT = 2
_DIGEST_BYTES = hashlib.sha256().digest_size


def read_tokenizer(
    folder: Path, cache: Path | None = None, *, large_bytes: int = _LARGE_BYTES, metadata: Metadata | None = None
) -> tuple[Any, VocabularySummary]:
    """The tokenizer of a model's folder or GGUF file, from its cache entry if there is one, and the summary of its
    vocabulary.

    Raises the errors of transformers, and GgufError.

    cache        folder of the entries, by default the user's
    large_bytes  smallest size of the tokenizer's files with an entry
    metadata     of the GGUF file if it has been read
    """
    if metadata is None and is_gguf(folder):
        metadata = read_metadata(folder)
    entry = _entry(folder, metadata, cache, large_bytes)
    cached = None if entry is None else _read(entry)
    if cached is not None:
        return cached
    tokenizer = _from_files(folder, metadata)
    vocabulary = summarize(tokenizer.get_vocab())
    if entry is not None:
        _write(entry, tokenizer, vocabulary)
    return tokenizer, vocabulary


def _from_files(path: Path, metadata: Metadata | None) -> Any:
    if metadata is not None:
        return read_gguf_tokenizer(metadata)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def _entry(path: Path, metadata: Metadata | None, cache: Path | None, large_bytes: int) -> Path | None:
    """The path of the cache entry; None if the files are small or cannot be read."""
    if metadata is not None:
        size, identity = metadata.size_bytes, metadata.digest
        folder = Path(gguf.__file__ or "").parent
        # The code that makes the tokenizer.
        files = sorted(folder.glob("*.py"))
    else:
        folder, files, identity = path, sorted(_files(path)), ""
        size = sum(file.stat().st_size for file in files)
    if size < large_bytes:
        return None
    try:
        return (cache or cache_folder("tokenizers")) / f"{_digest(folder, files, identity)}.bin"
    except OSError:
        return None


def _files(folder: Path) -> Iterator[Path]:
    """Every file that the tokenizer may depend on."""
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if file.suffix in _SUFFIXES and not file.name.endswith(".index.json") and file.is_file():
            yield file


def _digest(folder: Path, files: list[Path], identity: str) -> str:
    """A digest of files in a folder and of the `identity` of others."""
    digest = hashlib.sha256(identity.encode())
    versions = (_FORMAT, platform.python_version(), tokenizers.__version__, transformers.__version__)
    # The folder's name is part of a tokenizer's state.
    digest.update(repr((versions, str(folder))).encode())
    for file in files:
        with file.open("rb") as opened:
            digest.update(f"{file.relative_to(folder)} ".encode())
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32]


def _read(entry: Path) -> tuple[Any, VocabularySummary] | None:
    """The content of an entry; None if there is none that can be read."""
    try:
        content = entry.read_bytes()
        mark_used(entry)
        return _decoded(content)
    except FileNotFoundError:
        return None
    except Exception as error:
        # The type of the error depends on the damaged bytes.
        log.warning("%s is not read, and the tokenizer is built from its own files (%s)", entry.name, error)
        return None


def _write(entry: Path, tokenizer: Any, vocabulary: VocabularySummary) -> None:
    """Store a tokenizer for the next start; a failure is logged."""
    try:
        content = _encoded(tokenizer, vocabulary)
        if not _same(_decoded(content)[0], tokenizer):
            raise ValueError("its backend cannot be rebuilt")
        with replacing(entry) as scratch:
            scratch.write_bytes(content)
    except Exception as error:
        # Tokenizers have many classes, and none of them may fail a start.
        log.info("the tokenizer is built from its own files at the next start, too: %s", error)
        return
    trim()


def _same(read: Any, tokenizer: Any) -> bool:
    cached, own = read.backend_tokenizer, tokenizer.backend_tokenizer
    return bool(type(read) is type(tokenizer) and cached.to_str() == own.to_str())


def _encoded(tokenizer: Any, vocabulary: VocabularySummary) -> bytes:
    """A tokenizer and the summary of its vocabulary as bytes, after their digest. Raises the errors of pickling."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError("it has no backend of the tokenizers library")
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump((tokenizer, astuple(vocabulary)))
    content = buffer.getvalue()
    return hashlib.sha256(content).digest() + content


def _decoded(content: bytes) -> tuple[Any, VocabularySummary]:
    digest, pickled = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(pickled).digest() != digest:
        raise ValueError("its digest does not match")
    tokenizer, vocabulary = _Unpickler(io.BytesIO(pickled)).load()
    return tokenizer, VocabularySummary(*vocabulary)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Replace backends by the arguments of `_backend`."""
        return (_backend, _parts(value)) if isinstance(value, tokenizers.Tokenizer) else NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Allow tokenizers of transformers, added tokens and `_backend` only."""
        if (module, name) == (__name__, "_backend"):
            return _backend
        if (module, name) == ("tokenizers", "AddedToken"):
            return AddedToken
        found = super().find_class(module, name) if module.startswith("transformers.") else None
        if isinstance(found, type) and issubclass(found, PreTrainedTokenizerFast):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _parts(backend: tokenizers.Tokenizer) -> tuple[Any, ...]:
    """The arguments of `_backend` for a backend."""
    content = json.loads(backend.to_str())
    model, vocabulary, merges = content["model"], None, None
    if model["type"] == "BPE":
        # Equal pieces are one object, so each is pickled once.
        vocabulary = model.pop("vocab")
        pieces = {piece: piece for piece in vocabulary}
        merges = [(pieces[left], pieces[right]) for left, right in model.pop("merges")]
    return json.dumps(content), vocabulary, merges, backend.encode_special_tokens


def _backend(
    content: str, vocabulary: dict[str, int] | None, merges: list[tuple[str, str]] | None, encode_special: bool
) -> tokenizers.Tokenizer:
    """A backend of the tokenizers library; BPE models are constructed instead of parsed."""
    if vocabulary is None or merges is None:
        backend = tokenizers.Tokenizer.from_str(content)
    else:
        backend = _byte_pair_backend(json.loads(content), vocabulary, merges)
    backend.encode_special_tokens = encode_special
    return backend


def _byte_pair_backend(
    content: dict[str, Any], vocabulary: dict[str, int], merges: list[tuple[str, str]]
) -> tokenizers.Tokenizer:
    added, options = content.pop("added_tokens"), content.pop("model")
    empty = {**options, "vocab": {}, "merges": []}
    backend = tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "model": empty}))
    options = {name: value for name, value in options.items() if name != "type" and value is not None}
    backend.model = models.BPE(vocabulary, merges, **options)
    # One call for consecutive tokens of a kind: each call rebuilds the table of all added tokens.
    for special, tokens in itertools.groupby(added, key=lambda token: token["special"]):
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in tokens])
    return backend
