"""Events of a request, from the engine to its caller: frozen, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token that could have been chosen, with its text, its bytes and its log-probability."""

    token: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token and the likeliest ones at its place, best first (the chosen one may be absent there).

    labels  those of `Request.label_tokens`, in their order
    text_offset  characters of the answer before the one that the token begins or continues

    Log-probabilities are those of the raw logits: before temperature, penalties, bias and filters.
    """

    chosen: Logprob
    top: tuple[Logprob, ...]
    labels: tuple[Logprob, ...] = ()
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. Counts are tokens, but for `context_shifts`.

    accepted_tokens, rejected_tokens  drafted ones that were said, and that were not
    matched_tokens  of the prompt that were remembered when it was looked for, whether or not one could go on there
    diverged        whether others went on differently there
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
    """Where a request's time went: waiting, until the first token, and from there to the end."""

    queue_seconds: float
    prompt_seconds: float
    generation_seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue: it has a slot, and `cached_tokens` of its prompt need not be computed."""

    prompt_tokens: int
    cached_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Of the prompt's tokens, those that are computed or reused by now."""

    computed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from `Request.score_from` on. None is that of the very first token.

    They come with the logits of a forward, never from what was remembered.
    """

    tokens: tuple[int, ...]
    entries: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """A prompt as one vector, little-endian float32: not normalised, but where the embedding model does it itself.

    Where that model scores pairs, the score is the one number of the vector.
    """

    vector: bytes


@dataclass(frozen=True, slots=True)
class Delta:
    """New text. `tokens` and `logprobs` belong to the text released here; held-back ones come with a later delta."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that ended well. `stop` is the stop string or token that ended it, if one did.

    end_logprob  the log-probability of a token that ended it and has no text, if the request asked for such
    tokens  generated tokens without a delta: the end token, and those of a stop string that is cut off
    """

    reason: FinishReason
    stop: str | int | None
    usage: Usage
    timings: Timings
    end_logprob: TokenLogprob | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that broke; `reason` is fit for the client's eyes.

    caused_by_request  whether its own rules left nothing to say: the same request would break again
    """

    reason: str
    caused_by_request: bool = False


Event = Started | PrefillProgress | PromptScored | Embedded | Delta | Finished | Failed
