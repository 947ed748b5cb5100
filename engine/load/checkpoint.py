"""The folder of a model: finding it, reading facts from its files, and one-line reasons why it cannot be served.

Only `resolve` uses the network.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from engine.config import BUNDLED_NAME
from engine.errors import ModelMissing
from engine.load.file_kind import GGUF_FILE, JSON_FILE, SAFETENSORS_FILE, file_kind
from engine.load.hub import CONSOLIDATED_FILES, download
from engine.load.resources import processor_count

# Errors that transformers raises for a broken checkpoint. The last two derive from Exception directly.
READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
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
_MODEL_HINT = "pass a folder with config.json and safetensors, or a model of the hub that has them"


def resolve(model: str | None) -> Path:
    """The folder of a model: the bundled one, a local one, or one of the hub and its cache. Raises ModelMissing."""
    if model is None:
        return _bundled()
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _with_config(model, path, "the folder has no config.json")
        # A colon separates a repository from one of its files.
        if path.is_file() or (":" not in model and path.suffix.lower() in _FILE_SUFFIXES):
            raise ModelMissing(model, _file_reason(path))
    except (OSError, RuntimeError) as error:
        raise ModelMissing(model, error_line(error)) from error
    if model.partition(":")[0].count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelMissing(model, "there is no such folder, and a name on the hub looks like organisation/model")
    found = download(model)
    if found.suffix == ".gguf":
        raise ModelMissing(model, _file_reason(found))
    return _with_config(model, found, f"its repository has no config.json; {_MODEL_HINT}")


def _with_config(model: str, folder: Path, reason: str) -> Path:
    """The folder, if it has a config.json. Raises ModelMissing."""
    if (folder / "config.json").is_file():
        return folder
    if any(folder.glob("*.gguf")):
        reason = f"the folder holds GGUF files, which are not read yet; {_MODEL_HINT}"
    raise ModelMissing(model, reason)


def _file_reason(path: Path) -> str:
    """Why a file is not a model."""
    if not path.is_file():
        return f"there is no such file; {_MODEL_HINT}"
    kind = file_kind(path)
    if kind == GGUF_FILE:
        return f"GGUF files are not read yet; {_MODEL_HINT}"
    if kind in (SAFETENSORS_FILE, JSON_FILE):
        return f"it is one file of a model; pass its folder, {path.resolve().parent}"
    return f"it is {kind}; {_MODEL_HINT}"


def _bundled() -> Path:
    package = Path(__file__).resolve().parents[1]
    # In a wheel the model lies inside the package, in a checkout beside it.
    for folder in (package / "bundled" / "target", package.parent / "models" / "target"):
        if (folder / "config.json").is_file():
            return folder
    raise ModelMissing(BUNDLED_NAME, "this installation has no bundled model; pass one: cellar serve MODEL")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model in the layout of transformers, by name."""
    copies = set(folder.glob(CONSOLIDATED_FILES))
    return sorted(file for file in folder.glob("*.safetensors") if file not in copies)


def missing_weights_reason(folder: Path) -> str:
    """Why a folder without `weight_files` cannot be served."""
    suffixes = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors"}
    found = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in suffixes)
    others = f"; {found[0]} has another format" if found else ""
    return f"it has no safetensors weights in the layout of transformers{others}"


def fingerprint(folder: Path) -> str:
    """A digest of the weights: of their sizes and a sample of their bytes, as all bytes would take seconds."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            for at in range(0, size, max(size // _DIGEST_SAMPLES, 1)):
                content.seek(at)
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
