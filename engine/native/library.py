"""The native step's library, and its structures: those of engine/kernels/cpu/step.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from pathlib import Path

from engine.kernels.cpu.native import PlaneFields, SegmentFields

_NO_MEMORY, _BAD_CELL = 1, 2


class LinearFields(Structure):
    """A matrix."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "scales", "bias")),
        *((name, c_int64) for name in ("kind", "outputs", "columns", "stride")),
    ]


class NormFields(Structure):
    """A norm."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("kind", "width")),
        ("epsilon", c_float),
    ]


class HeadsFields(Structure):
    """Where heads lie."""

    _fields_ = [(name, c_int64) for name in ("matrix", "offset", "stride", "count", "width")]


class TurnFields(Structure):
    """The angles of the rows."""

    _fields_ = [
        *((name, c_void_p) for name in ("cosine", "sine")),
        *((name, c_int64) for name in ("pairs", "offset", "interleaved")),
    ]


class CellsFields(Structure):
    """The cells of the rows."""

    _fields_ = [("segments", POINTER(SegmentFields)), ("count", c_int64), ("cells", c_int64)]


class ExpertsFields(Structure):
    """A layer's experts."""

    _fields_ = [
        ("router", LinearFields),
        ("correction", c_void_p),
        *((name, c_int64) for name in ("scoring", "chosen", "renormalised")),
        ("factor", c_float),
        *((name, c_void_p) for name in ("inner", "down")),
        *((name, c_int64) for name in ("kind", "width", "columns", "activation")),
        ("gate", LinearFields),
    ]


class LayerFields(Structure):
    """A layer."""

    _fields_ = [
        *((name, NormFields) for name in ("before_attention", "of_queries", "of_keys", "after_attention")),
        *((name, NormFields) for name in ("before_mlp", "after_mlp")),
        ("projections", LinearFields * 3),
        ("output", LinearFields),
        ("inner", LinearFields * 2),
        ("down", LinearFields),
        *((name, c_int64) for name in ("projection_count", "inner_count")),
        *((name, HeadsFields) for name in ("queries", "keys", "values")),
        *((name, c_int64) for name in ("norms_whole", "turns_first")),
        *((name, c_int64) for name in ("gate_matrix", "gate_offset", "up_matrix", "up_offset")),
        ("activation", c_int64),
        ("experts", POINTER(ExpertsFields)),
        ("parallel", c_int64),
        *((name, c_float) for name in ("attention_share", "mlp_share")),
        ("sinks", c_void_p),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int64) for name in ("turn", "cells")),
        *((name, PlaneFields) for name in ("key_plane", "value_plane")),
        *((name, c_int64) for name in ("reach", "reach_size")),
    ]


class StepFields(Structure):
    """A step."""

    _fields_ = [
        ("states", c_void_p),
        *((name, c_int64) for name in ("rows", "width")),
        ("layers", POINTER(LayerFields)),
        ("layer_count", c_int64),
        ("turns", POINTER(TurnFields)),
        ("cells", POINTER(CellsFields)),
        *((name, c_int64) for name in ("cells_count", "format")),
        ("last", NormFields),
        ("head", LinearFields),
        ("kept", c_void_p),
        *((name, c_int64) for name in ("kept_count", "wanted_count")),
        *((name, c_void_p) for name in ("kept_states", "logits")),
        *((name, c_int64) for name in ("rounds", "threads")),
    ]


class Library:
    """The step of one library file, which engine/kernels/cpu/build.py provides."""

    def __init__(self, file: Path) -> None:
        """Raises OSError where it cannot be loaded."""
        self._call = ctypes.CDLL(str(file)).cellar_step
        self._call.argtypes, self._call.restype = [POINTER(StepFields)], c_int64

    def take(self, step: StepFields) -> None:
        """Compute a step. Raises IndexError where a table names a cell outside the pool, and MemoryError."""
        outcome = self._call(byref(step))
        if outcome == _NO_MEMORY:
            raise MemoryError("no memory for the rows of a step")
        if outcome == _BAD_CELL:
            raise IndexError("a table names a cell outside the pool")
