"""The native step's library, and its structures: those of engine/kernels/cpu/step.h, field by field."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from pathlib import Path
from typing import TypeAlias

from engine.kernels.cpu.attention import KVBufferFields

MAX_PROJECTIONS = 6
_NO_MEMORY, _BAD_CELL, _BAD_TOKEN = 1, 2, 3


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


class EmbeddingFields(Structure):
    """What rows begin as."""

    _fields_ = [("table", c_void_p), *((name, c_int64) for name in ("kind", "count")), ("scale", c_float)]


class RotaryFields(Structure):
    """The angles of all positions."""

    _fields_ = [
        *((name, c_void_p) for name in ("cosine", "sine")),
        *((name, c_int64) for name in ("pairs", "offset", "interleaved")),
    ]


class CellsFields(Structure):
    """The cells of the rows; `segments` is a segment_table (kernels/cpu/native.py)."""

    _fields_ = [("segments", c_void_p), ("count", c_int64), ("cells", c_int64)]


class ExpertsFields(Structure):
    """A layer's experts."""

    _fields_ = [
        ("router", LinearFields),
        ("correction", c_void_p),
        *((name, c_int64) for name in ("scoring", "chosen", "renormalised")),
        ("factor", c_float),
        *((name, POINTER(LinearFields)) for name in ("inner", "down")),
        *((name, c_int64) for name in ("activation", "alternating")),
        *((name, c_float) for name in ("limit", "slope", "shift")),
        ("share", LinearFields),
    ]


class PieceFields(Structure):
    """Rows of one sequence, behind which its states are told."""

    _fields_ = [(name, c_int64) for name in ("row", "rows", "span")]


class ColumnRangeFields(Structure):
    """Columns that go to other places."""

    _fields_ = [(name, c_int64) for name in ("matrix", "offset", "first", "count")]


class ConvolutionFields(Structure):
    """A convolution; the addresses of states are those of one step."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("kernel", "channels")),
        *((name, POINTER(c_void_p)) for name in ("before", "after")),
    ]


class DeltaRuleFields(Structure):
    """A layer's linear attention; see ConvolutionFields."""

    _fields_ = [
        ("runs", POINTER(ColumnRangeFields)),
        ("run_count", c_int64),
        ("convolution", ConvolutionFields),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_width", "value_width")),
        *((name, c_void_p) for name in ("speed", "shift")),
        ("most", c_float),
        ("norm", NormFields),
        *((name, POINTER(c_void_p)) for name in ("before", "after")),
    ]


class StateSpaceFields(Structure):
    """A layer's state space; see ConvolutionFields."""

    _fields_ = [
        ("runs", POINTER(ColumnRangeFields)),
        ("run_count", c_int64),
        ("convolution", ConvolutionFields),
        *((name, c_int64) for name in ("heads", "groups", "value_width", "key_width")),
        *((name, c_void_p) for name in ("speed", "shift", "direct")),
        *((name, c_float) for name in ("slowest", "fastest")),
        ("norm", NormFields),
        *((name, POINTER(c_void_p)) for name in ("before", "after")),
    ]


class GatedConvolutionFields(Structure):
    """A convolution between two products."""

    _fields_ = [("runs", POINTER(ColumnRangeFields)), ("run_count", c_int64), ("convolution", ConvolutionFields)]


RecurrenceFields: TypeAlias = DeltaRuleFields | StateSpaceFields | GatedConvolutionFields


class LayerFields(Structure):
    """A layer."""

    _fields_ = [
        *((name, NormFields) for name in ("before_attention", "of_queries", "of_keys", "after_attention")),
        *((name, NormFields) for name in ("before_mlp", "after_mlp")),
        ("projections", LinearFields * MAX_PROJECTIONS),
        ("output", LinearFields),
        ("inner", LinearFields * 2),
        ("down", LinearFields),
        *((name, c_int64) for name in ("projection_count", "inner_count")),
        *((name, HeadsFields) for name in ("queries", "keys", "values", "gates")),
        ("delta", POINTER(DeltaRuleFields)),
        ("sieve", POINTER(GatedConvolutionFields)),
        ("space", POINTER(StateSpaceFields)),
        *((name, c_int64) for name in ("norms_whole", "turns_first")),
        *((name, c_int64) for name in ("gate_matrix", "gate_offset", "up_matrix", "up_offset")),
        ("activation", c_int64),
        ("experts", POINTER(ExpertsFields)),
        ("parallel", c_int64),
        *((name, c_float) for name in ("attention_share", "mlp_share")),
        ("sinks", c_void_p),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int64) for name in ("turn", "cells")),
        *((name, KVBufferFields) for name in ("key_plane", "value_plane")),
        *((name, c_int64) for name in ("reach", "reach_size")),
    ]


class StepFields(Structure):
    """A step."""

    _fields_ = [
        ("tokens", c_void_p),
        *((name, c_int64) for name in ("rows", "width")),
        ("embedding", EmbeddingFields),
        ("layers", POINTER(LayerFields)),
        ("layer_count", c_int64),
        ("turns", POINTER(RotaryFields)),
        ("angles", c_void_p),
        ("cells", POINTER(CellsFields)),
        ("cells_count", c_int64),
        ("pieces", POINTER(PieceFields)),
        *((name, c_int64) for name in ("piece_count", "format")),
        ("last", NormFields),
        ("head", LinearFields),
        ("kept", c_void_p),
        *((name, c_int64) for name in ("kept_count", "wanted_count")),
        *((name, c_void_p) for name in ("kept_states", "logits")),
        *((name, c_int64) for name in ("rounds", "threads")),
    ]


# What one sequence reads and says: length, count, seed, position; temperature; top_k; top_p, min_p.
DRAW_SPEC = struct.Struct("qqQqdqdd")


class DraftLoopFields(Structure):
    """Steps that follow each other."""

    _fields_ = [
        ("step", POINTER(StepFields)),
        ("links", c_void_p),
        ("links_count", c_int64),
        ("tokens", c_void_p),
        *((name, c_float) for name in ("logits_scale", "softcap")),
        *((name, c_int64) for name in ("choices", "deepest")),
        ("said", c_void_p),
    ]


class SamplingFields(Structure):
    """Rows of logits, and how tokens are drawn behind them."""

    _fields_ = [
        ("links", c_void_p),
        ("rows", c_int64),
        ("logits", c_void_p),
        ("outputs", c_int64),
        ("said", c_void_p),
        ("threads", c_int64),
    ]


class StepLibrary:
    """The step of one library file, which engine/kernels/cpu/build.py provides."""

    def __init__(self, file: Path) -> None:
        """Raises OSError where it cannot be loaded."""
        library = ctypes.CDLL(str(file))
        self._step, self._chain, self._choose = library.cellar_step, library.cellar_chain, library.cellar_choose
        self._step.argtypes, self._step.restype = [POINTER(StepFields)], c_int64
        self._chain.argtypes, self._chain.restype = [POINTER(DraftLoopFields)], c_int64
        self._choose.argtypes, self._choose.restype = [POINTER(SamplingFields)], c_int64

    def run_step(self, step: StepFields) -> None:
        """Compute a step. Raises MemoryError, and IndexError for a cell outside the pool or a token that is none."""
        if outcome := self._step(byref(step)):
            raise _error(outcome)

    def run_draft_loop(self, chain: DraftLoopFields) -> None:
        """Compute a chain of steps. Raises as `take` does."""
        if outcome := self._chain(byref(chain)):
            raise _error(outcome)

    def sample(self, choices: SamplingFields) -> None:
        """Draw tokens. Raises MemoryError."""
        if outcome := self._choose(byref(choices)):
            raise _error(outcome)


def _error(outcome: int) -> Exception:
    """What an outcome other than 0 means."""
    if outcome == _NO_MEMORY:
        return MemoryError("no memory for the rows of a step")
    if outcome == _BAD_CELL:
        return IndexError("a table names a cell outside the pool")
    assert outcome == _BAD_TOKEN, "an outcome that step.h does not have"
    return IndexError("a token has no embedding")
