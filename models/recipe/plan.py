"""The sizes and budgets of both models. Budgets are steps, so that a run depends on nothing but the seed."""

from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent
VOCABULARY = 2048
POSITIONS = 4096
LONGEST_ROW = 1536


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a Llama model with tied embeddings."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One training run.

    steps             optimizer steps
    batches           batches a step; each is of one length, so several make a step see several kinds of rows
    batch_tokens      tokens a batch, padding included
    rate              peak learning rate of both optimizers
    warmup            steps of rising rate
    decay             share of the steps, at the end, in which the rate falls to zero
    copied            share of rows that are random tokens to copy; `copied_first` in the first `induction_pools`
    long_pools        pools before the first long rows
    """

    name: str
    shape: Shape
    seed: int
    steps: int
    rate: float
    batches: int = 2
    batch_tokens: int = 2048
    warmup: int = 60
    decay: float = 0.25
    copied: float = 0.0
    copied_first: float = 0.0
    induction_pools: int = 0
    long_pools: int = 0

    @property
    def folder(self) -> Path:
        """Where the finished model lies in the repository."""
        return MODELS / self.name


TARGET = Plan(
    name="target",
    shape=Shape(hidden=256, inner=512, layers=4, heads=4, key_heads=2),
    seed=20261121,
    steps=4000,
    rate=2.5e-3,
    batch_tokens=1536,
    decay=0.35,
    copied=0.05,
    copied_first=0.25,
    induction_pools=14,
    long_pools=16,
)
DRAFT = Plan(
    name="draft",
    shape=Shape(hidden=96, inner=256, layers=2, heads=3, key_heads=1),
    seed=20261122,
    steps=900,
    rate=4e-3,
    decay=0.4,
)
