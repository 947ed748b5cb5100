"""The values that cross the border of the engine: requests in, events out. All frozen, none holds a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Overflow = Literal["length", "shift"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen (algorithm: sampling.emit).

    temperature         0 takes the likeliest token; else logits are divided by it
    top_k, top_p, min_p the usual filters, applied in this order after the temperature; 0, 1 and 0 switch them off
    frequency_penalty   subtracted once per occurrence in the output so far
    presence_penalty    subtracted once if the token is in the output so far
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output; 1 is off
    logit_bias          (token, bias) pairs, added before everything else
    seed                any 64-bit integer; None draws one
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    max_tokens  new tokens at most; None: as many as the context leaves (with overflow "shift": one context full)
    logprobs    None: no log-probabilities; n: those of the chosen token and of the n likeliest
    overflow    what happens at a full context: end with "length", or shift the context; None: the engine's setting
    keep        tokens at the start that a shift never drops; None: the leading special tokens and 4 more
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    overflow: Overflow | None = None
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have been chosen, with its text, its bytes and its log-probability."""

    token: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token and the likeliest ones at its place, best first (the chosen one may be absent there).

    Log-probabilities are those of the raw logits: before temperature, penalties, bias and filters.
    """

    chosen: Alternative
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. Counts are tokens, but for `context_shifts`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    context_shifts: int = 0
    shifted_tokens: int = 0


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
class Delta:
    """New text. `tokens` and `logprobs` belong to the text released here; held-back ones come with a later delta."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that ended well. `stop` is the stop string or token that ended it, if one did."""

    reason: FinishReason
    stop: str | int | None
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that broke; `reason` is fit for the client's eyes."""

    reason: str


Event = Started | Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the loaded model is. `folder` is where it came from, `name` how it was asked for."""

    name: str
    folder: str
    fingerprint: str
    architecture: str
    parameters: int
    dtype: str
    vocabulary: int
    context: int
    slots: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the memory is used for. The cache is allocated once, at the start.

    weights_bytes    of the model as loaded
    cells            tokens that the shared cache holds
    cell_bytes       one token's keys and values in every layer
    cache_bytes      cells x cell_bytes
    work_bytes       an upper estimate of what one step needs for a while
    available_bytes  what the machine had free before the model was loaded
    """

    weights_bytes: int
    cells: int
    cell_bytes: int
    cache_bytes: int
    work_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of the engine after its latest step. Totals count since the start.

    cells_used        cells of running sequences
    cells_remembered  further cells, kept for prompts to come and given up for running ones
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    cells_used: int = 0
    cells_remembered: int = 0
    cells_total: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    rows_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    context_shifts_total: int = 0
    preemptions_total: int = 0
    prefix_copies_total: int = 0
    failed_total: int = 0
