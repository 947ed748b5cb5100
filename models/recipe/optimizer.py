"""The optimizers: Muon turns the matrices, AdamW the embedding and the norms, one rate drives both."""

from collections.abc import Mapping

import torch
from transformers import LlamaForCausalLM

from models.recipe.plan import Plan

FINAL_SHARE = 0.01
# Weaker decay lets queries and keys grow until attention is all or nothing and no head learns to copy any more.
DECAY = 0.1


class Optimizer:
    """Both optimizers stepped as one, at the rate that the plan sets for the step."""

    def __init__(self, model: LlamaForCausalLM, plan: Plan) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        # With this adjustment Muon's updates are as large as AdamW's, so that one rate fits both
        # (Liu et al., arXiv 2502.16982).
        muon = torch.optim.Muon(
            matrices, lr=1.0, momentum=0.95, weight_decay=DECAY, ns_steps=4, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self._parts: tuple[torch.optim.Optimizer, ...] = (muon, adam)
        self._parameters = list(model.parameters())
        self._plan = plan

    def step(self, number: int) -> None:
        """Apply the gradients at step `number` and clear them."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        rate = self._plan.rate * share(self._plan, number)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad()

    def state(self) -> list[dict[str, object]]:
        """What a resumed run needs."""
        return [part.state_dict() for part in self._parts]

    def restore(self, state: list[Mapping[str, object]]) -> None:
        """Take up what `state` gave."""
        for part, saved in zip(self._parts, state, strict=True):
            part.load_state_dict(dict(saved))


def share(plan: Plan, step: int) -> float:
    """The share of the peak rate at a step: up, flat, down."""
    rising = min(1.0, (step + 1) / plan.warmup)
    left = (plan.steps - step) / (plan.steps * plan.decay)
    return rising * max(FINAL_SHARE, min(1.0, left))
