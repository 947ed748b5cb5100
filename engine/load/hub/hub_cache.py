"""The models in the hub's local cache: list and removal."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from engine.errors import ModelKept
from engine.gguf.container import GgufError, shard_files
from engine.load.hub.catalogue import NAMED_MODELS
from engine.types.model_name import plain_name

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
    models = [
        _cached_model(repository, revision, cache.incomplete_files)
        for repository in cache.repos
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]
    return sorted(models, key=lambda model: (model.id.lower(), -model.last_used))


def find_cached(name: str) -> list[CachedModel]:
    """All revisions of `organisation/model`, or one as `organisation/model@revision`: a branch, a tag, or the first
    characters of its commit. Raises ModelKept if several commits begin with them.
    """
    id, separator, revision = plain_name(name).partition("@")
    id = NAMED_MODELS[id].repository if id in NAMED_MODELS else id
    models = [model for model in cached_models() if model.id == id]
    if not separator:
        return models
    named = [model for model in models if revision in (model.revision, *model.names)]
    matches = named or [model for model in models if revision and model.revision.startswith(revision)]
    if len(matches) > 1:
        raise ModelKept(name, f"{len(matches)} revisions begin with {revision}")
    return matches


def remove_revisions(models: Collection[CachedModel], loaded: Iterable[str] = ()) -> int:
    """Delete revisions from the cache; the freed bytes.

    Files that other revisions share stay; links are deleted, not their targets outside of the repository's folder.
    Raises ModelKept, with nothing deleted, if a model in `loaded` (folders and GGUF files) has files there.
    """
    cache = _scan()
    if cache is None:
        return 0
    commits = defaultdict[str, set[str]](set)
    for model in models:
        commits[model.id].add(model.revision)
    # One repository at a time: several may have the same commit, as after a renaming.
    strategies = {
        repository.repo_id: _deletion(cache, repository, commits[repository.repo_id])
        for repository in cache.repos
        if repository.repo_type == "model" and repository.repo_id in commits
    }
    places = {place for path in loaded for place in _places(Path(path))}
    for id, strategy in strategies.items():
        if _deletes(strategy, places):
            raise ModelKept(id, "it is in use")
    for id, strategy in strategies.items():
        strategy.execute()
        # Errors are only logged.
        if any(map(os.path.lexists, (*strategy.repos, *strategy.snapshots))):
            raise ModelKept(id, "its files cannot be deleted")
    return sum(int(strategy.expected_freed_size) for strategy in strategies.values())


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


def _deletion(cache: Any, repository: Any, commits: Collection[str]) -> Any:
    """The deletion of revisions of a repository. Raises ModelKept if it would follow a linked folder."""
    deletable = replace(repository, revisions=frozenset(_without_foreign_files(repository)))
    present = [revision.commit_hash for revision in deletable.revisions if revision.commit_hash in commits]
    strategy = replace(cache, repos=frozenset({deletable})).delete_revisions(*present)
    for folder in {path.parent for path in (*strategy.snapshots, *strategy.refs, *strategy.blobs)}:
        if folder.resolve() != folder:
            raise ModelKept(repository.repo_id, f"{folder} is a link; only all revisions together can be deleted")
    return strategy


def _without_foreign_files(repository: Any) -> Iterator[Any]:
    """The revisions without the files that are links to other places than the repository's blobs."""
    blobs = repository.repo_path / "blobs"
    places = {blobs} if blobs.resolve() == blobs else set[Path]()
    for revision in repository.revisions:
        folder = revision.snapshot_path
        files = (
            file for file in revision.files if file.blob_path.parent in places or file.blob_path.is_relative_to(folder)
        )
        yield replace(revision, files=frozenset(files))


def _deletes(strategy: Any, places: Iterable[Path]) -> bool:
    """Whether a deletion removes one of the places."""
    folders = (*strategy.repos, *strategy.snapshots)
    deleted = {*folders, *(folder.resolve() for folder in folders), *strategy.blobs}
    return any(parent in deleted for place in places for parent in (place, *place.parents))


def _places(model: Path) -> Iterator[Path]:
    """Where the folder of a model, or the shards of a GGUF file, are, and where links among them lead."""
    files = [*model.rglob("*")]
    if model.is_file():
        with suppress(GgufError):
            files = [*shard_files(model)]
    for file in (model, *files):
        yield file.parent.resolve() / file.name
        yield file.resolve()


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
