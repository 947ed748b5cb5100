"""The draft's run: a small model learns the target's distribution over what the assistant says."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import LlamaForCausalLM

from models.recipe import tokenizer
from models.recipe.network import build, logits
from models.recipe.plan import Plan
from models.recipe.rows import SPOKEN, Batch
from models.recipe.trainer import Objective, Trainer

EMBEDDING_SCALE = 0.05


def prepare(plan: Plan, target: LlamaForCausalLM, work: Path) -> Trainer:
    """The run, new or as its checkpoint left it; a new draft starts from the target's word space."""
    model = build(plan.shape, plan.seed)
    _project(target, model)
    words = tokenizer.load(work / "tokenizer").backend_tokenizer
    return Trainer(plan, model, words, work / "draft.pt")


def distil(target: LlamaForCausalLM) -> Objective:
    """The divergence from the target at every spoken token, and how often both like another token best."""

    def objective(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, float]:
        with torch.no_grad():
            taught = logits(target, batch, SPOKEN).float()
        learnt = logits(model, batch, SPOKEN).float()
        loss = kl_div(learnt.log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="batchmean")
        differing = learnt.detach().argmax(-1) != taught.argmax(-1)
        return loss, float(differing.float().mean())

    return objective


def _project(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """Give the draft the main directions of the target's embedding, so that like words start alike."""
    words = target.model.embed_tokens.weight.detach().float()
    centred = words - words.mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh[: draft.config.hidden_size]
    placed = centred @ directions.T
    draft.model.embed_tokens.weight.data.copy_(placed * (EMBEDDING_SCALE / placed.std()))
