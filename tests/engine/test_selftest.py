"""The check at load refuses what is wrong, also where it is wrong only far into a prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import selftest
from engine.errors import ModelUnsupported
from engine.gathering import GatheringRunner
from engine.kernels import reference
from engine.plan import LayerPlan, plan_layers
from engine.runner import Runner
from engine.selftest import Facts, find_runner
from kvcache.spec import Reach
from tests.engine.models import VOCABULARY, load_model

FACTS = Facts(vocabulary=VOCABULARY, recurrent=False, dtype=torch.float64)


def plan_with(change: Callable[[Reach], Reach]) -> Callable[..., tuple[LayerPlan, ...]]:
    """The plan of a model whose layers see something else than they should."""

    def plan(model: Any, *, vocabulary: int) -> tuple[LayerPlan, ...]:
        plans = plan_layers(model, vocabulary=vocabulary)
        return tuple(replace(each, spec=replace(each.spec, reach=change(each.spec.reach))) for each in plans)

    return plan


WRONG = {
    "a cell more": ("mistral", lambda reach: Reach("window", reach.size + 1)),
    "a cell less": ("mistral", lambda reach: Reach("window", reach.size - 1)),
    "no window": ("gemma3", lambda reach: Reach()),
    "no chunks": ("llama4", lambda reach: Reach()),
    "a window for a chunk": ("llama4", lambda reach: Reach("window", 8)),
}


@pytest.fixture
def own(folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """A family's tiny model for one test: the check leaves a model as it is to be run, right or wrong."""
    return lambda family: load_model(folder(family)).model


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mask_is_not_served(
    own: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    """A window that is off by one is seen, though it is far longer than a few tokens; the right way is taken, aloud."""
    family, change = WRONG[wrong]
    monkeypatch.setattr(selftest, "plan_layers", plan_with(change))

    with caplog.at_level(logging.WARNING):
        runner = find_runner(family, own(family), FACTS)

    assert isinstance(runner, GatheringRunner)
    assert "its logits differ" in caplog.text


def test_a_wrong_mask_without_another_way_is_refused(
    own: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no way is right the model is refused, with what differs."""
    monkeypatch.setattr(selftest, "plan_layers", plan_with(lambda reach: Reach("window", reach.size + 1)))
    run = GatheringRunner.run
    monkeypatch.setattr(GatheringRunner, "run", lambda *args: 1.1 * run(*args))

    with pytest.raises(ModelUnsupported, match="its logits differ"):
        find_runner("mistral", own("mistral"), FACTS)


def test_a_wrong_kernel_is_not_used(own: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that sees no more than a dozen cells gives way to the one that does not."""

    def forgetful(query: Tensor, keys: Any, values: Any, segments: Any, reach: Reach, **others: Any) -> Tensor:
        shorter = Reach("window", 12) if reach.kind == "full" else reach
        return reference.attend(query, keys, values, segments, shorter, **others)

    with caplog.at_level(logging.WARNING):
        runner = find_runner("gemma3", own("gemma3"), replace(FACTS, attend=forgetful))

    assert isinstance(runner, Runner)
    assert "attends in torch operations" in caplog.text


@pytest.mark.parametrize(("weights", "length"), [(10**6, 2 * 128 + 9), (10**8, 2 * 128 + 9), (10**9, 9)])
def test_the_prompt_is_as_long_as_is_cheap(weights: int, length: int) -> None:
    """Twice a window where the model is small, a few tokens where it is large."""

    class Model:
        """A model by its size and its settings alone."""

        class config:
            """A window of 128, and a selection that is too long for any check."""

            sliding_window, index_topk, max_position_embeddings = 128, 2048, 4096

            @classmethod
            def get_text_config(cls) -> type:
                """Itself."""
                return cls

        @staticmethod
        def parameters() -> list[Tensor]:
            """Weights that take no memory."""
            return [torch.empty(weights, device="meta")]

    assert length == selftest._length(Model)
