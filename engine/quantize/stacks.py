"""Experts that a model keeps as stacked matrices, found by how transformers' interface of experts describes them.

Whoever stands behind that interface has the same parameters, and the same few facts tell of them; what is done between
the two matrices is the module's own function of rows (transformers.integrations.moe).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

# What the interface notes of each module.
_INTERFACE_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed")


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A parameter of a module that holds a matrix for each of its experts."""

    module: nn.Module
    parameter: str

    @property
    def stored(self) -> Tensor:
        """[experts, outputs, columns] or, where it is `transposed`, [experts, columns, outputs]."""
        stored = getattr(self.module, self.parameter)
        assert isinstance(stored, Tensor)
        return stored

    @property
    def transposed(self) -> bool:
        """Whether rows stand to the left of the matrices."""
        return bool(self.module.is_transposed)

    @property
    def weight(self) -> Tensor:
        """[experts, outputs, columns]"""
        return self.stored.transpose(1, 2) if self.transposed else self.stored

    @property
    def bias(self) -> Tensor | None:
        """[experts, outputs]"""
        bias = getattr(self.module, f"{self.parameter}_bias", None)
        return bias if isinstance(bias, Tensor) else None


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer: rows go through one matrix, a function that needs no weights, and another matrix."""

    module: nn.Module
    up: ExpertStack
    down: ExpertStack

    @property
    def has_norm(self) -> bool:
        """Whether what an expert makes goes through a norm."""
        return bool(self.module.has_post_expert_norm)

    def activate(self, made: Tensor) -> Tensor:
        """Of what inner matrices make of rows [rows, outputs], what enters the others."""
        function = self.module._apply_gate if self.module.has_gate else self.module.act_fn
        activated: Tensor = function(made)  # type: ignore[operator]
        return activated

    def post_norm(self, made: Tensor) -> Tensor:
        """What becomes of what an expert makes, before it is weighted."""
        ended: Tensor = self.module.post_expert_norm(made) if self.has_norm else made  # type: ignore[operator]
        return ended


def experts_of(module: nn.Module) -> Experts | None:
    """A module as experts; None where it is something else, or keeps its matrices in another way."""
    if not all(isinstance(getattr(module, fact, None), bool) for fact in _INTERFACE_FLAGS):
        return None
    inner = ExpertStack(module, "gate_up_proj" if module.has_gate else "up_proj")
    down = ExpertStack(module, "down_proj")
    known = dict(module.named_parameters(recurse=False))
    stored = [known.get(stack.parameter) for stack in (inner, down)]
    stacked = all(one is not None and one.dim() == 3 and one.is_floating_point() for one in stored)
    return Experts(module, inner, down) if stacked else None
