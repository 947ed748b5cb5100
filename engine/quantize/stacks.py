"""Experts with stacked weight matrices, found by the attributes of transformers' experts interface.

Modules of the interface (transformers.integrations.moe) have the same parameters and flags; the function between the
two matrices is the module's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

# Flags that the interface sets on each module.
_INTERFACE_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed")


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A parameter of a module with one matrix for each expert.

    parts  of equal height that each matrix is divided into, because their weights have different formats
    """

    module: nn.Module
    parameter: str
    parts: int = 1

    @property
    def stored(self) -> Tensor:
        """[experts, outputs, columns] or, if `transposed`, [experts, columns, outputs]."""
        stored = getattr(self.module, self.parameter)
        assert isinstance(stored, Tensor)
        return stored

    @property
    def transposed(self) -> bool:
        """Whether the module multiplies rows from the left."""
        return bool(getattr(self.module, "is_transposed", True))

    @property
    def weight(self) -> Tensor:
        """[experts, outputs, columns]"""
        return self.stored.transpose(1, 2) if self.transposed else self.stored

    @property
    def matrices(self) -> list[Tensor]:
        """All matrices [outputs, columns], the parts of an expert one after the other."""
        return [part for matrix in self.weight for part in matrix.chunk(self.parts)]

    @property
    def bias(self) -> Tensor | None:
        """[experts, outputs]"""
        bias = getattr(self.module, f"{self.parameter}_bias", None)
        return bias if isinstance(bias, Tensor) else None


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer: an up projection (with the gate, if any), an activation and a down projection."""

    module: nn.Module
    up: ExpertStack
    down: ExpertStack

    @property
    def has_norm(self) -> bool:
        """Whether the output of each expert is normalised."""
        return bool(self.module.has_post_expert_norm)

    def activate(self, outputs: Tensor) -> Tensor:
        """The input [rows, columns] of the down projection from the output [rows, outputs] of the up projection."""
        function = self.module._apply_gate if self.module.has_gate else self.module.act_fn
        activated: Tensor = function(outputs)  # type: ignore[operator]
        return activated

    def post_norm(self, outputs: Tensor) -> Tensor:
        """The normalised output of the down projection, before the router's weights are applied."""
        normed: Tensor = self.module.post_expert_norm(outputs) if self.has_norm else outputs  # type: ignore[operator]
        return normed


def experts_of(module: nn.Module) -> Experts | None:
    """The module as Experts; None if it is not one, or does not store its matrices as stacks."""
    if not all(isinstance(getattr(module, fact, None), bool) for fact in _INTERFACE_FLAGS):
        return None
    inner = ExpertStack(module, "gate_up_proj" if module.has_gate else "up_proj")
    down = ExpertStack(module, "down_proj")
    parameters = dict(module.named_parameters(recurse=False))
    stored = [parameters.get(stack.parameter) for stack in (inner, down)]
    stacked = all(
        parameter is not None and parameter.dim() == 3 and parameter.is_floating_point() for parameter in stored
    )
    return Experts(module, inner, down) if stacked else None


class ScaledExperts(Experts):
    """Experts of a module that is not of the interface: it is called with the rows of all experts one after the other.

    Matrices multiply rows from the left. They are not quantised.
    """

    @property
    def has_norm(self) -> bool:
        """False."""
        return False

    def activate(self, outputs: Tensor) -> Tensor:
        """See Experts."""
        gates, ups = outputs.chunk(2, -1)
        activated: Tensor = ups * self.module.act_fn(gates)  # type: ignore[operator]
        return activated


def scaled_experts_of(module: nn.Module) -> ScaledExperts | None:
    """The module as ScaledExperts (Llama 4); None if it has other parameters."""
    parameters = dict(module.named_parameters(recurse=False))
    stacked = parameters.keys() == {"gate_up_proj", "down_proj"} and all(
        parameter.dim() == 3 and parameter.is_floating_point() for parameter in parameters.values()
    )
    if not stacked or hasattr(module, "is_transposed") or not callable(getattr(module, "act_fn", None)):
        return None
    return ScaledExperts(module, ExpertStack(module, "gate_up_proj"), ExpertStack(module, "down_proj"))
