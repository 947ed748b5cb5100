"""The constraint of timestamps allows the tokens that transformers' logits processor allows."""

from __future__ import annotations

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from engine.sample.device_sampling import SamplingBatch
from engine.sample.timestamps import Timestamps
from engine.schedule.sequence import SamplingState
from engine.types.request import Request, SamplingParams, TimestampRule
from tests.engine.kit.speech import END, FIRST, NO_TIMESTAMPS, POSITIONS, START, VOCABULARY

RULE = TimestampRule(FIRST, END, (5, 9, START), (32, END), 10)


def transformers_mask(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The logits after the processors, in the order of Whisper's `generate`."""
    config = GenerationConfig(eos_token_id=END, no_timestamps_token_id=NO_TIMESTAMPS, max_initial_timestamp_index=10)
    processors = [
        SuppressTokensAtBeginLogitsProcessor(list(RULE.suppressed_first), 1),
        SuppressTokensLogitsProcessor(list(RULE.suppressed)),
        WhisperTimeStampLogitsProcessor(config, begin_index=1),
    ]
    prompt, scores = torch.tensor([[START, *tokens]]), logits[None].clone()
    for processor in processors:
        scores = processor(prompt, scores)
    return scores[0]


def random_text(generator: torch.Generator) -> list[int]:
    """Up to five tokens, half of them timestamps."""

    def number(stop: int) -> int:
        return int(torch.randint(0, stop, (), generator=generator))

    return [number(VOCABULARY) if number(2) else FIRST + number(POSITIONS) for _ in range(number(6))]


def test_any_text_allows_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        tokens, logits = random_text(generator), torch.randn(VOCABULARY, generator=generator) * 3
        constraint, masked = Timestamps(RULE), logits.clone()
        for token in tokens:
            constraint = constraint.after(token)
        constraint.mask(masked)

        assert torch.equal(masked, transformers_mask(tokens, logits)), tokens


def test_the_mask_depends_on_the_logits() -> None:
    """So a device samples such a row on the host."""
    request = Request("1", (START,), SamplingParams(temperature=0.0), timestamps=RULE)
    state = SamplingState(request, vocabulary=VOCABULARY, end_tokens=frozenset((END,)), matcher=None)
    batch = SamplingBatch([state.context()], VOCABULARY)

    assert batch.host_rows == [0]
    assert set(batch.arrays) == {"host_rows"}
