"""Log-probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.types import Alternative, TokenLogprob
from server.schemas.chat import ChatLogprob, ChatLogprobs, TopLogprob
from server.schemas.completions import TextLogprobs

# JSON has no infinity; vLLM's number for it, which clients know.
IMPOSSIBLE = -9999.0


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    """The shape of chat completions."""
    return ChatLogprobs(content=[_entry(token) for token in tokens], refusal=None)


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> TextLogprobs:
    """The shape of completions; `offset` is where the first token's text starts in the text of its choice."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.chosen.text)
    return TextLogprobs(
        tokens=[token.chosen.text for token in tokens],
        token_logprobs=[_finite(token.chosen.logprob) for token in tokens],
        top_logprobs=[_top(token) for token in tokens],
        text_offset=offsets,
    )


def length(tokens: Sequence[TokenLogprob]) -> int:
    """Characters of text that the tokens stand for."""
    return sum(len(token.chosen.text) for token in tokens)


def _entry(token: TokenLogprob) -> ChatLogprob:
    return ChatLogprob(**_alternative(token.chosen), top_logprobs=[_alternative(other) for other in token.top])


def _alternative(alternative: Alternative) -> TopLogprob:
    return TopLogprob(token=alternative.text, logprob=_finite(alternative.logprob), bytes=list(alternative.bytes))


def _top(token: TokenLogprob) -> dict[str, float]:
    # The chosen token is always in it, so there may be one more than was asked for; OpenAI documents that.
    likeliest = {other.text: _finite(other.logprob) for other in reversed(token.top)}
    return {**dict(reversed(likeliest.items())), token.chosen.text: _finite(token.chosen.logprob)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
