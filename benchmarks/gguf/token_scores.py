"""Log-probabilities of tokens in texts, of Cellar and llama.cpp over HTTP, and their error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

# The peer lists its LISTED most likely tokens, so only tokens among the LIKELY first in float32 are compared.
LISTED, LIKELY = 256, 32
AT_ONCE = 4
TRIES = 10


@dataclass(frozen=True, slots=True)
class Place:
    """A token to predict from the tokens before it; `truth` is its log-probability in float32."""

    text: int
    position: int
    truth: float


@dataclass(frozen=True, slots=True)
class Loss:
    """The error of one server.

    perplexity  relative to float32
    distance    root mean square error of the tokens' log-probabilities, nats
    """

    perplexity: float
    distance: float


async def ask_ours(
    http: httpx.AsyncClient, url: str, texts: Sequence[list[int]], places: Sequence[Place]
) -> list[float]:
    """Return the log-probabilities of the places; one request for each text."""
    scored = {}
    for number in dict.fromkeys(place.text for place in places):
        body = {"prompt": texts[number], "max_tokens": 0, "prompt_logprobs": 0}
        answer = await http.post(f"{url}/completions", json=body)
        scored[number] = answer.raise_for_status().json()["choices"][0]["prompt_logprobs"]
    return [scored[one.text][one.position][str(texts[one.text][one.position])]["logprob"] for one in places]


async def ask_peer(
    http: httpx.AsyncClient, url: str, texts: Sequence[list[int]], places: Sequence[Place]
) -> list[float]:
    """Return the log-probabilities of the places, one request for each; the lowest listed one for an unlisted token."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def listing(prompt: list[int]) -> dict[str, Any]:
        # llama.cpp lists nothing when it samples a token that is part of a character: another seed, another token.
        for seed in range(TRIES):
            body = {"prompt": prompt, "n_predict": 1, "n_probs": LISTED, "seed": seed}
            async with limit:
                answer = await http.post(url.removesuffix("/v1") + "/completion", json=body)
            if listed := answer.raise_for_status().json().get("completion_probabilities"):
                return dict(listed[0])
        raise RuntimeError(f"no log-probabilities for {TRIES} seeds")

    async def ask(place: Place) -> float:
        text = texts[place.text]
        token = await listing(text[: place.position])
        listed = {entry["id"]: float(entry["logprob"]) for entry in token["top_logprobs"]}
        return listed.get(text[place.position], min(listed.values()))

    return await asyncio.gather(*(ask(place) for place in places))


def loss(places: Sequence[Place], scores: Sequence[float]) -> Loss:
    """Return the error of log-probabilities."""
    gaps = [place.truth - one for place, one in zip(places, scores, strict=True)]
    return Loss(math.exp(sum(gaps) / len(gaps)), math.sqrt(sum(gap * gap for gap in gaps) / len(gaps)))
