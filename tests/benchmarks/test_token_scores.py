"""benchmarks/gguf/token_scores.py: requests to both servers, and their errors."""

from __future__ import annotations

import asyncio
import json
import math

import httpx
import pytest

from benchmarks.gguf.token_scores import Place, ask_peer, loss


def test_the_peer_is_measured_after_each_prefix() -> None:
    """The log-probability of the token, or the smallest listed one."""
    asked: list[list[int]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["prompt"])
        listed = [{"id": 7, "logprob": -0.5}, {"id": 8, "logprob": -2.0}]
        return httpx.Response(200, json={"completion_probabilities": [{"top_logprobs": listed}]})

    places = [Place(0, 1, -0.5), Place(0, 2, -1.0)]

    async def ask() -> list[float]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            return await ask_peer(http, "http://peer/v1", [[5, 7, 9]], places)

    assert [-0.5, -2.0] == asyncio.run(ask())
    assert [[5], [5, 7]] == sorted(asked)


def test_another_seed_is_tried_when_the_peer_lists_nothing() -> None:
    """llama.cpp leaves the list out when the sampled token is part of a character."""

    def answer(request: httpx.Request) -> httpx.Response:
        listed = [{"top_logprobs": [{"id": 7, "logprob": -0.5}]}]
        return httpx.Response(
            200, json={"completion_probabilities": listed} if json.loads(request.content)["seed"] else {}
        )

    async def ask() -> list[float]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            return await ask_peer(http, "http://peer/v1", [[5, 7]], [Place(0, 1, -0.5)])

    assert [-0.5] == asyncio.run(ask())


def test_a_loss_is_measured_against_float32() -> None:
    """One token less likely by a nat and one as likely: e to the half of the perplexity, the root of a half off."""
    found = loss([Place(0, 1, -1.0), Place(0, 2, -2.0)], [-2.0, -2.0])

    assert (math.exp(0.5), math.sqrt(0.5)) == pytest.approx((found.perplexity, found.distance))
