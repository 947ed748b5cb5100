"""Rows of tokens: conversations encoded, weighed and put into batches of nearly equal length.

One conversation is one row. Packing several into a row lets them see each other, which costs a small model
more than the padding does. A pool is a few hundred rows, made from its number alone, so that a run resumes
by remembering two integers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.recipe.conversation import Conversation, render
from models.recipe.dialogues.topics import converse, converse_at_length
from models.recipe.plan import LONGEST_ROW, VOCABULARY, Plan

POOL = 1500
LONG_ROWS = 30
# What is read counts a little, as a lesson in language; what is spoken counts in full.
READ, SPOKEN = 0.1, 1.0
SEPARATOR, END = 1, 2
FIRST_WORD = 300


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and the weight of each as something to predict."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded at the end: `ids` [B, L], `weights` [B, L] with 0 on the padding."""

    ids: Tensor
    weights: Tensor


def batches(plan: Plan, tokenizer: Tokenizer, pool: int) -> list[Batch]:
    """All batches of one pool, in an order of its own."""
    random = Random(plan.seed * 100_003 + pool)
    share = plan.copied_first if pool < plan.induction_pools else plan.copied
    copied = int(POOL * share)
    drawn = [converse(random) for _ in range(POOL - copied)]
    if pool >= plan.long_pools:
        drawn += [converse_at_length(random) for _ in range(LONG_ROWS)]
    rows = encode(tokenizer, drawn) + [random.choice((induction, periodic))(random) for _ in range(copied)]
    made = [_pad(group) for group in _groups(sorted(rows, key=lambda row: len(row.ids)), plan.batch_tokens)]
    random.shuffle(made)
    return made


def encode(tokenizer: Tokenizer, conversations: list[Conversation]) -> list[Row]:
    """Rows of conversations, cut at the longest length."""
    segments = [list(render(conversation)) for conversation in conversations]
    texts = [segment.text for group in segments for segment in group]
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    rows = []
    for group in segments:
        row = Row([], [])
        for segment in group:
            ids = next(encoded).ids
            row.ids.extend(ids)
            row.weights.extend([SPOKEN if segment.spoken else READ] * len(ids))
        rows.append(Row(row.ids[:LONGEST_ROW], row.weights[:LONGEST_ROW]))
    return rows


def induction(random: Random) -> Row:
    """Random tokens said twice: nothing but copying predicts the second time."""
    before = [random.randrange(FIRST_WORD, VOCABULARY) for _ in range(random.randint(0, 12))]
    said = [random.randrange(FIRST_WORD, VOCABULARY) for _ in range(random.randint(3, random.choice((8, 24))))]
    ids = [*before, *said, SEPARATOR, *said, END]
    return Row(ids, [0.0] * (len(ids) - len(said) - 1) + [SPOKEN] * (len(said) + 1))


def periodic(random: Random) -> Row:
    """A few random tokens over and over: the easiest text in which looking back pays, so it is learned first."""
    before = [random.randrange(FIRST_WORD, VOCABULARY) for _ in range(random.randint(0, 6))]
    said = [random.randrange(FIRST_WORD, VOCABULARY) for _ in range(random.randint(2, random.choice((4, 8, 16))))]
    told = random.randint(24, 56)
    ids = before + [said[at % len(said)] for at in range(told)]
    known = len(before) + len(said)
    return Row(ids, [0.0] * known + [SPOKEN] * (len(ids) - known))


def _groups(rows: list[Row], tokens: int) -> Iterator[list[Row]]:
    """Runs of rows, shortest first, whose padded size is at most `tokens`."""
    group: list[Row] = []
    for row in rows:
        if group and (len(group) + 1) * len(row.ids) > tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _pad(rows: list[Row]) -> Batch:
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    weights = torch.zeros(len(rows), longest)
    for at, row in enumerate(rows):
        ids[at, : len(row.ids)] = torch.tensor(row.ids)
        weights[at, : len(row.ids)] = torch.tensor(row.weights)
    return Batch(ids, weights)
