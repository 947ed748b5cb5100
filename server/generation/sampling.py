"""Sampling parameters of a body, by the names of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio.to_thread

from engine.types.request import Dry, SamplingParams, Xtc
from server.http.errors import invalid_value
from server.schemas.common import Generation
from server.service import Service

Value = TypeVar("Value")
Encode = Callable[[str], Sequence[int]]
# A share of the mass that the likeliest token alone exceeds: as in llama.cpp, 0 leaves one token.
MIN_MASS = 1e-6
# llama.cpp's default.
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")


async def sampling(service: Service, body: Generation) -> SamplingParams:
    """Sampling parameters of the body; null is OpenAI's default. ApiError for token ids outside the vocabulary."""
    vocabulary = service.engine.info.vocabulary
    bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
    check_token_ids("logit_bias", [token for token, _ in bias], vocabulary)
    check_token_ids("allowed_token_ids", body.allowed_token_ids or (), vocabulary)
    dry, bad_words = await _as_tokens(service.engine.tokenizer.encode_prediction, body)
    return SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_k=max(_or(body.top_k, 0), 0),
        top_p=max(_or(body.top_p, 1.0), MIN_MASS),
        min_p=_or(body.min_p, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        repetition_penalty=_or(_alias(body, "repetition_penalty", "repeat_penalty"), 1.0),
        # -1: all tokens, which is the default.
        penalty_lookback=None if body.repeat_last_n in (None, -1) else body.repeat_last_n,
        logit_bias=bias,
        seed=body.seed,
        typical_p=max(_or(body.typical_p, 1.0), MIN_MASS),
        # llama.cpp disables it by -1.
        top_n_sigma=max(_or(body.top_n_sigma, 0.0), 0.0),
        dry=dry,
        xtc=Xtc(body.xtc_probability, _or(body.xtc_threshold, 0.1)) if body.xtc_probability else None,
        allowed_tokens=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=bad_words,
    )


def check_token_ids(field: str, ids: Sequence[int], vocabulary: int) -> None:
    """ApiError for an id outside the vocabulary."""
    worst = max(ids, default=0)
    if worst >= vocabulary:
        raise invalid_value(field, f"this model has {vocabulary} tokens, there is no id {worst}")


async def _as_tokens(encode: Encode, body: Generation) -> tuple[Dry | None, tuple[tuple[int, ...], ...]]:
    """Parameters that are given as text and needed as tokens."""
    if not body.dry_multiplier and not body.bad_words:
        return None, ()
    return await anyio.to_thread.run_sync(_encode_texts, encode, body)


def _encode_texts(encode: Encode, body: Generation) -> tuple[Dry | None, tuple[tuple[int, ...], ...]]:
    words = [tuple(encode(form)) for word in body.bad_words or () for form in _forms(word)]
    return _dry(encode, body), tuple(dict.fromkeys(words))


def _forms(word: str) -> tuple[str, ...]:
    # Most vocabularies have separate tokens for a word after a space.
    return (word,) if word.startswith(" ") else (word, f" {word}")


def _dry(encode: Encode, body: Generation) -> Dry | None:
    if not body.dry_multiplier:
        return None
    breakers = DRY_SEQUENCE_BREAKERS if body.dry_sequence_breakers is None else body.dry_sequence_breakers
    # A breaker is its last token inside a text, as in the first version of DRY (text-generation-webui 5677).
    tokens = dict.fromkeys(encode(f"a{breaker}")[-1] for breaker in breakers)
    return Dry(
        multiplier=body.dry_multiplier,
        base=_or(body.dry_base, 1.75),
        allowed_length=_or(body.dry_allowed_length, 2),
        lookback=_or(body.dry_penalty_last_n, -1),
        breakers=tuple(tokens),
    )


def _alias(body: Generation, name: str, other: str) -> float | None:
    first: float | None = getattr(body, name)
    second: float | None = getattr(body, other)
    if first is not None and second is not None and first != second:
        raise invalid_value(other, f"it is an alias of '{name}' with another value")
    return second if first is None else first


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
