"""The tag of a wheel follows from the libraries in it."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels.cpu.build import libraries
from engine.kernels.cpu.build.wheel_platform import LinuxPlatform, linux_platform, require_current

X86, ARM, RISC = 62, 183, 243


def elf(machine: int, *versions: str) -> bytes:
    """The start of an ELF file, and a string table with versions of glibc."""
    header = b"\x7fELF\x02\x01\x01".ljust(18, b"\0") + machine.to_bytes(2, "little")
    return header + b"\0libc.so.6\0" + b"".join(f"GLIBC_{version}\0".encode() for version in versions)


def write(folder: Path, **contents: bytes) -> list[Path]:
    """Files by name."""
    for name, content in contents.items():
        (folder / f"{name}.so").write_bytes(content)
    return sorted(folder.glob("*.so"))


def test_the_newest_imported_glibc_counts(tmp_path: Path) -> None:
    files = write(tmp_path, a=elf(X86, "2.2.5", "2.29", "2.4"), b=elf(X86, "2.14"))

    assert LinuxPlatform("x86_64", (2, 29)) == linux_platform(files)
    assert "manylinux_2_29_x86_64" == linux_platform(files).tag


def test_old_imports_get_the_oldest_tag(tmp_path: Path) -> None:
    assert "manylinux_2_17_aarch64" == linux_platform(write(tmp_path, a=elf(ARM, "2.2.5"))).tag


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({"a": elf(X86), "b": elf(ARM)}, "not all for x86_64, or all for aarch64"),
        ({"a": elf(RISC)}, "not all for x86_64, or all for aarch64"),
        ({"a": elf(X86), "b": b"a text"}, "no ELF libraries"),
    ],
)
def test_other_libraries_are_refused(tmp_path: Path, contents: dict[str, bytes], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        linux_platform(write(tmp_path, **contents))


def test_all_libraries_of_the_present_sources_are_required(tmp_path: Path) -> None:
    names = libraries.prebuilt_names("x86_64")
    files = [tmp_path / name for name in names]
    require_current(files, "x86_64")

    for wrong in (files[1:], [*files, tmp_path / "step-avx2-x86_64-0123456789abcdef.so"]):
        with pytest.raises(ValueError, match=r"other sources, or lacks some \(\w+-\w+-x86_64-\w{16}\.so\)"):
            require_current(wrong, "x86_64")


def test_names_of_another_architecture_are_known_without_it() -> None:
    assert not libraries.prebuilt_names("x86_64").keys() & libraries.prebuilt_names("aarch64").keys()


@pytest.mark.skipif(
    platform.system() != "Linux" or shutil.which("readelf") is None or shutil.which("g++") is None,
    reason="needs g++ and readelf",
)
def test_versions_are_the_ones_of_readelf(tmp_path: Path) -> None:
    source = tmp_path / "source.cpp"
    source.write_text('#include <cmath>\nextern "C" double power(double x, double y) { return std::pow(x, y); }\n')
    library = tmp_path / "power.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library), "-lm"], check=True)
    shown = subprocess.run(["readelf", "-V", str(library)], capture_output=True, text=True, check=True).stdout
    versions = {(int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", shown)}

    assert versions
    assert max(*versions, (2, 17)) == linux_platform([library]).glibc
