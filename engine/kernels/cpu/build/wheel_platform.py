"""The platform of a wheel with prebuilt kernels, from the content of the libraries alone: they may be cross-built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.kernels.cpu.build.libraries import prebuilt_names

# Architectures by the number in ELF headers, at byte 18.
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
# The oldest glibc of a tag (manylinux2014).
_OLDEST_GLIBC = (2, 17)
_glibc_version = re.compile(rb"\0GLIBC_(\d+)\.(\d+)[.\d]*(?=\0)")


@dataclass(frozen=True, slots=True)
class LinuxPlatform:
    """An architecture, and the newest version of glibc that the libraries import symbols of."""

    machine: str
    glibc: tuple[int, int]

    @property
    def tag(self) -> str:
        """The platform tag, such as manylinux_2_28_x86_64."""
        return f"manylinux_{self.glibc[0]}_{self.glibc[1]}_{self.machine}"


def linux_platform(libraries: Sequence[Path]) -> LinuxPlatform:
    """The platform of ELF libraries. Raises ValueError."""
    contents = [file.read_bytes() for file in libraries]
    if not all(content.startswith(b"\x7fELF") for content in contents):
        raise ValueError(f"the folder {libraries[0].parent} has files that are no ELF libraries")
    machines = {int.from_bytes(content[18:20], "little") for content in contents}
    if len(machines) != 1 or not machines <= _ELF_MACHINES.keys():
        raise ValueError(f"the libraries in {libraries[0].parent} are not all for x86_64, or all for aarch64")
    imported = {(int(major), int(minor)) for symbols in contents for major, minor in _glibc_version.findall(symbols)}
    return LinuxPlatform(_ELF_MACHINES[machines.pop()], max((*imported, _OLDEST_GLIBC)))


def require_current(libraries: Sequence[Path], machine: str) -> None:
    """Raise ValueError unless the libraries are the ones of the present sources: all others would be ignored."""
    difference = sorted(prebuilt_names(machine).keys() ^ {file.name for file in libraries})
    if difference:
        folder = libraries[0].parent
        raise ValueError(
            f"{folder} has libraries of other sources, or lacks some ({difference[0]}): remove the folder and run "
            f"python -m engine.kernels.cpu.build {folder}"
        )
