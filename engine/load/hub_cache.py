"""The models in the hub's local cache: list and removal."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

_FORMATS = {".safetensors": "safetensors", ".gguf": "GGUF"}


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One revision of a repository.

    names             branches and tags that refer to it
    formats           of its weights; empty without weights
    files             its GGUF files
    size_bytes        of its files; revisions may share files
    last_used         seconds since the epoch, by the file system
    incomplete_bytes  of interrupted downloads of the repository
    """

    id: str
    revision: str
    names: tuple[str, ...]
    folder: Path
    formats: tuple[str, ...]
    files: tuple[str, ...]
    size_bytes: int
    last_used: float
    incomplete_bytes: int


def cached_models() -> list[CachedModel]:
    """All models of the cache, by id, the latest revision first."""
    cache = _scan()
    if cache is None:
        return []
    found = [
        _cached_model(repository, revision, cache.incomplete_files)
        for repository in cache.repos
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]
    return sorted(found, key=lambda model: (model.id.lower(), -model.last_used))


def remove_revisions(models: Iterable[CachedModel]) -> int:
    """Delete revisions from the cache; the freed bytes. Files that other revisions share stay."""
    cache = _scan()
    if cache is None:
        return 0
    strategy = cache.delete_revisions(*(model.revision for model in models))
    strategy.execute()
    return int(strategy.expected_freed_size)


def remove_partial_files() -> None:
    """Delete the files that this process is downloading, before it ends: no later download continues them."""
    # Only Linux lists the open files of a process.
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            file = descriptor.readlink()
            if file.suffix == ".incomplete":
                file.unlink()


def _scan() -> Any:
    """The cache; None: there is none."""
    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _cached_model(repository: Any, revision: Any, incomplete: Iterable[Any]) -> CachedModel:
    names = sorted(file.file_name for file in revision.files)
    kinds = {_FORMATS[suffix] for name in names if (suffix := Path(name).suffix.lower()) in _FORMATS}
    used = max((file.blob_last_accessed for file in revision.files), default=repository.last_accessed)
    begun = [file.size_on_disk for file in incomplete if file.file_path.is_relative_to(repository.repo_path)]
    return CachedModel(
        id=repository.repo_id,
        revision=revision.commit_hash,
        names=tuple(sorted(revision.refs)),
        folder=revision.snapshot_path,
        formats=tuple(sorted(kinds)),
        files=tuple(name for name in names if name.lower().endswith(".gguf")),
        size_bytes=revision.size_on_disk,
        last_used=used,
        incomplete_bytes=sum(begun),
    )
