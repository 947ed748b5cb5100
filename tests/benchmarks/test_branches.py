"""benchmarks/branches.py: choice and evaluation of trees, on given ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.branches import END, Costs, RankedTexts, grown, ranked, tokens_a_step

# Two texts: four of six positions have rank 0.
RANKS = np.array([0, 1, 0, END, 0, 0, 2, END])


def test_a_rank_counts_the_tokens_with_higher_scores() -> None:
    """The best token has rank 0."""
    scores = torch.tensor([[0.1, 0.3, 0.2], [3.0, 2.0, 1.0]])

    assert [1, 0] == ranked(scores, torch.tensor([2, 0])).tolist()


def test_the_likeliest_paths_are_grown_within_the_limits() -> None:
    """A path counts within one text, and comes after its prefixes."""
    assert [(0,), (0, 0)] == grown(RANKS, 2, 2, 1)
    assert [(0,), (1,)] == grown(RANKS, 2, 1, 2)
    assert {(0,), (0, 0), (0, 1), (1,), (1, 0)} == set(grown(RANKS, 8, 2, 2)) - {(0, 0, 0)} - {(1, 1)}


def test_a_step_emits_the_longest_matching_path_and_a_token() -> None:
    """First text: 2 and 1, or all 3 with (0, 1); second text: 3. The end of a text ends a step."""
    assert 1.0 == tokens_a_step(RANKS, [])
    assert 6 / 4 == tokens_a_step(RANKS, [(0,)])
    assert 6 / 3 == tokens_a_step(RANKS, [(0,), (0, 0)])
    assert 6 / 2 == tokens_a_step(RANKS, [(0,), (0, 0), (0, 1)])


def test_rates_count_positions_with_rejected_better_tokens() -> None:
    """The second token counts where the first is rejected."""
    assert [4 / 6, 1 / 2, 1.0] == RankedTexts("", [RANKS[:3], RANKS[4:7]]).rates(3)


def test_costs_sum_tokens_branches_and_levels() -> None:
    """Three draft tokens, one of them a branch, from two levels with one token each."""
    costs = Costs({1: 1.0, 5: 2.0}, branch=0.1, level=0.5)

    assert 1.0 == costs.seconds([])
    assert pytest.approx(1.75 + 0.1 + 2 * 0.5) == costs.seconds([(0,), (1,), (0, 0)])
