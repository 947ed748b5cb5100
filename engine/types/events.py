"""Events of a request, from the engine to its caller: frozen, without tensors."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token with its text, its bytes and its log-probability.

    in_output  whether a text with this token has its bytes: false for end tokens, and for special tokens left out
    """

    token: int
    text: str
    bytes: builtins.bytes
    logprob: float
    in_output: bool = True


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position: of the sampled token and of the top tokens, best first.

    top          without the sampled token if it is not among them
    labels       of `Request.label_tokens`, in their order
    text_offset  characters of the answer before the first character that the token begins or continues

    From the raw logits: before temperature, penalties, bias and filters.
    """

    chosen: Logprob
    top: tuple[Logprob, ...]
    labels: tuple[Logprob, ...] = ()
    text_offset: int = 0

    def without_output_of(self, is_omitted: Callable[[int], bool]) -> TokenLogprob:
        """The same with the tokens marked that the output leaves out."""

        def mark(logprob: Logprob) -> Logprob:
            return replace(logprob, in_output=False) if is_omitted(logprob.token) else logprob

        return replace(
            self, chosen=mark(self.chosen), top=tuple(map(mark, self.top)), labels=tuple(map(mark, self.labels))
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, and its number of context shifts.

    cached_tokens    prompt tokens from the prefix cache
    accepted_tokens  emitted draft tokens
    rejected_tokens  draft tokens that were not emitted
    matched_tokens   prompt tokens found in the prefix tree, whether or not the sequence could resume at their end
    diverged         the prefix tree continued after the match, with other tokens
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    context_shifts: int = 0
    shifted_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    matched_tokens: int = 0
    diverged: bool = False


@dataclass(frozen=True, slots=True)
class Timings:
    """Time of a request in the queue, until the first token, and from the first token to the end."""

    queue_seconds: float
    prompt_seconds: float
    generation_seconds: float


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens in the slot so far, computed or cached."""

    computed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from `Request.score_from` on; None for the first token of the prompt.

    Always computed, never from the prefix cache.
    """

    tokens: tuple[int, ...]
    entries: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """A prompt as one vector, little-endian float32; normalised only if the embedding model does so itself.

    A model that scores pairs gives a vector of one number, the score.
    """

    vector: bytes


@dataclass(frozen=True, slots=True)
class Delta:
    """New text with its tokens and log-probabilities; entries of buffered text come with a later delta."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue: it has a slot, with `cached_tokens` of its prompt from the prefix cache.

    earlier  the deltas of `Request.emitted`, one per token, which the client has already
    """

    prompt_tokens: int
    cached_tokens: int
    seed: int
    earlier: tuple[Delta, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a successful request.

    stop         the stop string, expression or token that ended it, or "deadline"; None: an end token or the length
    end_logprob  of an end token without text, if the request has logprobs
    tokens       generated tokens in no delta: the end token, and tokens of a stop string that was cut off unless the
                 request has `tokens_at_once`
    """

    reason: FinishReason
    stop: str | int | None
    usage: Usage
    timings: Timings
    end_logprob: TokenLogprob | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a failed request; `reason` may be shown to the client.

    caused_by_request  its constraints left no token, or the model refuses its images: it would fail again
    """

    reason: str
    caused_by_request: bool = False


Event = Started | PrefillProgress | PromptScored | Embedded | Delta | Finished | Failed
