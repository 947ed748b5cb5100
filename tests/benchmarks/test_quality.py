"""benchmarks/quality.py: outliers that do not change the outputs, perplexity of a peer, and losses."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.quality import TIMES, Place, ask_ours, ask_peer, likely, loss, ours, plant
from models.recipe.evaluate import held_out_texts
from models.recipe.plan import TARGET


def logits(folder: Path, text: list[int]) -> torch.Tensor:
    """Of the folder's model, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([text])).logits[0]
    return found


@pytest.mark.parametrize("times", [TIMES, 1 / TIMES])
def test_outliers_leave_float32_as_it_is(tmp_path: Path, times: float) -> None:
    """Some weights are many times as large, or as small, and the model says the same."""
    (text,) = held_out_texts(1)
    plant(TARGET.folder, tmp_path, times)
    before, planted = (
        AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj.weight.detach().float()
        for folder in (TARGET.folder, tmp_path)
    )
    moved = (before != planted).any(0)

    assert math.ceil(0.01 * before.shape[1]) == int(moved.sum())
    torch.testing.assert_close(before[:, moved] * times, planted[:, moved], rtol=0, atol=0)
    torch.testing.assert_close(logits(TARGET.folder, text), logits(tmp_path, text), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_unquantised_server_has_the_loss_of_float32(tmp_path: Path) -> None:
    """Without quantisation, every position has the log-probability of transformers over HTTP."""
    texts = held_out_texts(2)
    places = list(likely(TARGET.folder, texts, 8))

    async def ask(url: str) -> list[float]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            return await ask_ours(http, url, texts, places)

    with ours(TARGET.folder, "none", tmp_path, "--dtype", "float32") as url:
        found = loss(places, asyncio.run(ask(url)))

    assert {0, 1} == {place.text for place in places}
    assert found.distance < 1e-4


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


def test_a_loss_is_measured_against_float32() -> None:
    """One token less likely by a nat and one as likely: e to the half of the perplexity, the root of a half off."""
    found = loss([Place(0, 1, -1.0), Place(0, 2, -2.0)], [-2.0, -2.0])

    assert (math.exp(0.5), math.sqrt(0.5)) == pytest.approx((found.perplexity, found.distance))
