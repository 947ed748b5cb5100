"""Log-probabilities in OpenAI's formats, and in vLLM's format for prompts."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.types.events import Logprob, TokenLogprob
from server.schemas.chat import ChatLogprob, ChatLogprobs, TopLogprob
from server.schemas.common import Generation, PromptLogprob, PromptLogprobs
from server.schemas.completions import TextLogprobs

# JSON has no infinity; vLLM uses this number, and clients know it.
IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class LogprobFormat:
    """Number of top tokens besides the sampled one, and whether tokens are named by their ids.

    omitted_bytes  of tokens that the text leaves out: null, or none

    As in vLLM, `logprob_token_ids` are in place of the top tokens.
    """

    top: int
    by_id: bool = False
    omitted_bytes: tuple[()] | None = None

    @classmethod
    def of(cls, body: Generation, top: int) -> LogprobFormat:
        """The format that the body requests."""
        return cls(top, bool(body.return_tokens_as_token_ids))

    def name(self, alternative: Logprob) -> str:
        """The text of a token, or vLLM's `token_id:7`."""
        return f"token_id:{alternative.token}" if self.by_id else alternative.text

    def alternatives(self, token: TokenLogprob) -> list[Logprob]:
        """The top tokens; of a request for certain tokens, the sampled token and the requested ones."""
        if not token.labels:
            return list(token.top[: self.top])
        return list({other.token: other for other in (token.chosen, *token.labels)}.values())


# Of the Responses API, where bytes cannot be null.
_RESPONSES_FORMAT = LogprobFormat(20, omitted_bytes=())


def chat_logprobs(tokens: Sequence[TokenLogprob], logprob_format: LogprobFormat = _RESPONSES_FORMAT) -> ChatLogprobs:
    """OpenAI's format for chat completions."""
    return ChatLogprobs(content=[_entry(token, logprob_format) for token in tokens], refusal=None)


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int, logprob_format: LogprobFormat) -> TextLogprobs:
    """OpenAI's format for completions; `offset`: start of the answer in the text of its choice."""
    return TextLogprobs(
        tokens=[logprob_format.name(token.chosen) for token in tokens],
        token_logprobs=[finite_logprob(token.chosen.logprob) for token in tokens],
        top_logprobs=[_top(token, logprob_format) for token in tokens],
        text_offset=[offset + token.text_offset for token in tokens],
    )


def concatenated(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """The lists of both, concatenated."""
    return TextLogprobs(
        tokens=first["tokens"] + second["tokens"],
        token_logprobs=first["token_logprobs"] + second["token_logprobs"],
        top_logprobs=first["top_logprobs"] + second["top_logprobs"],
        text_offset=first["text_offset"] + second["text_offset"],
    )


def prompt_logprobs(entries: Sequence[TokenLogprob | None], top: int) -> PromptLogprobs:
    """vLLM's format: at each position the prompt's token and the `top` likeliest tokens, by token id."""
    return [None if entry is None else _prompt_entry(entry, top) for entry in entries]


def with_offsets(tokens: Sequence[TokenLogprob], before: bytes) -> list[TokenLogprob]:
    """Tokens of a prompt with their offsets: characters before the one that a token begins or continues."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offset, entries = len(decoder.decode(before)), []
    for token in tokens:
        entries.append(replace(token, text_offset=offset))
        offset += len(decoder.decode(token.chosen.bytes))
    return entries


def _prompt_entry(entry: TokenLogprob, top: int) -> dict[str, PromptLogprob]:
    ranks = {other.token: rank for rank, other in enumerate(entry.top, start=1)}
    return {
        str(other.token): PromptLogprob(
            logprob=finite_logprob(other.logprob), rank=ranks.get(other.token), decoded_token=other.text
        )
        for other in (entry.chosen, *entry.top[:top], *entry.labels)
    }


def _entry(token: TokenLogprob, logprob_format: LogprobFormat) -> ChatLogprob:
    others = [_alternative(other, logprob_format) for other in logprob_format.alternatives(token)]
    return ChatLogprob(**_alternative(token.chosen, logprob_format), top_logprobs=others)


def _alternative(alternative: Logprob, logprob_format: LogprobFormat) -> TopLogprob:
    # The bytes of all tokens of an answer are the bytes of its text.
    raw = alternative.bytes if alternative.in_output else logprob_format.omitted_bytes
    return TopLogprob(
        token=logprob_format.name(alternative),
        logprob=finite_logprob(alternative.logprob),
        bytes=None if raw is None else list(raw),
    )


def _top(token: TokenLogprob, logprob_format: LogprobFormat) -> dict[str, float]:
    # The sampled token is always included, as OpenAI documents, so there may be one more than requested. If two tokens
    # have the same text, the likelier one is kept.
    likeliest = {
        logprob_format.name(other): finite_logprob(other.logprob)
        for other in reversed(logprob_format.alternatives(token))
    }
    return {
        **dict(reversed(likeliest.items())),
        logprob_format.name(token.chosen): finite_logprob(token.chosen.logprob),
    }


def finite_logprob(logprob: float) -> float:
    """The log-probability, or a large negative number for none."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
