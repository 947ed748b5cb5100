"""Outlier columns, as in trained models, change no decision of the plan."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from tests.engine.kit.outliers import native_reason, planned
from tests.engine.kit.tiny import FAMILIES
from tests.engine.native.families import NATIVE

# Each layout, partial rotation, latent attention, norms of keys, learned positions; the others are slow by number.
ALWAYS = ("cohere", "deepseek_v3", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama", "qwen3")
# Run one sequence at a time: their attention needs inputs that a packed batch does not have.
UNPLANNED = ("axk2", "biogpt", "deepseek_v32", "doge", "glm_moe_dsa", "hy_v4", "mpt", "opt", "xglm")
# The factor by which errors may change before another rotation is chosen.
LEAST_MARGIN = 4.0


def families(names: Collection[str]) -> list[object]:
    """The families; most are marked slow."""
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in sorted(names)]


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", families(set(FAMILIES) - set(UNPLANNED)))
def test_outliers_do_not_change_the_plan(name: str) -> None:
    """It equals the plan without outliers in float32, with a wide margin."""
    expected, _ = planned(name, torch.float32, outliers=False)

    for dtype in (torch.float32, torch.bfloat16):
        found, margins = planned(name, dtype)
        assert expected == found
        assert all(margin.factor > LEAST_MARGIN for margin in margins)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", families(NATIVE))
def test_outliers_run_natively(name: str) -> None:
    """Families that run natively do so with outliers in bfloat16."""
    assert native_reason(name) is None
