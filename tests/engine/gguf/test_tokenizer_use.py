"""Tokenizers of GGUF files in the engine: text that is streamed, grammars and chat templates."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.gguf.chat_template import read_chat_template
from engine.gguf.tokenizer import read_tokenizer
from engine.gguf.vocabulary import read_vocabulary
from engine.grammar.compiler import GrammarCompiler
from engine.text.tokenizer import Tokenizer
from engine.types.request import Grammar
from tests.engine.gguf.vocabularies import KINDS, exported, texts

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


@cache
def served(kind: str, template: str = TEMPLATE) -> Tokenizer:
    """The engine's tokenizer of a file with a chat template."""
    values = exported(kind) | {"tokenizer.chat_template": template}
    return Tokenizer(read_tokenizer(values), vocabulary_size=size(kind), context=10**6)


def size(kind: str) -> int:
    """Tokens of the vocabulary."""
    return len(exported(kind)["tokenizer.ggml.tokens"])


def plain_texts(seed: int) -> list[str]:
    """Random texts without the spelling of special tokens, after which some kinds add a space."""
    return [text.replace("</s>", "").replace("<unk>", "") or "a" for text in texts(seed, 200)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma4"])
def test_tokens_decode_to_their_text(kind: str) -> None:
    """Of all kinds that lose nothing."""
    assert [] == [text for text in plain_texts(6) if text != served(kind).decode(served(kind).encode(text))]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_equals_the_whole(kind: str) -> None:
    """Random tokens, with incomplete characters."""
    chance, tokenizer = random.Random(7), served(kind)
    for _ in range(100):
        tokens = chance.choices(range(size(kind)), k=chance.randint(1, 30))
        stream = tokenizer.detokenizer((), special=True)
        parts = [*map(stream.push, tokens), stream.flush()]

        assert tokenizer.decode(tokens) == "".join(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_survive_a_stream_token_by_token(kind: str) -> None:
    """Characters arrive whole."""
    tokenizer = served(kind)
    for text in texts(8, 100):
        tokens = tokenizer.encode(text, add_special=False)
        stream = tokenizer.detokenizer((), special=True)
        parts = [*map(stream.push, tokens), stream.flush()]

        assert tokenizer.decode(tokens) == "".join(parts)
        assert kind in ("bert", "t5") or not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma4"])
def test_tokens_of_grammars_have_their_bytes(kind: str) -> None:
    """The concatenated bytes of the tokens of a text are its bytes."""
    tokenizer = served(kind)
    all_bytes, markers = tokenizer.token_bytes(0, size(kind)), tokenizer.markers()
    for text in plain_texts(9):
        tokens = tokenizer.encode_inside_text(text)

        assert text.encode() == b"".join(all_bytes[token] for token in tokens) or not tokens
        assert not set(markers) & set(tokens)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma4", "bert", "t5"])
def test_grammars_permit_their_text_only(kind: str) -> None:
    """Random permitted tokens are one of the two texts."""
    tokenizer, chance = served(kind), random.Random(0)
    ends = read_vocabulary(exported(kind)).end_tokens
    end = min(ends)
    grammars = GrammarCompiler(tokenizer, vocabulary_size=size(kind), end_tokens=[end])
    prefix = tokenizer.encode("the", add_special=False)
    for _ in range(5):
        matcher, tokens = grammars.matcher(Grammar('start: "the" | " there"')), list[int]()
        while len(tokens) < 20:
            mask = matcher.allowed_mask(())
            assert mask is not None
            allowed = mask.nonzero().flatten().tolist()
            tokens.append(chance.choice(allowed))
            if tokens[-1] == end:
                break
            matcher.append(tokens[-1])
        text = tokenizer.decode([*prefix, *tokens[:-1]])

        assert text.removeprefix("the") in ("the", " the", " there", "there")


def test_chat_templates_are_rendered() -> None:
    """With the special tokens of the file, and tools."""
    tokenizer = served("llama")
    prompt = tokenizer.render_chat([{"role": "user", "content": "the world"}])

    assert "<s><|user|> the world</s>" == tokenizer.decode(prompt.tokens)
    assert [1, 3, 2] == [token for token in prompt.tokens if token in (1, 2, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_in_messages_are_plain_text(kind: str) -> None:
    """Those of the template alone are special."""
    prompt = served(kind).render_chat([{"role": "user", "content": "the <|user|> world"}])

    assert 1 == list(prompt.tokens).count(3)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "maximum recursion depth"),
        ("{{ messages[0].content | dictsort }}", "no attribute 'items'"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_template_that_fails_refuses_messages(template: str, reason: str) -> None:
    """The model is served all the same."""
    tokenizer = served("llama", template)
    with pytest.raises(InvalidRequest, match=f"the model's chat template refuses this: .*{reason}"):
        tokenizer.render_chat([{"role": "user", "content": "the world"}])


def test_named_templates_are_read() -> None:
    """transformers takes `tool_use` for requests with tools."""
    values: dict[str, Any] = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "{{ tools | tojson }}",
        "tokenizer.chat_template.rag": "rag",
    }
    tokenizer = read_tokenizer(exported("llama") | values)
    tool = {"type": "function", "function": {"name": "add"}}

    assert ["default", "tool_use", "rag"] == list(tokenizer.chat_template)
    assert "plain" == tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    assert [tool] == json.loads(
        str(tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False, tools=[tool]))
    )


@pytest.mark.parametrize(
    ("values", "default"),
    [
        ({"rag": "rag", "tool_use": "tools"}, "tools"),
        ({"rag": "rag", "tool_use": "tools", "default": "plain"}, "plain"),
        ({"rag": "rag", "long": "long"}, "rag"),
        ({"rag": "rag", "tool_use": ""}, "rag"),
    ],
)
def test_a_file_with_named_templates_alone_has_a_default(values: dict[str, str], default: str) -> None:
    """As in llama.cpp, which needs no list of the names either."""
    templates = read_chat_template({f"tokenizer.chat_template.{name}": text for name, text in values.items()})

    assert templates == {**values, "default": default}


def test_a_file_without_a_template_has_none() -> None:
    """So that chats are refused, and completions are not."""
    assert read_chat_template(exported("llama")) is None
    assert not Tokenizer(read_tokenizer(exported("llama")), vocabulary_size=1000, context=99).has_chat_template
