"""Reused prefixes by the usage of HTTP answers: across salts, across shifts, across restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.story import CONTEXT, TURNS, Chat, serve
from tests.engine.kit.models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny model."""
    root = tmp_path_factory.mktemp("models")
    return lambda family: save_model(family, root / family)


def cached(answer: Any) -> int:
    """Tokens of the prompt that were not computed."""
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def text(answer: Any) -> str:
    """The content of an answer."""
    content: str = answer["choices"][0]["message"]["content"]
    return content


def test_a_prompt_is_never_shared_across_salts(folder: Callable[[str], Path]) -> None:
    """A conversation matches under its own salt only, and its answer depends on none."""

    async def story(chat: Chat) -> None:
        first = await chat(TURNS, cache_salt="one")
        prompt = first["usage"]["prompt_tokens"]
        again = [await chat(TURNS, **fields) for fields in ({"cache_salt": "one"}, {"cache_salt": "two"}, {})]

        assert [0, prompt - 1, 0, 0] == [cached(answer) for answer in (first, *again)]
        assert {text(first)} == {text(answer) for answer in again}

    serve(folder("llama"), story)


@pytest.mark.parametrize("shift", ["rebuild", "carry"])
def test_the_usage_counts_shifts(folder: Callable[[str], Path], shift: str) -> None:
    """An answer that shifted says how often, and how many tokens that dropped."""

    async def story(chat: Chat) -> None:
        fields = {"max_tokens": 150, "overflow": "shift", "recurrent_shift": shift}
        usage = (await chat([{"role": "user", "content": "Go on."}], **fields))["usage"]

        assert usage["completion_tokens"] == 150
        assert usage["context_shifts"] > 1
        assert usage["shifted_tokens"] >= usage["prompt_tokens"] + 150 - 1 - CONTEXT

    serve(folder("lfm2"), story)


def test_the_last_question_is_never_shifted_out(folder: Callable[[str], Path]) -> None:
    """Where the last message of the user fills all, the answer ends for want of anything to drop."""

    async def story(chat: Chat) -> None:
        answer = await chat([{"role": "user", "content": "x" * 87}], max_tokens=50, overflow="shift", keep=0)

        assert CONTEXT - 1 == answer["usage"]["prompt_tokens"]
        assert ("length", 2) == (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"])
        assert "context_shifts" not in answer["usage"]

    serve(folder("llama"), story)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "lfm2"])
def test_a_conversation_survives_a_restart(folder: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    """What one server computed the next one finds on the shelf, and says the same; another salt still finds nothing."""
    output: list[Any] = []

    async def story(chat: Chat) -> None:
        output.append(await chat(TURNS, cache_salt="one"))
        output.append(await chat(TURNS, cache_salt="other") if len(output) > 1 else output[0])

    where = folder(family)
    for _ in range(2):
        serve(where, story, disk_cache=str(tmp_path / "shelf"))
    first, _, again, other = output

    assert cached(first) == 0
    assert cached(again) >= again["usage"]["prompt_tokens"] - 1 > 0
    assert cached(other) == 0
    assert text(first) == text(again) == text(other)
