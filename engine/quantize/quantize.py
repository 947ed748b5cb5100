"""Replaces the linear layers and the experts of a loaded model by quantised ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.config import Quantize
from engine.kernels import linear
from engine.kernels.device_products import DeviceProducts, upload
from engine.kernels.dispatch import best_linear
from engine.kernels.formats import LAYOUTS
from engine.kernels.linear import PrepareMatrices
from engine.kernels.packing import PackedMatrix, PackedStorage
from engine.kernels.rounding import Bits
from engine.quantize.calibration import LayerStatistics
from engine.quantize.embedding import QuantizedEmbedding
from engine.quantize.experts import QuantizedExperts
from engine.quantize.formats import MAX_AVERAGE_BITS
from engine.quantize.layers import QuantizedLinear, SharedInputGroup
from engine.quantize.plan import LinearLayer, QuantizationPlan, replace_modules
from engine.quantize.quantizer import (
    MatrixSource,
    PlannedEmbedding,
    Quantizer,
    describe_formats,
    matrix_name,
    matrix_shapes,
)
from engine.quantize.stacks import ExpertStack, experts_of
from engine.quantize.store import WeightStore
from engine.types.progress import report_progress
from engine.types.status import QuantizationEstimate

log = logging.getLogger("cellar.engine")

# The quantised matrix by its name and its original weights.
_QuantizeMatrix: TypeAlias = Callable[[str, Tensor], PackedMatrix]

_BITS: dict[Quantize, Bits | None] = {"none": None, "int8": 8, "int4": 4}
# With "auto", models with fewer weights are not quantised: they are fast and small enough.
_AUTO_MIN_WEIGHTS = 2**25
# With "auto", weights have 8 bits if they then use at most this share of the available memory, else 4.
_AUTO_INT8_SHARE = 0.5
# With "auto", weights on a GPU have the most bits with which they use at most this share of its memory.
_AUTO_DEVICE_SHARE = 0.75


def bits_for(
    settings: Quantize, plan: QuantizationPlan, available_bytes: int, *, device: str = "cpu", stored_bytes: int = 0
) -> Bits | None:
    """Bits of a quantised weight by the setting; None: the layers are not quantised.

    stored_bytes  of all weights as stored
    """
    if settings != "auto":
        return _BITS[settings]
    if device != "cpu":
        return _fitting_bits(plan.weights, stored_bytes, int(_AUTO_DEVICE_SHARE * available_bytes))
    return None if best_linear() is linear.prepare else _auto_bits(plan.weights, available_bytes)


def estimate(model: nn.Module, available_bytes: int) -> QuantizationEstimate | None:
    """Relative weight reads after quantisation of the loaded model; None if it has no linear layers."""
    parameters: list[Tensor] = []
    for module in model.modules():
        if type(module) in (nn.Linear, Conv1D):
            parameters += module.parameters(recurse=False)
        elif (experts := experts_of(module)) is not None:
            parameters += (experts.up.stored, experts.down.stored)
    weights = sum([parameter.numel() for parameter in parameters])
    if not weights:
        return None
    read_bytes = sum([parameter.nbytes for parameter in parameters])
    auto = _auto_bits(weights, available_bytes)
    bits = (("int8", LAYOUTS["int8"].weight_bits), ("int4", MAX_AVERAGE_BITS))
    reads = tuple((name, weights * format_bits / 8 / read_bytes) for name, format_bits in bits)
    return QuantizationEstimate(reads, None if auto is None else f"int{auto}")


def _fitting_bits(weights: int, stored_bytes: int, limit: int) -> Bits | None:
    if stored_bytes <= limit:
        return None
    return 8 if weights * LAYOUTS["int8"].weight_bits / 8 <= limit else 4


def _auto_bits(weights: int, available_bytes: int) -> Bits | None:
    if weights < _AUTO_MIN_WEIGHTS:
        return None
    return 8 if weights < _AUTO_INT8_SHARE * available_bytes else 4


def quantize(
    model: nn.Module,
    plan: QuantizationPlan,
    store: WeightStore,
    prepare: PrepareMatrices,
    calibrate: Callable[[], Mapping[str, LayerStatistics]] = dict,
) -> None:
    """Replace the layers and experts of the plan; the original weights are freed one by one.

    Quantised weights are read from the store, or computed and then stored.

    prepare    DeviceProducts: the matrices are copied to their device
    calibrate  called for new weights of 4 bits: statistics by the name of a layer, or of a module with experts
    """
    matrices = _QuantizedMatrices(store, plan, calibrate)
    step = f"quantize to int{store.bits}" if matrices.new else "read quantized weights"
    _replace(model, plan, matrices.quantize, prepare, step=step)
    matrices.save()
    log.info("int%d: %s", store.bits, describe_formats(matrices.packed))
    _log_summary(model, plan, f"int{store.bits}")


def repack(
    model: nn.Module,
    plan: QuantizationPlan,
    embeddings: Sequence[PlannedEmbedding],
    source: MatrixSource,
    prepare: PrepareMatrices,
    *,
    label: str,
) -> None:
    """Replace the layers and experts of the plan, and embeddings, by the matrices of a source; the original weights
    are freed.

    prepare  as in `quantize`
    label    name of the formats, for the log
    """
    shapes = matrix_shapes(plan, embeddings)
    storage = PackedStorage((*shape, source.formats[name]) for name, shape in shapes.items())
    packed = dict[str, PackedMatrix]()

    def matrix(name: str, weight: Tensor) -> PackedMatrix:
        packed[name] = source.quantize(name, weight, storage)
        return packed[name]

    _replace(model, plan, matrix, prepare, step="repack weights")
    for embedding in embeddings:
        if embedding.layer is None:
            [table] = _placed([matrix(embedding.name, embedding.module.weight)], prepare)
        else:
            table = next(layer.packed for name, layer in _named_layers(model) if name == embedding.layer)
        replace_modules(model, {embedding.module: QuantizedEmbedding(embedding.module, table, prepare)})
    log.info("%s: %s", label, describe_formats(packed))
    _log_summary(model, plan, label)


def _replace(
    model: nn.Module, plan: QuantizationPlan, quantized: _QuantizeMatrix, prepare: PrepareMatrices, *, step: str
) -> None:
    """Replace the layers and experts of the plan; the original weights are freed one by one.

    step  name for reports of progress
    """
    replacements: dict[nn.Module, nn.Module] = {}
    done, total = 0, plan.weights

    def reported(name: str, weight: Tensor) -> PackedMatrix:
        nonlocal done
        packed, done = quantized(name, weight), done + weight.numel()
        report_progress(step, done, total)
        return packed

    for group in plan.groups:
        replacements |= _quantized_linears(group, [reported(layer.name, layer.weight) for layer in group], prepare)
    for name, experts in plan.experts.items():
        up, down = (_placed(_quantize_stack(reported, name, stack), prepare) for stack in (experts.up, experts.down))
        replacements[experts.module] = QuantizedExperts(experts, up, down, prepare)
    replace_modules(model, replacements)


def _placed(matrices: Sequence[PackedMatrix], prepare: PrepareMatrices) -> Sequence[PackedMatrix]:
    """The matrices on the device of their products."""
    return upload(matrices, prepare.device) if isinstance(prepare, DeviceProducts) else matrices


def bytes_of(model: nn.Module) -> int:
    """Memory of a model's weights in this process, quantised or not."""
    parameters = sum(_local(parameter).nbytes for parameter in model.parameters())
    modules = (module for module in model.modules() if isinstance(module, QuantizedLinear | QuantizedEmbedding))
    # An embedding may share its matrix with a layer.
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers(recurse=False)}
    layers = sum(buffer.nbytes for buffer in buffers.values())
    return parameters + layers + sum(experts.bytes for experts in _experts(model))


def _local(parameter: Tensor) -> Tensor:
    """The part of a parameter that is in this process; a DTensor under tensor parallelism."""
    to_local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def weights_of(model: nn.Module) -> int:
    """Number of a model's weights, quantised or not; a quantised embedding that a layer shares counts twice."""
    quantised = (QuantizedLinear, QuantizedEmbedding, QuantizedExperts)
    layers = sum(module.weights for module in model.modules() if isinstance(module, quantised))
    return layers + sum(parameter.numel() for parameter in model.parameters())


class _QuantizedMatrices:
    """The quantised matrices of a model by name, stored or new."""

    def __init__(
        self, store: WeightStore, plan: QuantizationPlan, calibrate: Callable[[], Mapping[str, LayerStatistics]]
    ) -> None:
        shapes = matrix_shapes(plan)
        self._store, self._stored = store, store.read(shapes)
        self.packed = dict[str, PackedMatrix]()
        if self._stored is None:
            self._quantizer = Quantizer(store.bits, plan, {} if store.bits == 8 else calibrate())
            self._storage = PackedStorage((*shape, self._quantizer.formats[name]) for name, shape in shapes.items())

    @property
    def new(self) -> bool:
        """Whether they are computed."""
        return self._stored is None

    def quantize(self, name: str, weight: Tensor) -> PackedMatrix:
        """The quantised matrix `name` with original weights [outputs, columns]."""
        if self._stored is None:
            self.packed[name] = self._quantizer.quantize(name, weight, self._storage)
        else:
            self.packed[name] = self._stored[name]
        return self.packed[name]

    def save(self) -> None:
        """Store new matrices."""
        if self._stored is None:
            self._store.write(self.packed)


def _quantize_stack(quantized: _QuantizeMatrix, name: str, stack: ExpertStack) -> list[PackedMatrix]:
    """The matrices of all experts; the original parameter is freed."""
    packed = [quantized(matrix_name(name, stack, number), weight) for number, weight in enumerate(stack.matrices)]
    stack.module.register_parameter(stack.parameter, None)
    return packed


def _layers(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def _named_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear))


def _experts(model: nn.Module) -> Iterator[QuantizedExperts]:
    return (module for module in model.modules() if isinstance(module, QuantizedExperts))


def _quantized_linears(
    group: Sequence[LinearLayer], matrices: Sequence[PackedMatrix], prepare: PrepareMatrices
) -> dict[nn.Module, QuantizedLinear]:
    """The replacements of the layers of one group; the original weights are freed."""
    matrices = _placed(matrices, prepare)
    shared = SharedInputGroup(prepare(matrices))
    pairs = enumerate(zip(group, matrices, strict=True))
    replacements = {layer.module: QuantizedLinear(shared, number, packed, layer) for number, (layer, packed) in pairs}
    for layer in group:
        layer.module.register_parameter("weight", None)
    return replacements


def _log_summary(model: nn.Module, plan: QuantizationPlan, label: str) -> None:
    """Log the quantised layers, and the others with the reasons."""
    counts = [f"{count} linear layers ({reason})" for reason, count in plan.skipped.items()]
    # Convolution weights have three dimensions too.
    unsupported = sum(
        parameter.numel()
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and not isinstance(module, nn.Conv1d)
    )
    if unsupported:
        counts.append(f"{unsupported / 1e6:.1f} million weights of experts")
    layers, experts = list(_layers(model)), list(_experts(model))
    weights = sum(layer.weights for layer in layers) + sum(stacks.weights for stacks in experts)
    quantized = f"{len(plan.layers)} linear layers" + (f", the experts of {len(experts)} layers" if experts else "")
    skipped = ", ".join(counts) or "only layers of other types"
    log.info("%s: %s, %.1f million weights; not quantised: %s", label, quantized, weights / 1e6, skipped)
