"""Facts about this machine and this installation that decide how models run, for `cellar doctor`.

Nothing is compiled or downloaded. torch is imported for the instruction sets that it detects.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from huggingface_hub.constants import ENDPOINT
from packaging.requirements import Requirement

from engine.kernels.cache_folder import cache_folder
from engine.kernels.cpu.build import libraries
from engine.load.machine.available_memory import available_bytes
from engine.load.machine.device import describe_gpus
from engine.load.machine.resources import FILESYSTEM_ROOT, processor_count

_DISTRIBUTION = "kvcellar"
_HUB_TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel on this machine.

    variants  that the processor runs natively, fastest first
    library   origin of the library of the first one: prebuilt, compiled, or None: there is none yet
    """

    variants: tuple[str, ...]
    library: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts.

    distribution  ids of the Linux distribution and of its relatives, such as ("ubuntu", "debian")
    kernels       by name
    compiler      path; None: none is on the PATH
    processors    that this process may use, of `all_processors`
    gpus          with a driver; `torch_gpus`: those that torch can use
    cache_error   why the cache folder cannot be written; None: it can
    conflicts     installed packages outside the limits of this installation, each as a sentence
    hub_error     why the hub is unreachable; None: it is reachable
    """

    system: str
    architecture: str
    distribution: tuple[str, ...]
    python: str
    kernels: Mapping[str, Kernel]
    compiler: str | None
    processors: int
    all_processors: int
    memory_bytes: int
    available_bytes: int
    cache: str
    cache_free_bytes: int
    cache_error: str | None
    gpus: tuple[str, ...]
    torch_gpus: tuple[str, ...]
    versions: Mapping[str, str]
    conflicts: tuple[str, ...]
    hub: str
    hub_error: str | None


def examine() -> Machine:
    """The facts of this machine; takes up to three seconds where the hub is unreachable."""
    cache, free, error = _cache()
    hub = os.environ.get("HF_ENDPOINT") or ENDPOINT
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        distribution=_distribution(),
        python=platform.python_version(),
        kernels={name: _kernel(name) for name in libraries.KERNELS},
        compiler=libraries.find_compiler(),
        processors=processor_count(),
        all_processors=psutil.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        available_bytes=available_bytes(),
        cache=cache,
        cache_free_bytes=free,
        cache_error=error,
        gpus=find_gpus(),
        torch_gpus=describe_gpus(),
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        conflicts=find_conflicts(),
        hub=hub,
        hub_error=_hub_error(hub),
    )


def _kernel(name: str) -> Kernel:
    variants = libraries.variants(name)
    return Kernel(variants=variants, library=libraries.find_library(name, variants[0]) if variants else None)


def _distribution() -> tuple[str, ...]:
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return ()
    return (release["ID"], *release.get("ID_LIKE", "").split())


def _cache() -> tuple[str, int, str | None]:
    """The cache folder, its free bytes, and why it cannot be written."""
    try:
        folder = cache_folder("")
        for kind in folder.iterdir() if folder.is_dir() else ():
            cache_folder(kind.name)
    except OSError as error:
        return "", 0, str(error)
    present = next(path for path in (folder, *folder.parents) if path.exists())
    reason = None if os.access(present, os.W_OK) else f"{present} is not writable"
    return str(folder), shutil.disk_usage(present).free, reason


def find_gpus(root: Path = FILESYSTEM_ROOT) -> tuple[str, ...]:
    """Names of GPUs with a driver on Linux."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    lines = (line for file in files for line in file.read_text().splitlines())
    nvidia = tuple(line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    return nvidia or (("an AMD GPU",) if (root / "dev/kfd").exists() else ())


def find_conflicts() -> tuple[str, ...]:
    """Requirements of this installation that its packages do not meet."""
    try:
        required = [Requirement(line) for line in importlib.metadata.requires(_DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        return ()
    needed = [
        requirement
        for requirement in required
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]
    return tuple(conflict for requirement in needed if (conflict := _conflict(requirement)) is not None)


def _conflict(requirement: Requirement) -> str | None:
    try:
        installed = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement} is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} {installed} is installed, {requirement} is required"


def _hub_error(url: str) -> str | None:
    try:
        httpx.head(url, timeout=_HUB_TIMEOUT_SECONDS)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return None
