"""The files of a model: finding them, reading facts from them, and one-line reasons why it cannot be served.

The path of a model is a folder in the layout of transformers, or a GGUF file, the first one of its shards. Only
`resolve` uses the network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from engine.config import BUNDLED_NAME, EngineConfig
from engine.errors import ModelMissing
from engine.gguf.config import is_language_model
from engine.gguf.container import GgufError, GgufModel, Metadata, read_metadata, read_model, shard_files
from engine.gguf.projectors.pair import Tower
from engine.load.hub.catalogue import NAMED_MODELS
from engine.load.hub.hub import (
    ADAPTER_CONFIG,
    CONSOLIDATED_FILES,
    NAME_FORMAT,
    PICKLE_REMEDY,
    PICKLE_SUFFIXES,
    download,
    download_headers,
)
from engine.load.machine.resources import processor_count
from engine.load.read.file_kind import GGUF_FILE, JSON_FILE, SAFETENSORS_FILE, file_kind
from engine.types.model_name import plain_name

# Errors that transformers raises for a broken checkpoint. The last two derive from Exception directly.
READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
# Weights below it are a small model.
_SMALL_MODEL_BYTES = 64 * 2**20
# Number and size of the samples of each file in a fingerprint.
_DIGEST_SAMPLES, _DIGEST_SAMPLE_BYTES = 1024, 4096

# Suffixes of single files, which a name of the hub could have too.
_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".json")
_MODEL_HINT = "pass a folder with config.json and safetensors, a GGUF file, or a model of the hub"


def resolve_headers(model: str | None) -> Path:
    """As `resolve`, without weights of the hub: the folder may have none."""
    return resolve(model, download_headers)


def resolve(model: str | None, download_files: Callable[[str], Path] = download) -> Path:
    """The path of a model: the bundled one, a local one, or one of the hub and its cache. Raises ModelMissing.

    download_files  of a model of the hub, by its name
    """
    if model is None:
        return _bundled()
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _in_folder(model, path, "the folder has no config.json and no GGUF file")
        # A colon separates a repository from one of its files.
        if path.is_file() or (":" not in plain_name(model) and path.suffix.lower() in _FILE_SUFFIXES):
            return _model_file(model, path)
    except (OSError, RuntimeError) as error:
        raise ModelMissing(model, error_line(error)) from error
    name = plain_name(model)
    if name not in NAMED_MODELS and (name.partition(":")[0].count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ModelMissing(model, f"there is no such folder, and {NAME_FORMAT}")
    path = download_files(name)
    if path.is_file():
        return _model_file(model, path)
    return _in_folder(model, path, f"its repository has no config.json; {_MODEL_HINT}")


def _in_folder(model: str, folder: Path, reason: str) -> Path:
    """The folder if it has a config.json, else its only GGUF model. Raises ModelMissing."""
    if (folder / ADAPTER_CONFIG).is_file() and all(file.name.startswith("adapter") for file in weight_files(folder)):
        raise ModelMissing(model, _adapter_reason(folder / ADAPTER_CONFIG))
    if (folder / "config.json").is_file():
        return folder
    # A repository without a file of a model has no folder in the cache, which glob permits.
    files = sorted(file for file in folder.glob("*") if file.suffix.lower() == ".gguf" and file.is_file())
    candidates = sorted({_first_shard(model, file) for file in files})
    models = [file for file in candidates if _is_language_model(file)] if len(candidates) > 1 else candidates
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ModelMissing(model, f"the folder has {len(models)} GGUF models; pass one of the files: {names}")
    if not candidates:
        raise ModelMissing(model, reason)
    return (models or candidates)[0]


def _adapter_reason(configuration: Path) -> str:
    """Why the folder of an adapter is no model, and the remedy."""
    try:
        base = json.loads(configuration.read_bytes())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    of = f" of {base}" if isinstance(base, str) and base.isprintable() and base else ""
    return (
        f"it is an adapter (LoRA){of}, and adapters are not applied: merge it into its base model, serve the result; "
        "with PEFT: AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(FOLDER), and "
        "the tokenizer into the same folder"
    )


def _is_language_model(file: Path) -> bool:
    """Whether a GGUF file is the language model; a damaged file is one, so that its error is shown."""
    try:
        return is_language_model(read_metadata(file))
    except (GgufError, OSError):
        return True


def _model_file(model: str, path: Path) -> Path:
    """The first shard of a GGUF file. Raises ModelMissing for a file that is not a model."""
    if not path.is_file():
        raise ModelMissing(model, f"there is no such file; {_MODEL_HINT}")
    kind = file_kind(path)
    if kind == GGUF_FILE:
        return _first_shard(model, path)
    if kind in (SAFETENSORS_FILE, JSON_FILE):
        raise ModelMissing(model, f"it is one file of a model; pass its folder, {path.resolve().parent}")
    raise ModelMissing(model, f"it is {kind}; {_MODEL_HINT}")


def _first_shard(model: str, path: Path) -> Path:
    """Raises ModelMissing if a shard is missing."""
    try:
        return shard_files(path)[0]
    except GgufError as error:
        raise ModelMissing(model, str(error)) from error


def _bundled() -> Path:
    package = Path(__file__).resolve().parents[2]
    # In a wheel the model lies inside the package, in a checkout next to it.
    for folder in (package / "bundled" / "target", package.parent / "models" / "target"):
        if (folder / "config.json").is_file():
            return folder
    raise ModelMissing(BUNDLED_NAME, "this installation has no bundled model; pass one: cellar serve MODEL")


def is_gguf(path: Path) -> bool:
    """Whether the path of a model is that of a GGUF file."""
    return path.is_file()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of one model, parsed once.

    gguf           the content of a GGUF file; None: the path is a folder
    tower          the vision tower beside a GGUF file; None: there is none, or it is not used for the `tower_fault`
    configuration  the content of config.json, or a digest of the metadata of a GGUF file
    """

    path: Path
    gguf: GgufModel | None
    configuration: bytes
    tower: Tower | None = None
    tower_fault: str = ""

    @property
    def metadata(self) -> Metadata | None:
        """The metadata of a GGUF file."""
        return None if self.gguf is None else self.gguf.metadata


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at the path of a model; weights are mapped, not read. Raises GgufError, OSError."""
    if is_gguf(path):
        content = read_model(path)
        return Checkpoint(path, content, content.metadata.digest.encode())
    return Checkpoint(path, None, (path / "config.json").read_bytes())


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model in the layout of transformers, by name; the shards of a GGUF file."""
    if is_gguf(folder):
        return list(shard_files(folder))
    copies = set(folder.glob(CONSOLIDATED_FILES))
    return sorted(file for file in folder.glob("*.safetensors") if file not in copies)


def missing_weights_reason(folder: Path) -> str:
    """Why a folder without `weight_files` cannot be served."""
    suffixes = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors"}
    names = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in suffixes)
    others = f"; {names[0]} has another format" if names else ""
    pickled = next((name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES), None)
    if pickled is not None:
        others = f"; {pickled} {PICKLE_REMEDY}"
    return f"it has no safetensors weights in the layout of transformers{others}"


def incomplete_weights_reason(report: Mapping[str, Any]) -> str | None:
    """The weights that the files lack, by the report of transformers; None: the model has all."""
    missing = sorted(report["missing_keys"]) or sorted(str(key) for key in report["mismatched_keys"])
    if not missing:
        return None
    return f"its files lack weights, {len(missing)} in all, such as {missing[0]}"


def broken_weights_reason(folder: Path) -> str | None:
    """The weight file of a folder that is another kind of file, such as an incomplete download, or an empty index."""
    if is_gguf(folder):
        return None
    for file in weight_files(folder):
        kind = file_kind(file)
        if kind != SAFETENSORS_FILE:
            return f"{file.name} is {kind}"
    index = folder / "model.safetensors.index.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        if not json.loads(index.read_bytes())["weight_map"]:
            return f"{index.name} names no weights"
    return None


def fingerprint(folder: Path, *others: Path) -> str:
    """A digest of the weights: of their sizes and a sample of their bytes, as all bytes would take seconds.

    others  further files with weights
    """
    digest = hashlib.sha256()
    for file in (*weight_files(folder), *others):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            for offset in range(0, size, max(size // _DIGEST_SAMPLES, 1)):
                content.seek(offset)
                digest.update(content.read(_DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def default_threads(folder: Path) -> int:
    """Threads to compute with: one if the layers are too small to be worth waking other threads.

    Measured with the bundled model on two busy cores: a step took 6 ms with one thread, 76 ms with two.
    """
    return 1 if is_small(folder) else processor_count()


def is_small(folder: Path) -> bool:
    """Whether the weights are few enough for one thread and a full check at every start."""
    return sum(file.stat().st_size for file in weight_files(folder)) < _SMALL_MODEL_BYTES


def error_line(error: Exception) -> str:
    """The type and the first line of an error's message."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first[:300]}"


def bundled_draft(config: EngineConfig, folder: Path) -> str | None:
    """The folder of the bundled draft model."""
    bundled = folder.parent / "draft"
    return str(bundled) if config.model is None and (bundled / "config.json").is_file() else None
