"""Requests to the engine: frozen, without tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Overflow = Literal["length", "shift"]
RecurrentShift = Literal["rebuild", "carry"]
DrafterChoice = Literal["auto", "none", "lookup", "model", "mtp"]
Pooling = Literal["last", "mean"]
# Who is served first: all of "priority" before "default" before "flex".
Tier = Literal["priority", "default", "flex"]
# Tokens of a draft at most. A longer one pays in copied text alone, and there the next one follows at once.
MAX_DRAFT_TOKENS = 16
# How latent attention is computed (engine/kernels/latent.py): always one way, or the cheaper one.
MlaMode = Literal["auto", "absorb", "expand"]


@dataclass(frozen=True, slots=True)
class Dry:
    """Don't repeat yourself: what would repeat a long sequence of earlier tokens is made less likely.

    A token that would go on as after n tokens that are said again, n >= allowed_length, loses
    multiplier x base^(n - allowed_length). Longer repetitions than allowed_length + 64 cost no more.

    lookback      earlier tokens that are looked at; -1: all
    breakers  tokens that no repeated sequence goes across
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
    """What all generated tokens together must follow, in llguidance's dialect of Lark, from the rule `start` on.

    Special tokens are terminals of their own, `<name>` or `<[id]>`. Where the grammar may end, so may the text.
    """

    source: str


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """A limit to what a model says before its answer.

    start_token   the token that begins it; None: the prompt has begun it already
    end_tokens  the tokens that end it, which are forced when `budget` tokens have been said in it, as soon as the grammar
            allows them; where it begins again, tokens of before count
    """

    start_token: int | None
    end_tokens: tuple[int, ...]
    budget: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen (algorithm: sampling.emit), in this order: logit_bias; repetition, frequency and
    presence penalty; dry; what the request's rules forbid (rules.py); temperature; top_n_sigma; top_k; typical_p;
    top_p; min_p; xtc. Each filter sees what those before it left. They mean what llama.cpp means by them, but behind
    the temperature, as in transformers; at temperature 0 none of them matters.

    temperature         0 takes the likeliest token; else logits are divided by it
    top_k, top_p, min_p the usual filters; 0, 1 and 0 switch them off
    frequency_penalty   subtracted once per occurrence in the output so far
    presence_penalty    subtracted once if the token is in the output so far
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output; 1 is off
    logit_bias          (token, bias) pairs
    seed                any 64-bit integer; None draws one
    typical_p           locally typical sampling (arXiv 2202.00666): the share that is kept; 1 is off
    top_n_sigma         tokens more than this many standard deviations below the best logit go (arXiv 2411.07641); 0 is
                        off
    dry, xtc            None is off
    allowed_tokens      nothing else is ever said; None: anything may be
    bad_words           sequences of tokens that are never completed; they may begin in the prompt
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
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    dry: Dry | None = None
    xtc: Xtc | None = None
    allowed_tokens: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


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
        return cls(ordered, media_digest(ordered))


def media_digest(arrays: Sequence[tuple[str, Array]]) -> bytes:
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
    tokens   of each draft, 0 to MAX_DRAFT_TOKENS, where so many can be guessed; None: what the engine's settings say
    """

    drafter: DrafterChoice = "auto"
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    max_tokens  new tokens at most; None: as many as the context leaves (with overflow "shift": one context full)
    stop_regex  regular expressions: behind the first match of one the text ends, and the match is part of it
    logprobs    None: no log-probabilities; n: those of the chosen token and of the n likeliest
    overflow    what happens at a full context: end with "length", or shift the context; None: the engine's setting
    keep        tokens at the start that a shift never drops, half of the context at most; None: the leading special
                tokens and 4 more
    protected   token ranges [start, stop) of the prompt that a shift neither drops nor cuts; where nothing else may go
                the answer ends with "length"
    bidirectional      token ranges [start, stop) of the prompt, ascending, whose tokens see those behind them in the range too
                (the tokens of an image in Gemma 3); no shift drops or cuts one
    recurrent_shift  what a shift makes of recurrent states: "rebuild" computes them from the tokens that stay, "carry"
                leaves them as they are, having seen the dropped text
    checkpoints       places in the prompt that are worth resuming at, such as ends of messages; they never change the text
    salt        what is remembered under another salt does not exist for this request
    media       what the model's encoder is to look at; None where it has no encoder, or may do without
    speculation  who may guess at the text; it never changes the text
    prediction  tokens that the client expects the answer to be made of, to guess from
    grammar     what the answer must follow. Where it is complete the text ends, whatever ignore_eos, min_tokens,
                allowed_tokens and bad_words say
    reasoning_limit    a limit to what is said before the answer
    min_tokens  before so many tokens nothing ends the text, neither its end nor a stop
    include_special_tokens     whether special tokens are part of the text
    score_from  the prompt's tokens from this position on are scored (`PromptScored`); what stands before may be reused
    label_tokens      tokens whose log-probability is reported wherever one is, beside the likeliest
    pooling     how the last layer's states of the prompt become one vector (`Embedded`); nothing is generated
    tier        who is served first
    timeout_seconds  after this long the answer ends with "length" and the stop "deadline", wherever it is
    progress    whether `Progress` events tell how far the prompt is
    owner       slots are shared fairly between owners
    group       and within an owner between groups, such as the choices of one answer; "": a group of its own
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
    bidirectional: tuple[tuple[int, int], ...] = ()
    recurrent_shift: RecurrentShift = "rebuild"
    checkpoints: tuple[int, ...] = ()
    salt: bytes = b""
    media: Media | None = None
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    prediction: tuple[int, ...] = ()
    grammar: Grammar | None = None
    reasoning_limit: ReasoningLimit | None = None
    min_tokens: int = 0
    include_special_tokens: bool = False
    score_from: int | None = None
    label_tokens: tuple[int, ...] = ()
    pooling: Pooling | None = None
    tier: Tier = "default"
    timeout_seconds: float | None = None
    progress: bool = False
    owner: str = ""
    group: str = ""

    @property
    def prefill_only(self) -> bool:
        """Whether nothing is to be said: then the prompt may fill the context."""
        return self.pooling is not None or self.max_tokens == 0


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """A text as the embedding model reads it.

    tokens  with the special ones around it
    token_types   which text of a pair each token belongs to, where the model wants to know; else empty
    prompt_tokens  tokens at the start that the text was given for its purpose, special ones in front of them included
    """

    tokens: tuple[int, ...]
    token_types: tuple[int, ...] = ()
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """Texts for the embedding model. Each becomes an `Embedded`, in their order, when all are computed."""

    id: str
    inputs: tuple[EmbeddingInput, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the tokens of a prompt, and what `Request` should know of it.

    keep    tokens of the leading system messages; None: there are none
    generation_prompt  what the template wrote behind the last message, where the answer goes on
    """

    tokens: tuple[int, ...]
    keep: int | None = None
    checkpoints: tuple[int, ...] = ()
    protected: tuple[tuple[int, int], ...] = ()
    generation_prompt: str = ""
