"""Outlier columns, as trained models have them, change no decision of the plan in any type."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from tests.engine.native.families import NATIVE
from tests.engine.outliers import native_reason, planned
from tests.engine.tiny import FAMILIES

# Each layout, partial rotation, latent attention, norms of keys, learned positions; the others are slow by number.
ALWAYS = ("cohere", "deepseek_v3", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama", "qwen3")
# They run one sequence at a time: their attention takes what packed rows do not have.
UNPLANNED = ("axk2", "biogpt", "deepseek_v32", "doge", "glm_moe_dsa", "hy_v4", "mpt", "opt", "xglm")
# By which factor errors may grow or shrink before a rotation is another one.
LEAST_MARGIN = 4.0


def families(names: Collection[str]) -> list[object]:
    """Families, most of them marked slow."""
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in sorted(names)]


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", families(set(FAMILIES) - set(UNPLANNED)))
def test_outliers_change_no_plan(name: str) -> None:
    """The plan is that of the model without outliers in float32, and by far."""
    expected, _ = planned(name, torch.float32, outliers=False)

    for dtype in (torch.float32, torch.bfloat16):
        found, margins = planned(name, dtype)
        assert expected == found
        assert all(margin.factor > LEAST_MARGIN for margin in margins)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", families(NATIVE))
def test_outliers_change_no_shape(name: str) -> None:
    """The families that run natively do so with outliers in bfloat16."""
    assert native_reason(name) is None
