"""Chooses the layers to quantise, by their type and size and by observing runs of the model.

While a survey is open, every linear layer has a wrapper that records its calls, its inputs and direct reads of its
weight, during the forwards of the self-test. Experts are quantised if they are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.quantize.stacks import Experts, experts_of

# The smallest layers with at most this share of all weights together are not quantised: gates, routers, step sizes of
# recurrences. Their speed and memory are negligible.
_SMALL_LAYERS_SHARE = 0.01
# Configuration fields with the number of experts of a router.
_EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer of a model, by the first of its names."""

    name: str
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """[outputs, columns]"""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.T if isinstance(self.module, Conv1D) else weight

    @property
    def bias(self) -> Tensor | None:
        """[outputs]"""
        bias = self.module.bias
        return bias if isinstance(bias, Tensor) else None


@dataclass(frozen=True, slots=True)
class QuantizationPlanNames:
    """The plan by names of layers, for files; see QuantizationPlan."""

    groups: tuple[tuple[str, ...], ...]
    skipped: Mapping[str, int]
    experts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """The layers to quantise, in groups that share their input.

    skipped  number of layers that are not quantised, by reason
    experts  to quantise, by the first name of their module
    """

    groups: tuple[tuple[LinearLayer, ...], ...]
    skipped: Counter[str]
    experts: Mapping[str, Experts] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[LinearLayer, ...]:
        """All linear layers to quantise."""
        return tuple(layer for group in self.groups for layer in group)

    @property
    def names(self) -> QuantizationPlanNames:
        """The plan for another process with the same model."""
        groups = tuple(tuple(layer.name for layer in group) for group in self.groups)
        return QuantizationPlanNames(groups, dict(self.skipped), tuple(self.experts))

    @property
    def weights(self) -> int:
        """Number of weights to quantise."""
        stacks = (stack.stored for experts in self.experts.values() for stack in (experts.up, experts.down))
        return sum(weight.numel() for weight in (*stacks, *(layer.weight for layer in self.layers)))


def plan_from_names(model: nn.Module, names: QuantizationPlanNames) -> QuantizationPlan | None:
    """The plan with these names; None unless the model has all of them."""
    modules = dict(model.named_modules())
    experts = {name: experts_of(modules[name]) for name in names.experts if name in modules}
    supported = {name: stacks for name, stacks in experts.items() if stacks is not None}
    names_to_quantize = {name for group in names.groups for name in group}
    linear = {name for name in names_to_quantize if type(modules.get(name)) in (nn.Linear, Conv1D)}
    if linear != names_to_quantize or len(supported) != len(names.experts):
        return None
    groups = tuple(tuple(LinearLayer(name, modules[name]) for name in group) for group in names.groups)
    return QuantizationPlan(groups, Counter(names.skipped), supported)


class LayerSurvey:
    """Observes the linear layers and experts of a model until `close` removes the wrappers."""

    def __init__(self, model: nn.Module, *, skipped: Container[nn.Module] = ()) -> None:
        """`skipped` modules are not observed, and keep their dtype."""
        self._model, self._calls = model, _CallLog()
        modules = {name: module for name, module in model.named_modules() if module not in skipped}
        layers = {name: module for name, module in modules.items() if type(module) in (nn.Linear, Conv1D)}
        self._observed = [_ObservedLinear(LinearLayer(name, module), self._calls) for name, module in layers.items()]
        replace_modules(model, {observed.layer.module: observed for observed in self._observed})
        self._experts = {name: experts for name, module in modules.items() if (experts := experts_of(module))}
        self._called_experts = set[nn.Module]()
        self._hook_handles = [
            experts.module.register_forward_hook(self._record_experts) for experts in self._experts.values()
        ]

    def close(self) -> QuantizationPlan:
        """Remove the wrappers; the layers to quantise."""
        replace_modules(self._model, {observed: observed.layer.module for observed in self._observed})
        self._calls.end_group()
        for handle in self._hook_handles:
            handle.remove()
        skipped: Counter[str] = Counter()
        routed, small = _router_widths(self._model), _small_layers([observed.layer for observed in self._observed])
        selected: dict[nn.Module, LinearLayer] = {}
        for observed in self._observed:
            reason = _skip_reason(observed, routed, small)
            if reason is None:
                selected[observed] = observed.layer
            else:
                skipped[reason] += 1
        experts = {name: survey for name, survey in self._experts.items() if survey.module in self._called_experts}
        return QuantizationPlan(tuple(self._groups(selected)), skipped, experts)

    def _record_experts(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """A forward hook of experts."""
        self._called_experts.add(module)

    def _groups(self, selected: dict[nn.Module, LinearLayer]) -> Iterator[tuple[LinearLayer, ...]]:
        """Groups of layers that always share their input, and single layers; in the order of the model."""
        siblings = self._calls.siblings()
        done: set[nn.Module] = set()
        for observed in selected:
            if observed not in done:
                members = [layer for layer in siblings.get(observed, (observed,)) if layer in selected]
                done.update(members)
                yield tuple(selected[layer] for layer in members)


class _CallLog:
    """Records which layers are called consecutively with the same input."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._input_copy: Tensor | None = None
        self._same_input: list[_ObservedLinear] = []
        self._groups: dict[nn.Module, set[tuple[_ObservedLinear, ...]]] = {}

    def record(self, observed: _ObservedLinear, rows: Tensor) -> None:
        """Record a call."""
        same = rows is self._input and self._input_copy is not None and _is_unchanged(rows, self._input_copy)
        if not same or observed in self._same_input:
            self.end_group()
            self._input, self._input_copy = rows, rows.clone()
        self._same_input.append(observed)

    def end_group(self) -> None:
        """End the current group of calls."""
        for observed in self._same_input:
            self._groups.setdefault(observed, set()).add(tuple(self._same_input))
        self._input, self._input_copy, self._same_input = None, None, []

    def siblings(self) -> dict[nn.Module, tuple[_ObservedLinear, ...]]:
        """By layer, the group of layers that share every input with it."""
        single_groups = {observed: next(iter(seen)) for observed, seen in self._groups.items() if len(seen) == 1}
        return {
            observed: group
            for observed, group in single_groups.items()
            if all(layer in single_groups for layer in group)
        }


class _ObservedLinear(nn.Module):
    """A wrapper of a linear layer that records its calls and reads of its weight."""

    def __init__(self, layer: LinearLayer, calls: _CallLog) -> None:
        super().__init__()
        self.inner = layer.module
        self.layer, self._calls = layer, calls
        self.is_called, self.is_read = False, False

    @property
    def weight(self) -> Tensor:
        """The layer's weight for readers other than the layer; its use in a computation is recorded."""
        weight: _ObservedWeight = self.inner.weight.as_subclass(_ObservedWeight)  # type: ignore[operator]
        weight.observed = self
        return weight

    @property
    def bias(self) -> Tensor | None:
        """As `weight`; any read is recorded."""
        self.is_read = True
        return self.inner.bias  # type: ignore[return-value]

    def forward(self, rows: Tensor) -> Tensor:
        """The output of the layer."""
        self.is_called = True
        self._calls.record(self, rows)
        product: Tensor = self.inner(rows)
        return product


class _ObservedWeight(Tensor):
    """A weight that records its use in computations; reading its dtype or device is no use."""

    observed: _ObservedLinear

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (Tensor.dtype.__get__, Tensor.device.__get__):  # type: ignore[attr-defined]
            for argument in args:
                if isinstance(argument, _ObservedWeight):
                    argument.observed.is_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def replace_modules(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Replace modules wherever the model references them."""
    new = set(replacements.values())
    for parent in list(model.modules()):
        if parent in new:
            continue
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]


def _is_unchanged(rows: Tensor, copy: Tensor) -> bool:
    """Whether an input has not been changed in place since the copy; NaN is never equal, meta tensors always are."""
    return rows.is_meta or torch.equal(rows, copy)


def _skip_reason(observed: _ObservedLinear, routed: set[int], small: set[nn.Module]) -> str | None:
    """Why a layer is not quantised; None: it is."""
    if observed.is_read:
        return "the model reads their weights directly"
    if not observed.is_called:
        return "not called"
    if observed.layer.module in small or observed.layer.weight.shape[0] in routed:
        return "small, or routers"
    return None


def _router_widths(model: nn.Module) -> set[int]:
    """Output widths of routers."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    return {count for name in _EXPERT_COUNT_FIELDS if isinstance(count := getattr(text, name, None), int)}


def _small_layers(layers: list[LinearLayer]) -> set[nn.Module]:
    """The smallest layers, by shape, that hold at most a small share of all weights."""
    shapes = Counter(layer.weight.shape for layer in layers)
    budget = _SMALL_LAYERS_SHARE * sum(shape.numel() * count for shape, count in shapes.items())
    small: set[torch.Size] = set()
    for shape, count in sorted(shapes.items(), key=lambda pair: pair[0].numel()):
        budget -= shape.numel() * count
        if budget < 0:
            break
        small.add(shape)
    return {layer.module for layer in layers if layer.weight.shape in small}
