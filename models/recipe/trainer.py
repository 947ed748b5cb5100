"""The training loop: rows in, averaged weights out, resumable at any checkpoint.

Owns the model, its optimizer and its running average while training. What is learned is the objective's affair:
the target learns the dialogues (`target.py`), the draft learns the target (`draft.py`).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from models.recipe.optimizer import Optimizer
from models.recipe.plan import Plan
from models.recipe.rows import Batch, batches

# The training loss of a batch and the number that the curve shows.
Objective: TypeAlias = Callable[[LlamaForCausalLM, Batch], tuple[Tensor, float]]

AVERAGE = 0.995
SAVE_SECONDS = 120.0


@dataclass(slots=True)
class Progress:
    """How far a run is: the next batch by pool and offset, and what was seen so far."""

    step: int = 0
    pool: int = 0
    offset: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[float] = field(default_factory=list)


class Trainer:
    """One run of a plan. The checkpoint holds everything that the next step depends on."""

    def __init__(self, plan: Plan, model: LlamaForCausalLM, tokenizer: Tokenizer, checkpoint: Path) -> None:
        self.plan = plan
        self.model = model
        self.progress = Progress()
        self._tokenizer = tokenizer
        self._checkpoint = checkpoint
        self._optimizer = Optimizer(model, plan)
        self._average = [parameter.detach().clone() for parameter in model.parameters()]
        if checkpoint.exists():
            self._restore()

    def run(self, objective: Objective) -> None:
        """Train to the end of the plan, saving now and then and at the end."""
        source = self._batches()
        saved = started = time.monotonic()
        before = self.progress.seconds
        with tqdm(total=self.plan.steps, initial=self.progress.step, desc=self.plan.name, mininterval=10) as bar:
            while self.progress.step < self.plan.steps:
                self._step(objective, source)
                self.progress.seconds = before + time.monotonic() - started
                bar.update()
                bar.set_postfix(loss=f"{self._recent():.3f}", tokens=f"{self.progress.tokens / 1e6:.1f}M")
                if time.monotonic() - saved > SAVE_SECONDS:
                    self._save()
                    saved = time.monotonic()
        self._save()

    def averaged(self) -> LlamaForCausalLM:
        """The model with the running average as its weights; training ends here."""
        for parameter, average in zip(self.model.parameters(), self._average, strict=True):
            parameter.data.copy_(average)
        return self.model.eval()

    def _step(self, objective: Objective, source: Iterator[Batch]) -> None:
        shown = 0.0
        for _ in range(self.plan.batches):
            batch = next(source)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, number = objective(self.model, batch)
            torch.autograd.backward(loss / self.plan.batches)
            shown += number / self.plan.batches
            self.progress.tokens += int((batch.weights > 0).sum())
        self._optimizer.step(self.progress.step)
        # A short memory at first, or the average would drag the untrained weights along.
        memory = min(AVERAGE, self.progress.step / (self.progress.step + 10))
        torch._foreach_lerp_(self._average, [p.detach() for p in self.model.parameters()], 1 - memory)
        self.progress.step += 1
        self.progress.curve.append(shown)

    def _batches(self) -> Iterator[Batch]:
        """Batches from where the run stands, on and on."""
        while True:
            made = batches(self.plan, self._tokenizer, self.progress.pool)
            for batch in made[self.progress.offset :]:
                self.progress.offset += 1
                yield batch
            self.progress.pool += 1
            self.progress.offset = 0

    def _recent(self) -> float:
        last = self.progress.curve[-50:]
        return sum(last) / len(last)

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self._average,
            "optimizer": self._optimizer.state(),
            "progress": asdict(self.progress),
        }
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._checkpoint)

    def _restore(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._average = state["average"]
        self._optimizer.restore(state["optimizer"])
        self.progress = Progress(**state["progress"])
