"""The library of the native step: mirrors of the structures of engine/kernels/cpu/step/step.h, and its functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TypeAlias

from engine.kernels.cpu.attention.attention import KVBufferFields, SegmentFields
from engine.kernels.cpu.build import libraries
from engine.kernels.cpu.build.layout import Mirrors, check_layout, struct_of
from engine.kernels.cpu.products.linear import load_library

MAX_PROJECTIONS = 6
MAX_VALUES_FROM_KEYS = 1024
# The variants of the linear kernel for each variant of the step, fastest first: with the same number of lanes.
_PRODUCTS = {
    "amx": ("vnni",),
    "bfloat16": ("vnni",),
    "vnni": ("vnni",),
    "avx2": ("avxvnni", "avx2"),
    "neon": ("i8mm", "dotprod", "neon"),
}
_NO_MEMORY, _BAD_CELL, _BAD_TOKEN = 1, 2, 3


class LinearFields(Structure):
    """`Linear` of step.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "scales", "bias")),
        *((name, c_int64) for name in ("kind", "outputs", "columns", "stride", "low_rank")),
    ]


class LowRankFields(Structure):
    """`LowRank` of step.h."""

    _fields_ = [*((name, c_void_p) for name in ("down", "up")), *((name, c_int64) for name in ("kind", "rank"))]


class AdapterRangeFields(Structure):
    """`AdapterRange` of step.h."""

    _fields_ = [*((name, c_int64) for name in ("row", "rows")), ("factors", POINTER(LowRankFields))]


class NormFields(Structure):
    """`Norm` of step.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("kind", "width")),
        ("epsilon", c_float),
    ]


class HeadsFields(Structure):
    """`Heads` of step.h."""

    _fields_ = [(name, c_int64) for name in ("matrix", "offset", "stride", "count", "width")]


class EmbeddingFields(Structure):
    """`Embedding` of step.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("table", "scales")),
        *((name, c_int64) for name in ("kind", "count", "rounds_to_bfloat16")),
        ("scale", c_float),
    ]


class RotaryFields(Structure):
    """`Rotary` of step.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("cosine", "sine", "query_factors")),
        *((name, c_int64) for name in ("pairs", "offset", "interleaved")),
    ]


class CellGroupFields(Structure):
    """`CellGroup` of step.h; `segments` is a table of engine.kernels.cpu.attention.attention.segment_table."""

    _fields_ = [("segments", c_void_p), ("count", c_int64), ("cells", c_int64)]


class ExpertNormsFields(Structure):
    """`ExpertNorms` of step.h."""

    _fields_ = [(name, NormFields) for name in ("router", "input", "output", "dense")]


class ExpertsFields(Structure):
    """`Experts` of step.h."""

    _fields_ = [
        ("router", LinearFields),
        ("score_correction", c_void_p),
        *((name, c_int64) for name in ("scoring", "top_k", "normalised", "scales_inputs")),
        ("scaling_factor", c_float),
        ("expert_scales", c_void_p),
        *((name, POINTER(LinearFields)) for name in ("inner", "up", "down")),
        *((name, c_int64) for name in ("activation", "interleaved")),
        *((name, c_float) for name in ("limit", "slope", "shift")),
        ("shared_gate", LinearFields),
        ("norms", POINTER(ExpertNormsFields)),
    ]


class StateRangeFields(Structure):
    """`StateRange` of step.h."""

    _fields_ = [(name, c_int64) for name in ("row", "rows", "span")]


class ColumnRangeFields(Structure):
    """`ColumnRange` of step.h."""

    _fields_ = [(name, c_int64) for name in ("matrix", "offset", "target", "count")]


class ConvolutionFields(Structure):
    """`Convolution` of step.h; `states_before` and `states_after` are set for each step."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("kernel", "channels")),
        *((name, POINTER(c_void_p)) for name in ("states_before", "states_after")),
    ]


class DeltaRuleFields(Structure):
    """`DeltaRule` of step.h."""

    _fields_ = [
        ("ranges", POINTER(ColumnRangeFields)),
        ("range_count", c_int64),
        ("convolution", ConvolutionFields),
        *((name, c_int64) for name in ("key_heads", "value_heads", "key_width", "value_width")),
        *((name, c_void_p) for name in ("decay_scale", "dt_bias")),
        ("max_beta", c_float),
        ("head_norm", NormFields),
        *((name, POINTER(c_void_p)) for name in ("states_before", "states_after")),
    ]


class StateSpaceFields(Structure):
    """`StateSpace` of step.h."""

    _fields_ = [
        ("ranges", POINTER(ColumnRangeFields)),
        ("range_count", c_int64),
        ("convolution", ConvolutionFields),
        *((name, c_int64) for name in ("heads", "groups", "value_width", "key_width")),
        *((name, c_void_p) for name in ("decay_scale", "dt_bias", "skip")),
        *((name, c_float) for name in ("min_dt", "max_dt")),
        ("group_norm", NormFields),
        *((name, POINTER(c_void_p)) for name in ("states_before", "states_after")),
    ]


class LatentAttentionFields(Structure):
    """`LatentAttention` of step.h."""

    _fields_ = [
        ("query_norm", NormFields),
        ("query_expansion", LinearFields),
        ("latents", HeadsFields),
        ("latent_norm", NormFields),
        ("rotary_columns", HeadsFields),
        ("separates_pairs", c_int64),
        *((name, POINTER(LinearFields)) for name in ("keys", "values")),
    ]


class GatedConvolutionFields(Structure):
    """`GatedConvolution` of step.h."""

    _fields_ = [
        ("ranges", POINTER(ColumnRangeFields)),
        ("range_count", c_int64),
        ("convolution", ConvolutionFields),
    ]


class PerLayerFields(Structure):
    """`PerLayerBlock` of step.h."""

    _fields_ = [
        ("gate", LinearFields),
        ("projection", LinearFields),
        ("activation", c_int64),
        ("norm", NormFields),
        ("layer", c_int64),
    ]


class PerLayerInputsFields(Structure):
    """`PerLayerInputs` of step.h."""

    _fields_ = [
        ("table", EmbeddingFields),
        ("projection", LinearFields),
        ("projection_scale", c_float),
        ("norm", NormFields),
        ("scale", c_float),
    ]


RecurrenceFields: TypeAlias = DeltaRuleFields | StateSpaceFields | GatedConvolutionFields


class PairInputFields(Structure):
    """`PairInput` of step.h."""

    _fields_ = [*((name, NormFields) for name in ("embedding_norm", "state_norm")), ("projection", LinearFields)]


class LayerFields(Structure):
    """`Layer` of step.h."""

    _fields_ = [
        *(
            (name, NormFields)
            for name in ("attention_norm", "query_norm", "key_norm", "value_norm", "post_attention_norm")
        ),
        *((name, NormFields) for name in ("mlp_norm", "post_mlp_norm")),
        ("projections", LinearFields * MAX_PROJECTIONS),
        ("output", LinearFields),
        ("inner", LinearFields * 2),
        ("down", LinearFields),
        *((name, c_int64) for name in ("projection_count", "inner_count")),
        *((name, HeadsFields) for name in ("queries", "keys", "values", "gates")),
        ("latents", POINTER(LatentAttentionFields)),
        ("delta_rule", POINTER(DeltaRuleFields)),
        ("gated_convolution", POINTER(GatedConvolutionFields)),
        ("state_space", POINTER(StateSpaceFields)),
        *((name, c_int64) for name in ("stores_cells", "values_are_keys", "norms_all_heads", "rotates_before_norm")),
        *((name, c_int64) for name in ("gate_matrix", "gate_offset", "up_matrix", "up_offset")),
        ("activation", c_int64),
        ("experts", POINTER(ExpertsFields)),
        ("parallel", c_int64),
        ("per_layer", POINTER(PerLayerFields)),
        *((name, c_float) for name in ("attention_residual_scale", "mlp_residual_scale", "output_scale")),
        ("sinks", c_void_p),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int64) for name in ("rotary", "cell_group")),
        *((name, KVBufferFields) for name in ("key_buffer", "value_buffer")),
        *((name, c_int64) for name in ("attention_range", "attention_range_size")),
    ]


class StepFields(Structure):
    """`Step` of step.h."""

    _fields_ = [
        ("tokens", c_void_p),
        *((name, c_int64) for name in ("rows", "width")),
        ("embedding", EmbeddingFields),
        ("per_layer_inputs", POINTER(PerLayerInputsFields)),
        ("pair_input", POINTER(PairInputFields)),
        *((name, c_void_p) for name in ("initial_states", "features", "feature_rows")),
        *((name, c_int64) for name in ("feature_layers", "feature_count")),
        ("layers", POINTER(LayerFields)),
        ("layer_count", c_int64),
        ("rotaries", POINTER(RotaryFields)),
        ("rotary_rows", c_void_p),
        ("cell_groups", POINTER(CellGroupFields)),
        ("cell_group_count", c_int64),
        ("state_ranges", POINTER(StateRangeFields)),
        ("state_range_count", c_int64),
        ("adapter_ranges", POINTER(AdapterRangeFields)),
        *((name, c_int64) for name in ("adapter_range_count", "max_rank", "format")),
        ("final_norm", NormFields),
        ("head", LinearFields),
        ("output_rows", c_void_p),
        *((name, c_int64) for name in ("output_count", "logit_count")),
        *((name, c_void_p) for name in ("hidden_states", "state_layers")),
        ("state_layer_count", c_int64),
        *((name, c_void_p) for name in ("layer_states", "logits")),
        *((name, c_int64) for name in ("rounds_to_bfloat16", "threads")),
    ]


class SamplingContextFields(Structure):
    """`SamplingContext` of step.h."""

    _fields_ = [
        *((name, c_int64) for name in ("length", "count")),
        ("seed", c_uint64),
        ("position", c_int64),
        ("temperature", c_double),
        ("top_k", c_int64),
        *((name, c_double) for name in ("top_p", "min_p")),
    ]


# Packs the fields of a SamplingContext in order.
SAMPLING_CONTEXT = struct_of(SamplingContextFields)


class DraftLoopFields(Structure):
    """`DraftLoop` of step.h."""

    _fields_ = [
        ("step", POINTER(StepFields)),
        ("contexts", c_void_p),
        ("sequence_count", c_int64),
        ("tokens", c_void_p),
        *((name, c_float) for name in ("logits_scale", "softcap")),
        *((name, c_int64) for name in ("vocabulary", "max_count")),
        ("sampled", c_void_p),
    ]


class SamplingFields(Structure):
    """`SamplingCall` of step.h."""

    _fields_ = [
        ("contexts", c_void_p),
        ("rows", c_int64),
        ("logits", c_void_p),
        ("outputs", c_int64),
        ("sampled", c_void_p),
        ("threads", c_int64),
    ]


# By the names in step.h and attention.h.
MIRRORS: Mirrors = {
    "Segment": SegmentFields,
    "KVBuffer": KVBufferFields,
    "Linear": LinearFields,
    "LowRank": LowRankFields,
    "AdapterRange": AdapterRangeFields,
    "Norm": NormFields,
    "Heads": HeadsFields,
    "Embedding": EmbeddingFields,
    "Rotary": RotaryFields,
    "CellGroup": CellGroupFields,
    "ExpertNorms": ExpertNormsFields,
    "Experts": ExpertsFields,
    "StateRange": StateRangeFields,
    "ColumnRange": ColumnRangeFields,
    "Convolution": ConvolutionFields,
    "DeltaRule": DeltaRuleFields,
    "StateSpace": StateSpaceFields,
    "GatedConvolution": GatedConvolutionFields,
    "LatentAttention": LatentAttentionFields,
    "PerLayerBlock": PerLayerFields,
    "PerLayerInputs": PerLayerInputsFields,
    "PairInput": PairInputFields,
    "Layer": LayerFields,
    "Step": StepFields,
    "SamplingContext": SamplingContextFields,
    "DraftLoop": DraftLoopFields,
    "SamplingCall": SamplingFields,
}


class StepLibrary:
    """The functions of one library file; products of quantised weights use the linear kernel."""

    def __init__(self, file: Path, products: Path) -> None:
        """Raises OSError if a file cannot be loaded, LayoutMismatch (an OSError) if it has other structures.

        products  library of the linear kernel for the same instruction set
        """
        library, self._products = ctypes.CDLL(str(file)), load_library(products)
        check_layout(library, MIRRORS)
        library.cellar_set_products.argtypes, library.cellar_set_products.restype = [c_void_p], None
        library.cellar_set_products(ctypes.cast(self._products.cellar_multiply_blocks, c_void_p))
        self._step, self._draft_loop = library.cellar_step, library.cellar_draft_loop
        self._sample = library.cellar_sample
        self._step.argtypes, self._step.restype = [POINTER(StepFields)], c_int64
        self._draft_loop.argtypes, self._draft_loop.restype = [POINTER(DraftLoopFields)], c_int64
        self._sample.argtypes, self._sample.restype = [POINTER(SamplingFields)], c_int64

    def run_step(self, step: StepFields) -> None:
        """Compute a step. Raises MemoryError, IndexError for a cell outside the pool or an unknown token."""
        if outcome := self._step(byref(step)):
            raise _error(outcome)

    def run_draft_loop(self, draft_loop: DraftLoopFields) -> None:
        """Compute the steps of a draft loop. Raises as `run_step` does."""
        if outcome := self._draft_loop(byref(draft_loop)):
            raise _error(outcome)

    def sample(self, call: SamplingFields) -> None:
        """Sample a token for each row of logits. Raises MemoryError."""
        if outcome := self._sample(byref(call)):
            raise _error(outcome)


def step_variants(variant: str | None = None) -> tuple[str, str]:
    """A variant of the step, by default the fastest, and that of its products. Raises LibraryUnavailable."""
    steps = libraries.variants("step") if variant is None else (variant,)
    for step in steps:
        for products in libraries.variants("linear"):
            if products in _PRODUCTS[step]:
                return step, products
    raise libraries.LibraryUnavailable("it needs AVX2, AVX-512 or NEON, which this processor or its compiler lacks")


def step_library(variant: str | None = None) -> StepLibrary:
    """The library of a variant, by default the fastest. May build it, in seconds. Raises LibraryUnavailable."""
    chosen = step, products = step_variants(variant)
    try:
        files = libraries.library("step", step), libraries.library("linear", products)
    except libraries.BuildFailed:
        # The compiler may lack the instructions of the fastest variants.
        if step_variants(variant) == chosen:
            raise
        return step_library(variant)
    try:
        return StepLibrary(*files)
    except OSError as error:
        raise libraries.LibraryUnavailable(f"the library cannot be loaded: {error}") from error


def _error(outcome: int) -> Exception:
    if outcome == _NO_MEMORY:
        return MemoryError("no memory for the rows of a step")
    if outcome == _BAD_CELL:
        return IndexError("a table names a cell outside the pool")
    assert outcome == _BAD_TOKEN, "an outcome that step.h does not have"
    return IndexError("a token has no embedding")
