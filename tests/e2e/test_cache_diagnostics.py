"""Why a prompt was not found in the cache: what answers say of it, by an engine that really remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.text.prefix import common_prefix_length
from tests.e2e.story import TURNS, Chat, serve
from tests.engine.kit.models import save_model

BUNDLED = Path(__file__).parents[2] / "models" / "target"
ASKED = {"return_cache_diagnostics": True, "return_token_ids": True}


def diagnostics_of(answer: Any) -> Any:
    """The cache diagnostics of an answer, with the counts of the usage."""
    found = answer["prompt_cache_diagnostics"]
    usage = answer["usage"]
    assert found["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert found["cached_tokens"] + found["missed_tokens"] == usage["prompt_tokens"]
    return found


def why(answer: Any) -> tuple[str | None, int | None]:
    """The reason, and the message."""
    found = diagnostics_of(answer)
    return found["reason"], found["first_divergent_message"]


def changed(at: int, content: str) -> list[dict[str, str]]:
    """The conversation with another text of one message."""
    return [*TURNS[:at], {**TURNS[at], "content": content}, *TURNS[at + 1 :]]


def test_diagnostics_of_the_bundled_model_have_the_reason() -> None:
    """The same again, gone on from, changed at its beginning and at its end, as another tenant, and after eviction."""

    async def story(chat: Chat) -> None:
        first = await chat(TURNS, **ASKED)
        assert ("unknown", None) == why(first)

        again = await chat(TURNS, **ASKED)
        assert (None, None, 1) == (*why(again), diagnostics_of(again)["missed_tokens"])

        answered = [*TURNS, first["choices"][0]["message"], {"role": "user", "content": "Why?"}]
        assert ("ended", 4) == why(await chat(answered, **ASKED))

        for at, content in ((0, "You are a pantry."), (3, "Since what year?"), (1, "What do you hold, and why?")):
            other = await chat(changed(at, content), **ASKED)
            assert ("diverged", at) == why(other)
            alike = common_prefix_length(first["prompt_token_ids"], other["prompt_token_ids"])
            assert alike == diagnostics_of(other)["first_divergent_token"] == diagnostics_of(other)["cached_tokens"]

        assert ("unknown", None) == why(await chat(TURNS, **ASKED, cache_salt="other"))
        assert ("bypassed", None) == why(await chat(TURNS, **ASKED, cache_prompt=False))
        assert ("scored", None) == why(await chat(TURNS, **ASKED, prompt_logprobs=0))
        for number in range(12):
            await chat(changed(0, f"{number} cellars."), cache_salt=str(number))
        assert ("unknown", None) == why(await chat(TURNS, **ASKED))

    serve(BUNDLED, story)


def test_diagnostics_report_an_unreachable_state(tmp_path: Path) -> None:
    """The prefix cache of a recurrent model matches more of a prompt than it can resume at."""

    async def story(chat: Chat) -> None:
        await chat(TURNS)
        found = diagnostics_of(await chat(changed(3, "Since what?"), **ASKED))

        assert found["reason"] == "unreachable"
        assert found["cached_tokens"] < found["first_divergent_token"]
        assert found["first_divergent_message"] == 3

    serve(save_model("lfm2", tmp_path / "lfm2"), story)
