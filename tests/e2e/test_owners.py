"""Two owners of keys on one server: neither learns what the other wrote; the keys of one organisation share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from server.app import create_app
from server.configuration.settings import Settings
from tests.engine.kit.models import save_model
from tests.server.fakes import call

ALICE, CAROL, BOB = "alice-key", "carol-key", "bob-key"
# Alice and Carol work for one organisation, Bob does not.
KEYS = (f"wines:{ALICE}", f"wines:{CAROL}", BOB)
SHARING = (f"all:{ALICE}", f"all:{BOB}")
BEGIN, PIN = "The PIN of Alice:", "4719"
Post = Callable[..., Awaitable[Any]]
Story = Callable[[Post], Awaitable[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; its tokenizer has a token for each digit."""
    return save_model("llama", tmp_path_factory.mktemp("owners") / "llama")


def serve(folder: Path, story: Story, **changes: Any) -> Any:
    """What a story comes to on a server of its own; `post(path, key, **body)` gives answers."""
    settings = Settings(
        **{"model": str(folder), "context": 128, "slots": 2, "keys": KEYS, "store": "memory", **changes}
    )

    async def scene() -> Any:
        engine = Engine(settings.engine_config())
        app = create_app(engine, settings)

        async def post(path: str, key: str, **body: Any) -> Any:
            answer = await call(app, "POST", path, json_body=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status == 200, answer.body
            return answer.json

        engine.start()
        try:
            await engine.wait_ready()
            reply = await story(post)
            await engine.drain(10)
            return reply
        finally:
            await asyncio.to_thread(engine.close)

    return asyncio.run(scene())


def spaced(digits: str) -> str:
    """A PIN as Alice writes it."""
    return BEGIN + "".join(f" {digit}" for digit in digits)


async def write(post: Post, key: str, text: str, **fields: Any) -> Any:
    """One request for a token behind a text."""
    body = {"prompt": text, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    return await post("/v1/completions", key, **body)


async def chat(post: Post, key: str, text: str, **fields: Any) -> Any:
    """The same as a chat, with cache diagnostics."""
    message = {"role": "user", "content": text}
    body = {"messages": [message], "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    return await post("/v1/chat/completions", key, **body, return_cache_diagnostics=True)


def seen(answer: Any) -> tuple[Any, ...]:
    """The fields of an answer that depend on the cache, except times."""
    counts = [answer["timings"][name] for name in ("cache_n", "prompt_n", "draft_n", "draft_n_accepted")]
    return (answer["usage"], answer.get("prompt_cache_diagnostics"), *counts)


def cached(answer: Any) -> int:
    """Tokens of the prompt that were not computed."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def guessed(post: Post, key: str, **fields: Any) -> str:
    """What a key finds out digit by digit: at each place that digit behind which more is cached than behind others."""
    found = ""
    for _ in PIN:
        # The last token of a prompt is always computed, so another one stands behind the digit.
        guesses = {digit: spaced(found + digit) + " ?" for digit in "0123456789"}
        counts = {digit: cached(await write(post, key, guess, **fields)) for digit, guess in guesses.items()}
        best = max(counts, key=counts.__getitem__)
        if list(counts.values()).count(counts[best]) > 1:
            return found
        found += best
    return found


@pytest.mark.parametrize(
    ("key", "changes", "found"),
    [
        pytest.param(BOB, {}, "", id="another owner"),
        pytest.param(CAROL, {}, PIN, id="the same organisation"),
        pytest.param(BOB, {"keys": (ALICE, BOB)}, "", id="two keys"),
        pytest.param(BOB, {"keys": SHARING}, PIN, id="two keys of one organisation"),
    ],
)
def test_forty_guesses_find_what_the_owner_wrote_alone(
    folder: Path, key: str, changes: dict[str, Any], found: str
) -> None:
    """The attack finds the PIN where keys share, and not a digit where they do not."""

    async def story(post: Post) -> str:
        await write(post, ALICE, spaced(PIN))
        return await guessed(post, key)

    assert found == serve(folder, story, **changes)


def test_no_salt_of_a_client_opens_the_cache_of_another(folder: Path) -> None:
    """Salts of requests are apart for each owner, whatever they are."""

    async def story(post: Post) -> list[str]:
        await write(post, ALICE, spaced(PIN), cache_salt="cellar")
        return [await guessed(post, key, cache_salt="cellar") for key in (BOB, CAROL)]

    assert ["", PIN] == serve(folder, story)


async def observed(post: Post, guesses: Sequence[str]) -> list[tuple[Any, ...]]:
    """The cache-dependent fields of Bob's answers to guesses, in completions and in chats."""
    drafts = {"speculation": {"drafter": "lookup", "tokens": 4}, "max_tokens": 6}
    observations = []
    for guess in guesses:
        observations.append(seen(await write(post, BOB, spaced(guess))))
        observations.append(seen(await chat(post, BOB, spaced(guess), **drafts)))
    return observations


async def _alice(post: Post) -> None:
    """What Alice does: she writes her PIN, and has it repeated so that drafts could find it."""
    drafts = {"speculation": {"drafter": "lookup", "tokens": 4}, "max_tokens": 24}
    for _ in range(2):
        await write(post, ALICE, spaced(PIN))
        await chat(post, ALICE, spaced(PIN), **drafts)


def _with_and_without_alice(folder: Path, guesses: Sequence[str], **changes: Any) -> list[list[tuple[Any, ...]]]:
    async def beside(post: Post) -> list[tuple[Any, ...]]:
        await _alice(post)
        return await observed(post, guesses)

    async def alone(post: Post) -> list[tuple[Any, ...]]:
        return await observed(post, guesses)

    return [serve(folder, story, **changes) for story in (beside, alone)]


GUESSES = ["4719", "4711", "4719", "9174", "47", "0000", "4 7 1 9"]


def test_what_bob_sees_does_not_depend_on_alice(folder: Path) -> None:
    """Every count, reason and draft is that of a server on which Alice never was; with one cache it is not."""
    beside, alone = _with_and_without_alice(folder, GUESSES)
    shared, unshared = _with_and_without_alice(folder, GUESSES, keys=SHARING)

    assert alone == beside
    assert unshared != shared
    # Drafts as well, not the prefix alone.
    assert [reply[4:] for reply in unshared] != [reply[4:] for reply in shared]


@pytest.mark.slow
def test_a_thousand_guesses_learn_nothing(folder: Path) -> None:
    """All PINs that begin with the right digit, the right one among them."""
    beside, alone = _with_and_without_alice(folder, [f"4{number:03}" for number in range(1000)])

    assert alone == beside


def test_a_running_prompt_is_followed_by_its_owner_only(folder: Path) -> None:
    """Concurrent requests of one organisation compute their common prefix once."""
    text = "x" * 100

    async def story(post: Post) -> list[int]:
        pairs = ((ALICE, BOB), (BOB, ALICE), (ALICE, CAROL))
        counts = []
        for number, pair in enumerate(pairs):
            answers = await asyncio.gather(*(write(post, key, f"{number}{text}") for key in pair))
            counts.append(max(map(cached, answers)))
        return counts

    first, second, third = serve(folder, story)

    assert (0, 0) == (first, second)
    assert third > 0


def test_the_next_process_keeps_owners_apart(folder: Path, tmp_path: Path) -> None:
    """Files of the disk cache match requests of their owner only."""

    async def fill(post: Post) -> None:
        await write(post, ALICE, spaced(PIN))

    async def look(post: Post) -> list[int]:
        return [cached(await write(post, key, spaced(PIN))) for key in (BOB, CAROL)]

    disk_cache = {"disk_cache": str(tmp_path), "disk_cache_bytes": 2**26}
    serve(folder, fill, **disk_cache)
    bob, carol = serve(folder, look, **disk_cache)

    assert 0 == bob
    assert carol > 0


def test_ids_of_running_requests_are_apart(folder: Path) -> None:
    """An id that another owner uses is free."""

    async def story(post: Post) -> list[Any]:
        asked = [chat(post, key, "Hello", request_id="one", max_tokens=20) for key in (ALICE, BOB)]
        return [answer["id"] for answer in await asyncio.gather(*asked)]

    assert ["chatcmpl-one"] * 2 == serve(folder, story)
