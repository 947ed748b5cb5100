"""Log-probabilities in the shapes that OpenAI has for them, and vLLM's for those of a prompt."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.types.events import Logprob, TokenLogprob
from server.schemas.chat import ChatLogprob, ChatLogprobs, TopLogprob
from server.schemas.common import Generation, PromptLogprob, PromptLogprobs
from server.schemas.completions import TextLogprobs

# JSON has no infinity; vLLM's number for it, which clients know.
IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class LogprobFormat:
    """How many of the likeliest tokens are shown beside the chosen one, and whether tokens are named by their ids.

    Behind the likeliest stand those that `logprob_token_ids` asks for.
    """

    top: int
    by_id: bool = False

    @classmethod
    def of(cls, body: Generation, top: int) -> LogprobFormat:
        """As the body wants it."""
        return cls(top, bool(body.return_tokens_as_token_ids))

    def name(self, alternative: Logprob) -> str:
        """The text of a token, or vLLM's `token_id:7`."""
        return f"token_id:{alternative.token}" if self.by_id else alternative.text

    def alternatives(self, token: TokenLogprob) -> list[Logprob]:
        """The likeliest and the labels, each token once."""
        found = {other.token: other for other in (*token.top[: self.top], *token.labels)}
        return list(found.values())


ALL_LOGPROBS = LogprobFormat(20)


def chat_logprobs(tokens: Sequence[TokenLogprob], wording: LogprobFormat = ALL_LOGPROBS) -> ChatLogprobs:
    """The shape of chat completions."""
    return ChatLogprobs(content=[_entry(token, wording) for token in tokens], refusal=None)


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int, wording: LogprobFormat) -> TextLogprobs:
    """The shape of completions; `offset` is where the answer starts in the text of its choice."""
    return TextLogprobs(
        tokens=[wording.name(token.chosen) for token in tokens],
        token_logprobs=[_finite(token.chosen.logprob) for token in tokens],
        top_logprobs=[_top(token, wording) for token in tokens],
        text_offset=[offset + token.text_offset for token in tokens],
    )


def concatenated(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """The lists of both, one behind the other."""
    return TextLogprobs(
        tokens=first["tokens"] + second["tokens"],
        token_logprobs=first["token_logprobs"] + second["token_logprobs"],
        top_logprobs=first["top_logprobs"] + second["top_logprobs"],
        text_offset=first["text_offset"] + second["text_offset"],
    )


def prompt_logprobs(entries: Sequence[TokenLogprob | None], top: int) -> PromptLogprobs:
    """vLLM's shape: of each token of the prompt itself and the likeliest in its place, by their ids."""
    return [None if entry is None else _prompt_entry(entry, top) for entry in entries]


def with_offsets(tokens: Sequence[TokenLogprob], before: bytes) -> list[TokenLogprob]:
    """The tokens of a prompt with their offsets: characters of it before the one that a token begins or continues."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offset, found = len(decoder.decode(before)), []
    for token in tokens:
        found.append(replace(token, text_offset=offset))
        offset += len(decoder.decode(token.chosen.bytes))
    return found


def _prompt_entry(entry: TokenLogprob, top: int) -> dict[str, PromptLogprob]:
    ranks = {other.token: rank for rank, other in enumerate(entry.top, start=1)}
    return {
        str(other.token): PromptLogprob(
            logprob=_finite(other.logprob), rank=ranks.get(other.token), decoded_token=other.text
        )
        for other in (entry.chosen, *entry.top[:top], *entry.labels)
    }


def _entry(token: TokenLogprob, wording: LogprobFormat) -> ChatLogprob:
    others = [_alternative(other, wording) for other in wording.alternatives(token)]
    return ChatLogprob(**_alternative(token.chosen, wording), top_logprobs=others)


def _alternative(alternative: Logprob, wording: LogprobFormat) -> TopLogprob:
    return TopLogprob(
        token=wording.name(alternative), logprob=_finite(alternative.logprob), bytes=list(alternative.bytes)
    )


def _top(token: TokenLogprob, wording: LogprobFormat) -> dict[str, float]:
    # The chosen token is always in it, so there may be one more than was asked for; OpenAI documents that.
    # Two tokens may have one text; the likelier one stands for it.
    likeliest = {wording.name(other): _finite(other.logprob) for other in reversed(wording.alternatives(token))}
    return {**dict(reversed(likeliest.items())), wording.name(token.chosen): _finite(token.chosen.logprob)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
