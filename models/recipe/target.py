"""The target's run: predict the dialogues, the spoken part in full and the rest a little."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from models.recipe import tokenizer
from models.recipe.network import build, chosen, logits
from models.recipe.plan import Plan
from models.recipe.rows import READ, SPOKEN, Batch
from models.recipe.trainer import Trainer


def prepare(plan: Plan, work: Path) -> Trainer:
    """The run, new or as its checkpoint left it."""
    words = tokenizer.load(work / "tokenizer").backend_tokenizer
    return Trainer(plan, build(plan.shape, plan.seed), words, work / "target.pt")


def objective(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, float]:
    """The weighted cross entropy, and the plain one of the spoken tokens for the curve."""
    chosen_positions = chosen(batch, READ)
    wanted = batch.ids[:, 1:][chosen_positions]
    weights = batch.weights[:, 1:][chosen_positions]
    losses = cross_entropy(logits(model, batch, READ).float(), wanted, reduction="none")
    spoken = losses.detach()[weights == SPOKEN]
    return (losses * weights).sum() / weights.sum(), float(torch.mean(spoken))
