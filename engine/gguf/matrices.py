"""The matrices of a model in the formats of its GGUF files, for the replacement of its layers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.gguf.deferred import DeferredWeights
from engine.gguf.sources import PLAIN_TYPES, FileMatrix, LatentExpansion, Matrices, ParameterSource
from engine.kernels.blocks import EXACT_FORMATS, BlockReader
from engine.kernels.formats import WeightFormat
from engine.kernels.packing import PackedMatrix, PackedStorage
from engine.kernels.rounding import pack_floats
from engine.quantize.plan import QuantizationPlan
from engine.quantize.quantizer import PlannedEmbedding, PlannedMatrix, matrix_name, planned_matrices
from engine.quantize.stacks import Experts, experts_of

log = logging.getLogger("cellar.engine")

# The format of weights in types without an exact one.
_WIDER: WeightFormat = "int8"


class FileMatrices:
    """The matrices of a model by name, repacked from the blocks of its files.

    sources   of all parameters of the model
    reader    of the blocks
    formats   by name, of the matrices of the last plan
    label     name of the mix of types in the files, such as Q4_K_M
    deferred  the parameters that are dequantised at each call of their module; None: there are none
    """

    def __init__(
        self, sources: Mapping[str, ParameterSource], skeleton: nn.Module, label: str, reader: BlockReader
    ) -> None:
        """`sources` by parameter of `skeleton`, the model of transformers."""
        self.label, self.sources, self.reader = label, sources, reader
        self._tied: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", {})
        self.formats: dict[str, WeightFormat] = {}
        self.deferred: DeferredWeights | None = None
        self._widened = Counter[str]()
        self._squared_error, self._squared_weights = 0.0, 0.0

    @property
    def quantised(self) -> bool:
        """Whether some matrices have a quantised type."""
        tensors = (tensor for source in self.sources.values() for tensor in source.tensors)
        return any(tensor.type not in PLAIN_TYPES for tensor in tensors)

    def limit(self, plan: QuantizationPlan) -> QuantizationPlan:
        """The plan without matrices that the files hold as floats, and with the parts of experts; sets `formats`."""
        plan = replace(plan, experts={name: self._divided(name, stacks) for name, stacks in plan.experts.items()})
        plain = {matrix.name for matrix in planned_matrices(plan) if self._is_plain(matrix.name)}
        groups = [tuple(layer for layer in group if layer.name not in plain) for group in plan.groups]
        # One tensor holds the matrices of all experts, so those of the first one have all types.
        experts = {
            name: stacks
            for name, stacks in plan.experts.items()
            if not {matrix_name(name, stack, part) for stack in (stacks.up, stacks.down) for part in range(stack.parts)}
            & plain
        }
        skipped = Counter(plan.skipped)
        if kept := sum(layer.name in plain for layer in plan.layers):
            skipped["floats in the file"] += kept
        limited = replace(plan, groups=tuple(filter(None, groups)), skipped=skipped, experts=experts)
        self.formats = {matrix.name: self._format(matrix.name, matrix.weight) for matrix in planned_matrices(limited)}
        return limited

    def embeddings(self, model: nn.Module, plan: QuantizationPlan) -> list[PlannedEmbedding]:
        """The embedding tables in exact formats; sets their formats.

        A table with the weights of layers is among them only if these layers are in the plan.
        """
        layers = {layer.name for layer in plan.layers}
        tables = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        embeddings = []
        for name, module in tables:
            matrix = self._matrix(name)
            tied = [layer.removesuffix(".weight") for layer, table in self._tied.items() if table == f"{name}.weight"]
            if matrix is None or module.max_norm is not None or not layers.issuperset(tied):
                continue
            if matrix.type is not None and self._is_exact(matrix, module.weight):
                embeddings.append(PlannedEmbedding(name, module, tied[0] if tied else None))
                if not tied:
                    self.formats[name] = EXACT_FORMATS[matrix.type]
        return embeddings

    def exact_parameters(self, model: nn.Module, plan: QuantizationPlan) -> frozenset[str]:
        """The parameters of which every matrix is in the plan and has an exact format: `quantize` needs no weights."""
        plan = self.limit(plan)
        embeddings = [f"{embedding.name}.weight" for embedding in self.embeddings(model, plan)]
        exact = {matrix.name for matrix in planned_matrices(plan) if self._has_exact_format(matrix)}
        stacks = {
            f"{name}.{stack.parameter}": [matrix_name(name, stack, number) for number in range(len(stack.matrices))]
            for name, experts in plan.experts.items()
            for stack in (experts.up, experts.down)
        }
        layers = {f"{layer.name}.weight": [layer.name] for layer in plan.layers}
        readable = {
            name for name, parts in (stacks | layers).items() if exact.issuperset(parts) and name not in self._tied
        }
        return frozenset(readable.union(embeddings))

    def deferrable(self, skeleton: nn.Module) -> dict[str, Matrices]:
        """The sources of parameters that a model reads in calls of their module only, if every matrix has an exact
        format.
        """
        names = set[str]()
        for name, module in skeleton.named_modules():
            experts = experts_of(module)
            if experts is not None:
                names |= {f"{name}.{stack.parameter}" for stack in (experts.up, experts.down)}
            elif type(module) is nn.Linear or isinstance(module, nn.Embedding):
                names.add(f"{name}.weight")
        return {
            name: source
            for name, source in self.sources.items()
            if name in names and isinstance(source, Matrices) and _is_deferrable(name, source)
        }

    def quantize(self, name: str, weight: Tensor, storage: PackedStorage) -> PackedMatrix:
        """The matrix in its format: exact, or with one of int8 from its dequantised `weight`.

        Raises ValueError for scales that are infinite or NaN.
        """
        matrix = self._matrix(name)
        if matrix is not None and self._is_exact(matrix, weight):
            assert matrix.type is not None
            packed = self.reader.pack_blocks(torch.from_numpy(matrix.blocks), matrix.type, storage)
            assert packed is not None
            # Mapped files would double the peak of resident memory.
            matrix.release()
            return packed
        packed = pack_floats(weight, 8, storage)
        self._widened[_type_name(matrix)] += weight.numel()
        self._squared_error += float((packed.unpack(torch.float32) - weight).double().square().sum())
        self._squared_weights += float(weight.double().square().sum())
        return packed

    def pack_latents(self, model: nn.Module) -> None:
        """Give the layers with latent attention their projections in the formats of the file too."""
        for name, module in model.named_modules():
            source = self.sources.get(f"{name}.kv_b_proj.weight")
            projection = getattr(module, "latent_projection", None)
            if projection is not None and isinstance(source, LatentExpansion):
                packed = source.packed(self.reader)
                setattr(module, "latent_projection", replace(projection, packed=packed))  # noqa: B010

    def log_loss(self) -> None:
        """Log the error of matrices in types without an exact format, relative to their size."""
        if self._widened:
            types = ", ".join(f"{count / 1e6:.1f} million weights in {name}" for name, count in self._widened.items())
            loss = self._squared_error / max(self._squared_weights, torch.finfo(torch.float64).tiny)
            log.warning("%s are stored as %s, with a relative squared error of %.1e", types, _WIDER, loss)

    def _matrix(self, name: str) -> FileMatrix | None:
        """The matrix of a layer, or a part of one of an expert; None: the file holds it in another form."""
        source = self.sources.get(self._tied.get(f"{name}.weight", f"{name}.weight"))
        if source is not None:
            return source.matrices[0] if isinstance(source, Matrices) and len(source.matrices) == 1 else None
        stack, _, number = name.rpartition(".")
        source = self.sources.get(stack)
        return source.part(int(number)) if isinstance(source, Matrices) and number.isdecimal() else None

    def _divided(self, name: str, experts: Experts) -> Experts:
        """Experts with gate and up projections in parts if their types differ."""
        source = self.sources.get(f"{name}.{experts.up.parameter}")
        parts = source.parts if isinstance(source, Matrices) else 1
        return replace(experts, up=replace(experts.up, parts=parts))

    def _is_plain(self, name: str) -> bool:
        matrix = self._matrix(name)
        return matrix is not None and matrix.type in PLAIN_TYPES

    def _format(self, name: str, weight: Tensor) -> WeightFormat:
        matrix = self._matrix(name)
        if matrix is None or matrix.type is None or not self._is_exact(matrix, weight):
            return _WIDER
        return EXACT_FORMATS[matrix.type]

    def _has_exact_format(self, planned: PlannedMatrix) -> bool:
        matrix = self._matrix(planned.name)
        return matrix is not None and self._is_exact(matrix, planned.weight)

    def _is_exact(self, matrix: FileMatrix, weight: Tensor) -> bool:
        return matrix.type in EXACT_FORMATS and matrix.shape == tuple(weight.shape)


def _is_deferrable(name: str, source: Matrices) -> bool:
    # The expansion of latent keys is read when its hooks are installed (engine/model/hooks.py).
    is_read_early = name.endswith("kv_b_proj.weight")
    exact = all(tensor.type in EXACT_FORMATS for tensor in source.tensors)
    return not is_read_early and source.decode is None and exact and all(map(_keeps_blocks, source.matrices))


def _keeps_blocks(matrix: FileMatrix) -> bool:
    return matrix.column_order is None or matrix.type is not None


def _type_name(matrix: FileMatrix | None) -> str:
    types = () if matrix is None else dict.fromkeys(rows.tensor.type.name for rows in matrix.ranges)
    return " and ".join(types) or "several types"
