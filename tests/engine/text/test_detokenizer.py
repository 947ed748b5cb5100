"""Streamed text of every kind of tokenizer equals the text of all tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from transformers import ByT5Tokenizer, PerceiverTokenizer

from engine.load.load import LoadedModel
from engine.output.text import TextStream
from engine.text.tokenizer import Tokenizer
from engine.types.events import TokenLogprob
from engine.types.request import SamplingParams
from tests.engine.kit.models import VOCABULARY, core
from tests.engine.kit.play import Job, ask, play
from tests.engine.kit.tokenizers import (
    BYTES,
    KINDS,
    expected,
    faults,
    random_stream,
    served,
    streamed,
    tokenizer_of,
    vocabulary,
    whole,
)

FALLBACK = [kind for kind in KINDS if "fallback" in kind]


def numbers(kind: str, *pieces: str) -> list[int]:
    """The ids of pieces."""
    return [vocabulary(kind)[piece] for piece in pieces]


def in_bytes(kind: str, text: str | bytes) -> list[int]:
    """A text as byte tokens."""
    return numbers(kind, *(BYTES[byte] for byte in (text.encode() if isinstance(text, str) else text)))


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_equals_decoding_all_tokens(kind: str) -> None:
    """Pieces, bytes, invalid bytes, special tokens and stop strings after any prompt."""
    assert [] == [fault for seed in range(100) for fault in faults(kind, seed)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_streams_equal_decoding_all_tokens(kind: str) -> None:
    """The same for 10^5 texts."""
    assert [] == [fault for seed in range(10**5 // len(KINDS) + 1) for fault in faults(kind, seed)]


@pytest.mark.parametrize("kind", FALLBACK)
def test_byte_tokens_give_whole_characters(kind: str) -> None:
    """Each with its last byte."""
    parts = streamed(kind, [], in_bytes(kind, "世🦙🦙é"), special=False)

    assert ["", "", "世", "", "", "", "🦙", "", "", "", "🦙", "", "é", ""] == parts


@pytest.mark.parametrize("kind", FALLBACK)
def test_an_invalid_byte_does_not_affect_its_neighbours(kind: str) -> None:
    """It becomes one U+FFFD."""
    tokens = in_bytes(kind, b"\xe4\xb8\x96\xff\xe4\xb8\xe7\x95\x8c")

    assert "世\ufffd\ufffd\ufffd界" == "".join(streamed(kind, [], tokens, special=False))
    assert "世\ufffd\ufffd\ufffd界" == served(kind).decode(tokens)


@pytest.mark.parametrize("kind", ["byte fallback, Llama 2", "byte-level BPE"])
def test_a_character_begun_in_the_prompt_is_completed(kind: str) -> None:
    """By its last token; a replacement character of the prompt is not repeated."""
    tokens = in_bytes(kind, "世") if "fallback" in kind else served(kind).encode("世")
    tokens = tokens if "fallback" in kind else numbers(kind, *"ä¸ĸ")
    text = numbers(kind, "a")

    assert ["", "世", ""] == streamed(kind, tokens[:1], tokens[1:], special=False)
    assert ["a", ""] == streamed(kind, tokens[:1], text, special=False)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("byte", "Unigram", "Replace"))])
def test_a_skipped_special_token_strips_no_space(kind: str) -> None:
    """The token after it is not the first of the text."""
    space = "Ġa" if kind.startswith("byte-level") else "\u2581a"
    tokens = numbers(kind, "a", "</s>", "<s>", space)

    assert "a a" == "".join(streamed(kind, [], tokens, special=False))
    assert " a" == "".join(streamed(kind, tokens[:3] + tokens[1:3] * 4, tokens[3:], special=False))


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_decodes_few_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no character is ever completed, or no token has text."""
    tokenizer = Tokenizer(tokenizer_of(kind), vocabulary_size=400, context=1000)
    known = vocabulary(kind)
    piece = next(piece for piece in (BYTES[0x80], "Ģ", "\u2581", "<pad>") if piece in known)
    decoder = tokenizer.detokenizer([], special=False)
    decoded: list[int] = []
    decode = decoder._token_bytes.decode  # type: ignore[attr-defined]
    monkeypatch.setattr(decoder._token_bytes, "decode", lambda some: decoded.append(len(some)) or decode(some))  # type: ignore[attr-defined]
    for _ in range(1000):
        decoder.push(known[piece])

    assert max(decoded, default=0) <= 70


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "CTC"])
def test_token_bytes_concatenate_to_the_text(kind: str) -> None:
    for seed in range(60):
        _, tokens = random_stream(kind, Random(seed))
        start = numbers(kind, "##a" if kind.startswith("WordPiece") else "a")
        raw = b"".join(served(kind).describe_token(token, 0.0).bytes for token in tokens)
        text = whole(kind, [*start, *tokens, *start], special=True)
        end = whole(kind, start * 2, special=True)[len(whole(kind, start, special=True)) :]

        assert text.removesuffix(end) == whole(kind, start, special=True) + raw.decode(errors=errors(kind)).translate(
            {0xDC00 + byte: "\ufffd" for byte in range(0x80, 0x100)}
        )


def errors(kind: str) -> str:
    """The error handler for invalid bytes."""
    return "surrogateescape" if "fallback" in kind else "replace"


@pytest.mark.parametrize("kind", ["byte-level BPE", "byte fallback, Llama 2", "byte fallback, Gemma", "WordPiece"])
@pytest.mark.parametrize("cells", [None, 56])
def test_streamed_answers_are_complete(kind: str, cells: int | None, loaded: Callable[..., LoadedModel]) -> None:
    """Through the engine, with preemption."""
    model = dataclasses.replace(
        loaded("llama"), tokenizer=Tokenizer(tokenizer_of(kind), vocabulary_size=VOCABULARY, context=128)
    )
    engine = core(model, slots=2, cells=cells)
    prompts = {"one": (200, 40, 41), "other": tuple(range(50, 62))}
    sampling = SamplingParams(temperature=1.5, seed=7)
    jobs = [Job(ask(name, prompt, 40, ignore_eos=True, sampling=sampling)) for name, prompt in prompts.items()]
    answers = play(engine, jobs)

    for name, prompt in prompts.items():
        assert 40 == len(answers[name].tokens)
        assert expected(kind, prompt, answers[name].tokens, special=False) == answers[name].text
    if cells is not None:
        assert engine.stats().preemptions_total > 0


@pytest.mark.parametrize("kind", KINDS)
def test_logprob_offsets_are_character_positions(kind: str) -> None:
    """Skipped tokens add no characters."""
    for seed in range(40):
        prompt, tokens = random_stream(kind, Random(seed))
        stream = TextStream(served(kind).detokenizer(prompt, special=False), ())
        deltas = [stream.push(token, TokenLogprob(served(kind).describe_token(token, 0.0), ())) for token in tokens]
        entries = [entry for delta in (*deltas, stream.flush()) if delta for entry in delta.logprobs]
        lengths = [len("".join(streamed(kind, prompt, tokens[:at], special=False)[:-1])) for at in range(len(tokens))]

        assert tokens == [entry.chosen.token for entry in entries]
        assert lengths == [entry.text_offset for entry in entries]


@pytest.mark.parametrize("kind", [ByT5Tokenizer, PerceiverTokenizer])
def test_pieces_that_are_bytes(kind: Callable[[], Any]) -> None:
    """The piece of a byte is the character of its number; ByT5 drops invalid bytes, Perceiver replaces them."""
    plain = kind()
    size, random = len(plain.get_vocab()), Random(0)
    tokenizer = Tokenizer(plain, vocabulary_size=size, context=64)
    text = "a\u00e9\u20ac \u0080\u00ad"
    tokens = plain.encode(text, add_special_tokens=False)
    described = [tokenizer.describe_token(token, 0.0) for token in tokens]
    random_tokens = [[random.randrange(size) for _ in range(20)] for _ in range(200)]

    assert [bytes([byte]) for byte in text.encode()] == [token.bytes for token in described]
    assert ["a", "\ufffd", "\ufffd"] == [token.text for token in described[:3]]
    assert text.encode() == b"".join(tokenizer.token_bytes(0, size)[token] for token in tokens)
    for stream in random_tokens:
        detokenizer = tokenizer.detokenizer([], special=True)
        streamed_text = "".join(map(detokenizer.push, stream)) + detokenizer.flush()
        assert plain.decode(stream, skip_special_tokens=False) == streamed_text
