"""The table of published checkpoints in docs/models.md is what the loader does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.kit.checkpoint_list import PUBLISHED, Published
from tests.engine.kit.checkpoints import observe

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
QUICK = "Qwen3-0.6B"
SHAPES = {published.shape: published for published in reversed(PUBLISHED)}.values()


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.parametrize(
    "published",
    [pytest.param(each, id=each.name, marks=() if each.name == QUICK else pytest.mark.slow) for each in SHAPES],
)
def test_a_checkpoint_does_what_the_page_says(published: Published) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {published.name} |"))

    assert f"| {' | '.join(observe(published).cells)} |" == row
