"""The variants of kernels by architecture, and which of them this processor runs."""

from __future__ import annotations

import ctypes
import platform
import sys
from contextlib import suppress
from pathlib import Path

# Values of platform.machine.
X86 = ("x86_64", "AMD64", "amd64", "i386", "i686")
ARM64 = ("aarch64", "arm64")
X86_VARIANTS = ("amx", "bfloat16", "avx512", "vnni", "avxvnni", "avx2", "generic")
ARM64_VARIANTS = ("i8mm", "dotprod", "neon")
# Linux: entries of the auxiliary vector, and the bits of the instruction sets in them.
_HWCAP, _HWCAP2 = 16, 26
_LINUX_BITS = {"dotprod": (_HWCAP, 1 << 20), "i8mm": (_HWCAP2, 1 << 13)}
# macOS: names of sysctl.
_MACOS_NAMES = {"dotprod": "hw.optional.arm.FEAT_DotProd", "i8mm": "hw.optional.arm.FEAT_I8MM"}


def variants_of(machine: str) -> tuple[str, ...]:
    """The variants of all kernels for an architecture."""
    if machine in X86:
        return X86_VARIANTS
    return ARM64_VARIANTS if machine in ARM64 else ("generic",)


def supported_variants() -> frozenset[str]:
    """The variants of all kernels that this processor runs."""
    machine = platform.machine()
    if machine in X86:
        return _x86_variants()
    return _arm64_variants() if machine in ARM64 else frozenset(("generic",))


def _x86_variants() -> frozenset[str]:
    """By the CPU capabilities that torch reports, and AVX-VNNI and AMX by the flags of Linux.

    Linux permits AMX to a process that asks for it; without the permission its instructions are illegal.
    """
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    wide = capability == "AVX512"
    vnni = wide and torch.cpu._is_vnni_supported()
    supported = {
        "amx": vnni and "amx_bf16" in _linux_flags() and torch.cpu._init_amx(),
        "bfloat16": vnni and torch.cpu._is_avx512_bf16_supported(),
        "avx512": wide,
        "vnni": vnni,
        "avxvnni": capability in ("AVX2", "AVX512") and "avx_vnni" in _linux_flags(),
        "avx2": capability in ("AVX2", "AVX512"),
        "generic": True,
    }
    return frozenset(variant for variant, is_supported in supported.items() if is_supported)


def _linux_flags() -> frozenset[str]:
    """The instruction sets of an x86 processor by the names of Linux; none on other systems."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def _arm64_variants() -> frozenset[str]:
    """NEON is in every arm64 processor; i8mm kernels use dotprod too."""
    has_dotprod = has_arm64_feature("dotprod")
    supported = {"neon": True, "dotprod": has_dotprod, "i8mm": has_dotprod and has_arm64_feature("i8mm")}
    return frozenset(variant for variant, is_supported in supported.items() if is_supported)


def has_arm64_feature(name: str) -> bool:
    """Whether the operating system reports an instruction set, "dotprod" or "i8mm"; false where it cannot be asked."""
    if sys.platform == "linux":
        entry, bit = _LINUX_BITS[name]
        return bool(_auxiliary_value(entry) & bit)
    return sys.platform == "darwin" and _sysctl(_MACOS_NAMES[name]) == 1


def _auxiliary_value(entry: int) -> int:
    """A value of the auxiliary vector of this process; 0 if there is none."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(entry))


def _sysctl(name: str) -> int:
    """An integer of sysctl; 0 if there is none."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return value.value
