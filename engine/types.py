"""The values that cross the border of the engine: requests in, events out. All frozen, none holds a tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Overflow = Literal["length", "shift"]
RecurrentShift = Literal["rebuild", "carry"]
DrafterChoice = Literal["auto", "none", "lookup", "model"]
FinishReason = Literal["stop", "length"]
# Tokens of a draft at most. A longer one pays in copied text alone, and there the next one follows at once.
LONGEST_DRAFT = 16
# How latent attention is computed (engine/kernels/latent.py): always one way, or the cheaper one.
MlaMode = Literal["auto", "absorb", "expand"]


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
class Array:
    """Numbers that cross the border: `data` in C order, little-endian, of the numpy type that `dtype` names."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Media:
    """What an encoder takes, by the names of its inputs, as the model's processor makes them, without the batch of one.

    digest  of the content (`Media.of`): the same media are encoded once and share what is remembered
    """

    arrays: tuple[tuple[str, Array], ...]
    digest: bytes

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Media:
        """Media with their digest; for worker threads, since images have megabytes."""
        ordered = tuple(sorted(arrays.items()))
        return cls(ordered, digest_of(ordered))


def digest_of(arrays: Sequence[tuple[str, Array]]) -> bytes:
    """SHA-256 over names, types, shapes and numbers."""
    digest = hashlib.sha256()
    for name, array in arrays:
        digest.update(repr((name, array.dtype, array.shape, len(array.data))).encode())
        digest.update(array.data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Who guesses at tokens, and how many at a time.

    drafter  one kind of drafter, or "auto": the one that seems best; "none" forbids it
    tokens   of each draft, 0 to LONGEST_DRAFT, where so many can be guessed; None: what the engine's settings say
    """

    drafter: DrafterChoice = "auto"
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    max_tokens  new tokens at most; None: as many as the context leaves (with overflow "shift": one context full)
    logprobs    None: no log-probabilities; n: those of the chosen token and of the n likeliest
    overflow    what happens at a full context: end with "length", or shift the context; None: the engine's setting
    keep        tokens at the start that a shift never drops; None: the leading special tokens and 4 more
    protected   token ranges [start, stop) of the prompt that a shift neither drops nor cuts; where nothing else may go
                the answer ends with "length"
    mutual      token ranges [start, stop) of the prompt, ascending, whose tokens see those behind them in the range too
                (the tokens of an image in Gemma 3); no shift drops or cuts one
    recurrent_shift  what a shift makes of recurrent states: "rebuild" computes them from the tokens that stay, "carry"
                leaves them as they are, having seen the dropped text
    marks       places in the prompt that are worth resuming at, such as ends of messages; they never change the text
    salt        what is remembered under another salt does not exist for this request
    media       what the model's encoder is to look at; None where it has no encoder, or may do without
    speculation  who may guess at the text; it never changes the text
    prediction  tokens that the client expects the answer to be made of, to guess from
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
    protected: tuple[tuple[int, int], ...] = ()
    mutual: tuple[tuple[int, int], ...] = ()
    recurrent_shift: RecurrentShift = "rebuild"
    marks: tuple[int, ...] = ()
    salt: bytes = b""
    media: Media | None = None
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as the tokens of a prompt, and what `Request` should know of it.

    keep  tokens of the leading system messages; None: there are none
    """

    tokens: tuple[int, ...]
    keep: int | None = None
    marks: tuple[int, ...] = ()
    protected: tuple[tuple[int, int], ...] = ()


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
    """What a request cost. Counts are tokens, but for `context_shifts`.

    accepted_tokens, refused_tokens  drafted ones that were said, and that were not
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    context_shifts: int = 0
    shifted_tokens: int = 0
    accepted_tokens: int = 0
    refused_tokens: int = 0


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
    """What the loaded model is. `folder` is where it came from, `name` how it was asked for.

    start  tokens that a prompt begins with where the model has an encoder beside the decoder; empty for others
    """

    name: str
    folder: str
    fingerprint: str
    architecture: str
    parameters: int
    dtype: str
    vocabulary: int
    context: int
    slots: int
    start: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the memory is used for. The cache is allocated once, at the start.

    weights_bytes    of the model as loaded
    cells            tokens that the shared cache holds
    cell_bytes       one token's keys and values in every layer that sees the whole text
    window_bytes     what layers that see a window or chunk of it hold besides, however long it is
    cache_bytes      cells x cell_bytes + window_bytes
    work_bytes       an upper estimate of what one step needs for a while
    available_bytes  what the machine had free before the model was loaded
    """

    weights_bytes: int
    cells: int
    cell_bytes: int
    cache_bytes: int
    work_bytes: int
    available_bytes: int
    window_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who guesses at text: the kinds of drafters, and the model that drafts with its own memory, where one does."""

    kinds: tuple[str, ...] = ()
    model: ModelInfo | None = None
    memory: MemoryPlan | None = None


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of the drafts of one kind of drafter, by the position in the draft: tokens drafted, and said."""

    kind: str
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """The state of the engine after its latest step. Totals count since the start.

    cells_used        cells of running sequences
    cells_remembered  further cells, kept for prompts to come and given up for running ones
    shelf_memory_bytes, shelf_disk_bytes  of remembered content outside the cells
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    cells_used: int = 0
    cells_remembered: int = 0
    cells_total: int = 0
    shelf_memory_bytes: int = 0
    shelf_disk_bytes: int = 0
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
    drafts: tuple[DraftCounts, ...] = ()
