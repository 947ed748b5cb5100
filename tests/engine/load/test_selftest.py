"""The check at load refuses wrong logits, also if only late tokens of a prompt are wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ModelUnsupported
from engine.kernels import reference
from engine.kernels.attention_input import AttentionInput
from engine.load.check import selftest
from engine.load.check.selftest import ModelTraits, find_runner
from engine.model import hooks, recurrence
from engine.model.layers import CachedLayer, find_cached_layers
from engine.run.packed import PackedRunner
from engine.run.runner import LocalRunner
from engine.run.sequential import SequentialRunner
from engine.step.input import StepInput
from engine.step.output import StepOutput
from kvcache.spec import AttentionRange
from tests.engine.kit import tiny
from tests.engine.kit.models import VOCABULARY, load_model
from tests.selection import quick

FACTS = ModelTraits(vocabulary=VOCABULARY, recurrent=False, dtype=torch.float64)


def plan_with(change: Callable[[AttentionRange], AttentionRange]) -> Callable[..., tuple[CachedLayer, ...]]:
    """Calibration with a changed attention range of all layers."""

    def plan(model: Any, *, vocabulary: int) -> tuple[CachedLayer, ...]:
        plans = find_cached_layers(model, vocabulary=vocabulary)
        return tuple(
            replace(each, spec=replace(each.spec, attention_range=change(each.spec.attention_range))) for each in plans
        )

    return plan


WRONG = {
    "a cell more": ("mistral", lambda attention_range: AttentionRange("window", attention_range.size + 1)),
    "a cell less": ("mistral", lambda attention_range: AttentionRange("window", attention_range.size - 1)),
    "no window": ("gemma3", lambda attention_range: AttentionRange()),
    "no chunks": ("llama4", lambda attention_range: AttentionRange()),
    "a window for a chunk": ("llama4", lambda attention_range: AttentionRange("window", 8)),
}


@pytest.fixture
def own(folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """A family's tiny model for one test, as the check modifies the model."""
    return lambda family: load_model(folder(family)).model


@pytest.mark.parametrize("wrong", WRONG)
def test_packed_runner_with_a_wrong_mask_is_replaced(
    own: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    """A window that is off by one is detected; the sequential runner serves, with a warning."""
    family, change = WRONG[wrong]
    monkeypatch.setattr(selftest, "find_cached_layers", plan_with(change))

    with caplog.at_level(logging.WARNING):
        runner = find_runner(family, own(family), FACTS)

    assert isinstance(runner, SequentialRunner)
    assert "its logits differ" in caplog.text


def scale_logits(monkeypatch: pytest.MonkeyPatch, kind: type[LocalRunner], factor: float) -> None:
    """A kind of runner whose logits are wrong by a factor."""
    run = kind.run

    def scaled(runner: Any, step: StepInput) -> StepOutput:
        output = run(runner, step)
        return replace(output, logits=factor * output.logits)

    monkeypatch.setattr(kind, "run", scaled)


def test_model_without_a_correct_runner_is_refused(own: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        selftest,
        "find_cached_layers",
        plan_with(lambda attention_range: AttentionRange("window", attention_range.size + 1)),
    )
    scale_logits(monkeypatch, SequentialRunner, 1.1)

    with pytest.raises(
        ModelUnsupported, match=r"its logits differ.*, nor one sequence at a time \(LogitsDiffer: its logits"
    ):
        find_runner("mistral", own("mistral"), FACTS)


@pytest.mark.parametrize("error", [1e-5, 1e-2])
def test_parts_in_float32_are_compared_with_float32_tolerance(
    own: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    """A wrong mask changes far more."""
    scale_logits(monkeypatch, PackedRunner, 1 + error)

    assert isinstance(find_runner("llama", own("llama"), FACTS), PackedRunner if error < 1e-3 else SequentialRunner)


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.parametrize(
    "name",
    quick(
        ("qwen3_next", "kimi_linear"), ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear")
    ),
)
def test_recurrence_in_float32_is_served_in_a_float64_model(name: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **tiny.settings(name))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
        model.set_experts_implementation("eager")
        recurrent = recurrence.install(model)
        hooks.install_latent(model)
        traits = ModelTraits(vocabulary=tiny.VOCABULARY, recurrent=recurrent, dtype=torch.float64)

        assert isinstance(find_runner(name, model, traits), PackedRunner)


def test_wrong_attention_kernel_is_replaced_by_the_reference(
    own: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that attends to at most a dozen cells."""

    def forgetful(inputs: AttentionInput) -> Tensor:
        is_full = inputs.attention_range.kind == "full"
        return reference.attend(replace(inputs, attention_range=AttentionRange("window", 12)) if is_full else inputs)

    with caplog.at_level(logging.WARNING):
        runner = find_runner("gemma3", own("gemma3"), replace(FACTS, attend=forgetful))

    assert isinstance(runner, PackedRunner)
    assert "attends in torch operations" in caplog.text


@pytest.mark.parametrize(("weights", "length"), [(10**6, 2 * 128 + 9), (10**8, 2 * 128 + 9), (10**9, 9)])
def test_self_test_prompt_is_as_long_as_is_affordable(weights: int, length: int) -> None:
    """Twice a window for a small model, a few tokens for a large one."""

    class Model:
        """A model with a size and settings only."""

        class config:
            """A window of 128, and a selection beyond the longest prompt."""

            sliding_window, index_topk, max_position_embeddings = 128, 2048, 4096

            @classmethod
            def get_text_config(cls) -> type:
                """Itself."""
                return cls

        @staticmethod
        def modules() -> list[nn.Module]:
            """No quantised layers."""
            return []

        @staticmethod
        def parameters() -> list[Tensor]:
            """Weights without memory."""
            return [torch.empty(weights, device="meta")]

    assert length == selftest._prompt_length(Model)
