"""What the facts of a machine mean for serving: findings, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.load.machine.device import GPU_TORCH_REMEDY
from engine.load.machine.machine import Kernel, Machine
from engine.types.sizes import format_size

# The command that installs a C++ compiler, by the id of a distribution.
_COMPILER_COMMANDS = {
    "debian": "sudo apt-get install g++",
    "fedora": "sudo dnf install gcc-c++",
    "rhel": "sudo dnf install gcc-c++",
    "arch": "sudo pacman -S gcc",
    "suse": "sudo zypper install gcc-c++",
    "alpine": "sudo apk add g++",
}
_MACOS_COMMAND = "xcode-select --install"
_AVX2_REMEDY = (
    "use a processor with AVX2 (Intel from 2013, AMD from 2015 on); "
    "a virtual machine needs the processor type of its host (QEMU: -cpu host)"
)
# Below it a model of a billion parameters does not fit with a cache.
_LITTLE_MEMORY_BYTES = 4 * 2**30
# The quantised weights of one model of 8 billion parameters.
_LITTLE_DISK_BYTES = 8 * 2**30
_SLOWER = "models run in torch operations, 2 to 6 times slower, quantised ones up to 50 times"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    level   "ok"; "note": no fault; "problem": models run slower, or not at all
    remedy  a command or a sentence; None: there is none, or none is necessary
    """

    topic: str
    level: Literal["ok", "note", "problem"]
    text: str
    remedy: str | None = None


def diagnose(machine: Machine) -> tuple[Finding, ...]:
    """All findings, in the order of the report."""
    return tuple(
        [
            _system(machine),
            _packages(machine),
            _kernels(machine),
            _compiler(machine),
            _processors(machine),
            _memory(machine),
            _cache(machine),
            *_gpus(machine),
            _hub(machine),
        ]
    )


def compiler_command(machine: Machine) -> str:
    """The command that installs a C++ compiler."""
    if machine.system == "Darwin":
        return _MACOS_COMMAND
    commands = (_COMPILER_COMMANDS[name] for name in machine.distribution if name in _COMPILER_COMMANDS)
    return next(commands, "install g++ or clang++ with the package manager of the system")


def _system(machine: Machine) -> Finding:
    name = " ".join((machine.system, *machine.distribution[:1], machine.architecture))
    return Finding("system", "ok", f"{name}, Python {machine.python}")


def _packages(machine: Machine) -> Finding:
    if machine.conflicts:
        return Finding("packages", "problem", "; ".join(machine.conflicts), "install cellar again, in an environment")
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return Finding("packages", "ok", f"{versions}, all within the limits")


def _kernels(machine: Machine) -> Finding:
    """Whether the native step runs, by the variants of its kernel."""
    native = {name: kernel for name, kernel in machine.kernels.items() if _is_native(kernel)}
    if len(native) < len(machine.kernels):
        return _no_kernels(machine.architecture)
    text = ", ".join(f"{name} ({kernel.variants[0]})" for name, kernel in native.items())
    missing = [name for name, kernel in native.items() if kernel.library is None]
    if missing and machine.compiler is None:
        reason = f"{', '.join(missing)} are not prebuilt, and there is no C++ compiler: {_SLOWER}"
        return Finding("kernels", "problem", reason, compiler_command(machine))
    if missing:
        return Finding("kernels", "ok", f"{text}; compiled at the first start, in about a minute")
    origins = " and ".join(sorted({str(kernel.library) for kernel in native.values()}))
    return Finding("kernels", "ok", f"{text}; {origins}")


def _no_kernels(architecture: str) -> Finding:
    if architecture in ("x86_64", "AMD64"):
        return Finding("kernels", "problem", f"the processor lacks AVX2: {_SLOWER}", _AVX2_REMEDY)
    return Finding("kernels", "problem", f"there are none for {architecture}: {_SLOWER}", "use x86-64 or arm64")


def _is_native(kernel: Kernel) -> bool:
    return bool(kernel.variants) and kernel.variants[0] != "generic"


def _compiler(machine: Machine) -> Finding:
    if machine.compiler is not None:
        return Finding("compiler", "ok", machine.compiler)
    if all(kernel.library is not None for kernel in machine.kernels.values() if _is_native(kernel)):
        return Finding("compiler", "ok", "none, and none is necessary")
    return Finding("compiler", "note", "none; it compiles the kernels at the first start of a model")


def _processors(machine: Machine) -> Finding:
    if machine.processors == machine.all_processors:
        return Finding("processors", "ok", str(machine.processors))
    text = f"{machine.processors} of {machine.all_processors}, by the affinity or the quota of the container"
    return Finding("processors", "note", text)


def _memory(machine: Machine) -> Finding:
    text = f"{format_size(machine.available_bytes)} free of {format_size(machine.memory_bytes)}"
    if machine.available_bytes < _LITTLE_MEMORY_BYTES:
        remedy = "end other programs, raise the container's limit, or use small models: cellar plan MODEL"
        return Finding("memory", "problem", text, remedy)
    return Finding("memory", "ok", text)


def _cache(machine: Machine) -> Finding:
    if machine.cache_error is not None:
        text = f"{machine.cache_error}: kernels, checks and quantised weights are made at every start"
        return Finding("cache", "problem", text, "set XDG_CACHE_HOME to a folder that this user alone can write to")
    # Disks and files are counted in powers of 1000.
    text = f"{machine.cache}, {machine.cache_free_bytes / 10**9:.1f} GB free"
    if machine.cache_free_bytes < _LITTLE_DISK_BYTES:
        return Finding("cache", "problem", text, "free space, or set XDG_CACHE_HOME to another disk")
    return Finding("cache", "ok", text)


def _gpus(machine: Machine) -> Iterator[Finding]:
    if machine.torch_gpus:
        yield Finding("gpu", "ok", f"{'; '.join(machine.torch_gpus)}; used with --device cuda")
    elif machine.gpus:
        reason = f"{', '.join(machine.gpus)}: torch {machine.versions['torch']} cannot use it"
        yield Finding("gpu", "note", reason, GPU_TORCH_REMEDY)


def _hub(machine: Machine) -> Finding:
    if machine.hub_error is None:
        return Finding("hub", "ok", f"{machine.hub} is reachable")
    text = f"{machine.hub} is unreachable ({machine.hub_error}); local models and downloaded ones work"
    return Finding("hub", "note", text)
