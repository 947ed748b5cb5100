"""lm-evaluation-harness: its log-likelihoods over the HTTP API equal its own ones with transformers."""

from __future__ import annotations

from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from subject import Server

# Per token the same model in the same number format differs in the last bits of its sums.
CLOSE = 1e-4
PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a city with many people in it."),
    ("Cellar is", " an inference server"),
    ("One, two, three,", " four, five, six"),
    ("", "Hello there, how are you?"),
    ("Question: is water wet?\nAnswer:", " yes"),
    ("Question: is water wet?\nAnswer:", " no"),
    ("a" * 300, " b"),
]


@pytest.fixture(scope="module")
def ours(server: Server) -> Any:
    import os

    os.environ["OPENAI_API_KEY"] = server.key
    return LocalCompletionsAPI(
        model=server.model,
        base_url=f"{server.url}/v1/completions",
        tokenizer=server.folder,
        tokenizer_backend="huggingface",
        max_length=1024,
        num_concurrent=1,
        batch_size=4,
        max_retries=1,
    )


@pytest.fixture(scope="module")
def theirs(server: Server) -> Any:
    return HFLM(pretrained=server.folder, dtype="float32", device="cpu", batch_size=1, max_length=1024)


def _ask(model: Any, kind: str, arguments: list[tuple[Any, ...]]) -> Any:
    instances = [Instance(kind, {}, each, at) for at, each in enumerate(arguments)]  # type: ignore[arg-type]
    return getattr(model, kind)(instances, disable_tqdm=True)


def test_loglikelihood(ours: Any, theirs: Any) -> None:
    """Of continuations, and whether they are what greedy decoding says."""
    here, there = (_ask(model, "loglikelihood", PAIRS) for model in (ours, theirs))

    assert [greedy for _, greedy in there] == [greedy for _, greedy in here]
    assert [pytest.approx(value, abs=CLOSE) for value, _ in there] == [value for value, _ in here]


def test_loglikelihood_again(ours: Any, theirs: Any) -> None:
    """A second run finds the prompts remembered, and says the same to the last bit."""
    assert _ask(ours, "loglikelihood", PAIRS) == _ask(ours, "loglikelihood", PAIRS)


def test_loglikelihood_rolling(ours: Any, theirs: Any) -> None:
    """Of a text longer than one request."""
    text = "The quick brown fox jumps over the lazy dog. " * 12
    here, there = (_ask(model, "loglikelihood_rolling", [(text,)]) for model in (ours, theirs))

    assert pytest.approx(there[0], rel=1e-5) == here[0]


def test_generate_until(ours: Any, theirs: Any) -> None:
    """Greedy text up to a stop."""
    asked = [("The capital of France is", {"until": ["."], "max_gen_toks": 16, "do_sample": False})]
    here, there = (_ask(model, "generate_until", asked) for model in (ours, theirs))

    assert there == here
