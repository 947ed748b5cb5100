"""`cellar verify`: every condition occurs on a tiny model, and a planted defect is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from engine.config import EngineConfig
from engine.load.load import LoadedModel
from engine.step.input import StepInput
from engine.step.output import StepOutput, sampled_output
from engine.types.events import Logprob, TokenLogprob
from engine.verify.comparison import Answer, compare
from engine.verify.verify import Verification, VerifyReport
from tests.engine.kit.models import Models
from tests.selection import quick

pytestmark = pytest.mark.usefixtures("one_thread")


class NoisyRunner:
    """Adds noise to the logits of the last row of every batch of several sequences."""

    def __init__(self, runner: Any, noise: float) -> None:
        self._runner, self._noise = runner, noise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, step: StepInput) -> StepOutput:
        output = self._runner.run(replace(step, sampling=None))
        if len(step.forward.spans) > 1:
            # Logits of torch modules are inference tensors.
            output = replace(output, logits=output.logits.clone())
            output.logits[-1, ::2] += self._noise
        return sampled_output(step, self._runner.sampler, output.logits, output.hidden_states)


def verified(loaded: LoadedModel, **settings: Any) -> VerifyReport:
    config = EngineConfig(model=loaded.info.folder, context=loaded.info.context, chunk=11, **settings)
    return Verification(config, loaded, None).run()


def failed_conditions(report: VerifyReport) -> set[str]:
    return {condition.name for condition in report.conditions if not condition.passed}


def test_every_condition_occurs(loaded: Models, tmp_path: Path) -> None:
    report = verified(loaded("llama"), disk_cache=str(tmp_path), drafter="lookup")

    assert report.passed, report
    assert len(report.conditions) == 9
    assert [] == [condition.name for condition in report.conditions if not condition.exercised]


@pytest.mark.parametrize(("dtype", "noise"), quick([("float32", 1e-4)], [("float32", 1e-4), ("float64", 1.0)]))
def test_noise_in_a_row_of_a_batch_is_detected(loaded: Models, dtype: str, noise: float) -> None:
    """Too small to change a token, it shows where log-probabilities are compared."""
    target = loaded("llama", dtype)
    noisy = replace(
        target,
        runner=cast("Any", NoisyRunner(target.runner, noise)),
        info=replace(target.info, batch_invariant=dtype == "float32"),
    )

    failed = failed_conditions(verified(noisy))

    assert {"batch", "batch in small chunks"} <= failed
    # Requests alone are unaffected.
    assert failed.isdisjoint({"cached prompt", "cached part of a prompt"})


def answer(*entries: tuple[int, float, int, float]) -> Answer:
    """Of (token, log-probability, another token, its log-probability)."""

    def logprob(token: int, value: float) -> Logprob:
        return Logprob(token, "", b"", value)

    logprobs = [TokenLogprob(logprob(a, x), (logprob(b, y),)) for a, x, b, y in entries]
    return Answer([entry[0] for entry in entries], logprobs)


@pytest.mark.parametrize(
    ("actual", "bitwise", "verdict"),
    [
        (answer((1, -0.5, 2, -0.5001)), True, "equal"),
        (answer((2, -0.5, 1, -0.5001)), False, "tie"),
        (answer((2, -0.5, 1, -0.5001)), True, "different"),
        (answer((2, -0.1, 1, -2.0)), False, "different"),
        (answer((1, -0.50001, 2, -0.5001)), True, "different"),
        (answer((1, -0.50001, 2, -0.5001)), False, "equal"),
        (Answer(), False, "different"),
        (Answer(failure="the step failed"), False, "failed"),
    ],
)
def test_verdicts(actual: Answer, bitwise: bool, verdict: str) -> None:
    expected = answer((1, -0.5, 2, -0.5001))
    comparison = compare("request", expected, actual, bitwise=bitwise, rounding_limit=1e-3)

    assert verdict == comparison.verdict
    if comparison.difference is not None:
        assert comparison.difference.gap == pytest.approx(1e-4)
