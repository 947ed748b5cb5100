"""benchmarks/quality/perplexity.py: planted outliers, predictions of both servers, and their errors."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.held_out import TARGET, held_out_texts
from benchmarks.quality.perplexity import TIMES, Prediction, ask_peer, divergence, likely, loss, ours, plant, score_ours


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
    plant(TARGET, tmp_path, times)
    before, planted = (
        AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj.weight.detach().float()
        for folder in (TARGET, tmp_path)
    )
    moved = (before != planted).any(0)

    assert math.ceil(0.01 * before.shape[1]) == int(moved.sum())
    torch.testing.assert_close(before[:, moved] * times, planted[:, moved], rtol=0, atol=0)
    torch.testing.assert_close(logits(TARGET, text), logits(tmp_path, text), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_unquantised_predictions_equal_float32() -> None:
    """Of the served model, at every compared position."""
    texts = held_out_texts(2)
    places = list(likely(TARGET, texts, 8))
    found = loss(places, score_ours(ours(TARGET, "float32"), texts, places))

    assert {0, 1} == {place.text for place in places}
    assert found.divergence < 1e-6
    assert found.perplexity == pytest.approx(1, abs=1e-4)


def test_the_peer_is_measured_after_each_prefix() -> None:
    """The log-probabilities of the likely tokens are read; unlisted ones have the lowest of the list."""
    requested: list[list[int]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requested.append(json.loads(request.content)["prompt"])
        listed = [{"id": 7, "logprob": -0.5}, {"id": 8, "logprob": -2.0}]
        return httpx.Response(200, json={"completion_probabilities": [{"top_logprobs": listed}]})

    places = [Prediction(0, 1, (7, 9), (-0.5, -3.0), 0), Prediction(0, 2, (8, 7), (-1.0, -1.5), 1)]

    async def ask() -> list[list[float]]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            return await ask_peer(http, "http://peer/v1", [[5, 7, 7]], places)

    assert [[-0.5, -2.0], [-2.0, -0.5]] == asyncio.run(ask())
    assert [[5], [5, 7]] == sorted(requested)


def test_divergence_counts_all_other_tokens_as_one() -> None:
    """Of a half, a quarter and the rest, against three quarters, an eighth and the rest."""
    truth, scores = ([math.log(each) for each in own] for own in ((0.5, 0.25), (0.75, 0.125)))
    expected = 0.5 * math.log(0.5 / 0.75) + 0.25 * math.log(2) + 0.25 * math.log(2)

    assert expected == pytest.approx(divergence(truth, scores))
    assert pytest.approx(0, abs=1e-12) == divergence(truth, truth)


def test_loss_is_relative_to_float32() -> None:
    """One target less likely by a nat and one as likely: e to the half of the perplexity."""
    half = math.log(0.5)
    less = [math.log(1 - 0.5 / math.e), half - 1]
    places = [Prediction(0, 1, (1, 2), (half, half), 1), Prediction(0, 2, (1, 2), (half, half), 0)]
    found = loss(places, [less, [half, half]])

    assert math.exp(0.5) == pytest.approx(found.perplexity)
    assert found.divergence == pytest.approx(divergence(places[0].truth, less) / 2)
