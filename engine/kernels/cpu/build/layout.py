"""Compares ctypes mirrors with the structures of a library: a wrong field order would be memory corruption."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from ctypes import Structure, c_char_p, c_double, c_int64, c_uint64, c_void_p
from typing import TypeAlias

Mirrors: TypeAlias = Mapping[str, type[Structure]]

_STRUCT_CODES: dict[type, str] = {c_int64: "q", c_uint64: "Q", c_double: "d", c_void_p: "q"}


class LayoutMismatch(OSError):
    """A library has a structure with other sizes or offsets than its mirror."""


class _FieldLayout(Structure):
    """As in layout.h."""

    _fields_ = [("structure", c_char_p), ("field", c_char_p), ("offset", c_int64), ("size", c_int64)]


def check_layout(library: ctypes.CDLL, mirrors: Mirrors) -> None:
    """Raise LayoutMismatch unless each structure of the library has a mirror by its name, with the same fields."""
    exported, expected = _exported(library), _expected(mirrors)
    for name in sorted(exported.keys() | expected.keys()):
        if exported.get(name) != expected.get(name):
            raise LayoutMismatch(
                f"{name} has (offset, size) {exported.get(name)} in the library, {expected.get(name)} in its mirror"
            )


def struct_of(mirror: type[Structure]) -> struct.Struct:
    """A struct.Struct that packs the fields of a mirror without padding, which is faster than ctypes."""
    return struct.Struct("".join(_STRUCT_CODES[kind] for _, kind, *_ in mirror._fields_))


def _exported(library: ctypes.CDLL) -> dict[str, tuple[int, int]]:
    """(offset, size) by "Structure" and "Structure.field"."""
    address = ctypes.addressof(c_int64.in_dll(library, "cellar_layout"))
    offsets: dict[str, tuple[int, int]] = {}
    while (entry := _FieldLayout.from_address(address)).structure is not None:
        name = entry.structure.decode() + ("" if entry.field is None else "." + entry.field.decode())
        offsets[name] = entry.offset, entry.size
        address += ctypes.sizeof(_FieldLayout)
    return offsets


def _expected(mirrors: Mirrors) -> dict[str, tuple[int, int]]:
    offsets: dict[str, tuple[int, int]] = {}
    for structure, mirror in mirrors.items():
        offsets[structure] = 0, ctypes.sizeof(mirror)
        for name, *_ in mirror._fields_:
            field = getattr(mirror, name)
            offsets[f"{structure}.{name}"] = field.offset, field.size
    return offsets
