"""Requests to the engine: frozen, without tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.types.array import Array
from engine.types.content import Content

Overflow = Literal["length", "shift"]
RecurrentShift = Literal["rebuild", "carry"]
DrafterChoice = Literal["auto", "none", "lookup", "model", "mtp"]
Pooling = Literal["last", "mean"]
# Scheduling order: all requests of "priority" before "default" before "flex".
Tier = Literal["priority", "default", "flex"]
# Limit of a draft's length. Only copied text gains from longer drafts, and there the next draft follows at once.
MAX_DRAFT_TOKENS = 16
# Computation of latent attention (engine/kernels/latent.py): absorbed, expanded, or the cheaper of both.
MlaMode = Literal["auto", "absorb", "expand"]


@dataclass(frozen=True, slots=True)
class Dry:
    """DRY penalty ("don't repeat yourself"): lowers the logits of tokens that would continue a repeated sequence.

    A token that would continue a repetition of n >= allowed_length tokens loses multiplier x base^(n - allowed_length);
    the exponent is at most 64.

    lookback  earlier tokens that count; -1: all
    breakers  tokens that no repetition contains
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    lookback: int = -1
    breakers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Xtc:
    """Exclude top choices: with `probability`, of the tokens above `threshold` only the least likely one stays."""

    probability: float
    threshold: float = 0.1


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar for all generated tokens, in llguidance's variant of Lark, from the rule `start` on.

    Special tokens are terminals, `<name>` or `<[id]>`. The text may end where the grammar may end.
    """

    source: str


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """A budget of reasoning tokens before the answer.

    start_token  begins a reasoning block; None: the prompt has begun one
    end_tokens   end a block; forced after `budget` reasoning tokens in all blocks, as soon as the grammar allows them
    """

    start_token: int | None
    end_tokens: tuple[int, ...]
    budget: int


@dataclass(frozen=True, slots=True)
class TimestampRule:
    """Whisper's rule for its output: timestamps are in pairs around texts, never decrease, and begin the output.

    A timestamp is sampled where all timestamps together are more probable than any other token.

    first             the token of 0 s; larger ones are later timestamps, the one before it disables timestamps
    end_token         ends the output; smaller tokens are text
    suppressed        tokens that are never sampled
    suppressed_first  tokens that are not sampled first
    max_initial       of the first timestamp, as the number of tokens after `first`; None: any
    """

    first: int
    end_token: int
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    max_initial: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters (engine/sample/sampler.py), applied in this order: logit_bias; repetition, frequency and
    presence penalty; dry; constraints (engine/sample/constraints.py); temperature; top_n_sigma; top_k; typical_p;
    top_p; min_p; xtc. Each filter applies to the tokens that passed the one before. Definitions as in llama.cpp,
    but after the temperature, as in transformers; at temperature 0 no filter applies.

    temperature         0 is greedy; else logits are divided by it
    top_k, top_p, min_p the usual filters; 0, 1 and 0 switch them off
    frequency_penalty   subtracted once for each occurrence in the output so far
    presence_penalty    subtracted once if the token is in the output so far
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output; 1 is off
    penalty_lookback    the last tokens of prompt and output that these three penalties count; None: all
    logit_bias          (token, bias) pairs
    seed                any 64-bit integer; None: random
    typical_p           locally typical sampling (arXiv 2202.00666): the share of the mass that is kept; 1 is off
    top_n_sigma         removes tokens this many standard deviations below the maximum (arXiv 2411.07641); 0 is off
    dry, xtc            None is off
    allowed_tokens      forbids all other tokens; None is off
    bad_words           token sequences that are never completed; they may begin in the prompt
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    penalty_lookback: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    dry: Dry | None = None
    xtc: Xtc | None = None
    allowed_tokens: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Media:
    """Encoder inputs by name, as the model's processor returns them, without the batch dimension.

    digest  of the content (`Media.of`): equal media are encoded once and share cached prefixes
    """

    arrays: tuple[tuple[str, Array], ...]
    digest: bytes

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Media:
        """Media with their digest. Call it in a worker thread: images have megabytes."""
        ordered = tuple(sorted(arrays.items()))
        return cls(ordered, media_digest(ordered))


def media_digest(arrays: Sequence[tuple[str, Array]]) -> bytes:
    """SHA-256 over names, types, shapes and data."""
    digest = hashlib.sha256()
    for name, array in arrays:
        digest.update(repr((name, array.dtype, array.shape, len(array.data))).encode())
        digest.update(array.data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Drafter and draft length of a request.

    drafter  a kind of drafter, "auto": the best one, or "none"
    tokens   draft length, 0 to MAX_DRAFT_TOKENS; None: the engine's setting
    """

    drafter: DrafterChoice = "auto"
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    max_tokens       new tokens, at most; None: up to the context length (with overflow "shift": one context full)
    stop_regex       regular expressions: the text ends after the first match, which is part of it
    logprobs         None: no log-probabilities; n: of the sampled token and of the n top tokens
    overflow         at a full context: end with "length", or shift the context; None: the engine's setting
    keep             prompt tokens that a context shift never drops, half of the context at most; None: the leading
                     special tokens and 4 more
    protected        token ranges [start, stop) of the prompt that a shift neither drops nor splits; if no other tokens
                     can be dropped, the answer ends with "length"
    contents         images and sounds of the prompt, ascending; no shift drops or splits one
    recurrent_shift  recurrent states after a shift: "rebuild" computes them from the remaining tokens, "carry" keeps
                     them with the dropped tokens in them
    checkpoints      prompt positions that are likely resume points, such as ends of messages; no effect on the text
    salt             only requests with the same salt share cached prefixes
    cacheable        whether prompt and output stay cached after the end; if not, no other request may have its salt
    media            input of an encoder with cross-attention; None if the model has no such encoder or does not need it
    speculation      drafter and draft length; no effect on the text
    prediction       expected tokens of the answer, for drafts
    grammar          of the answer. The text ends where it is complete, whatever ignore_eos, min_tokens, allowed_tokens
                     and bad_words are
    reasoning_limit  budget of reasoning tokens before the answer
    timestamps       rule for the output of a model that transcribes speech
    min_tokens       tokens before which no end token and no stop counts
    include_special_tokens  special tokens are part of the text
    score_from       log-probabilities of the prompt's tokens from this position on are computed (`PromptScored`); only
                     earlier tokens may be cached
    label_tokens     tokens with a log-probability at every position, besides the top ones
    pooling          return one vector of the prompt's last hidden states (`Embedded`) and generate no token
    tier             scheduling order
    timeout_seconds  the answer ends with "length" and the stop "deadline" after this time, in the queue too
    progress         send `PrefillProgress` events
    emitted          output tokens that an earlier stream of the same request emitted: the output continues after them
    tokens_at_once   tokens are delivered when they are sampled, not with their text, so that a stream can be resumed
    adapter          name of a loaded LoRA adapter; "": none
    owner            slots are shared evenly between owners
    group            and within an owner between groups, such as the choices of one answer; "" is a separate group
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    overflow: Overflow | None = None
    keep: int | None = None
    protected: tuple[tuple[int, int], ...] = ()
    contents: tuple[Content, ...] = ()
    recurrent_shift: RecurrentShift = "rebuild"
    checkpoints: tuple[int, ...] = ()
    salt: bytes = b""
    cacheable: bool = True
    media: Media | None = None
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    prediction: tuple[int, ...] = ()
    grammar: Grammar | None = None
    reasoning_limit: ReasoningLimit | None = None
    timestamps: TimestampRule | None = None
    min_tokens: int = 0
    include_special_tokens: bool = False
    score_from: int | None = None
    label_tokens: tuple[int, ...] = ()
    pooling: Pooling | None = None
    tier: Tier = "default"
    timeout_seconds: float | None = None
    progress: bool = False
    emitted: tuple[int, ...] = ()
    tokens_at_once: bool = False
    adapter: str = ""
    owner: str = ""
    group: str = ""

    @property
    def prefill_only(self) -> bool:
        """Whether no token is generated: the prompt may then fill the context."""
        return self.pooling is not None or self.max_tokens == 0


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """A tokenized text for the embedding model.

    tokens         with special tokens
    token_types    0 or 1 for the two texts of a pair; empty if the model has no token types
    prompt_tokens  leading tokens of the prompt put before the text, special tokens included
    """

    tokens: tuple[int, ...]
    token_types: tuple[int, ...] = ()
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """Texts for the embedding model. Each gets an `Embedded` event, in order, when all are computed."""

    id: str
    inputs: tuple[EmbeddingInput, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A chat as prompt tokens, with values for `Request`.

    keep               tokens of the leading system messages; None: there are none
    generation_prompt  text of the template after the last message, where the answer begins
    contents           images and sounds, ascending
    """

    tokens: tuple[int, ...]
    keep: int | None = None
    checkpoints: tuple[int, ...] = ()
    protected: tuple[tuple[int, int], ...] = ()
    generation_prompt: str = ""
    contents: tuple[Content, ...] = ()
