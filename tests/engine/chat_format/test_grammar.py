"""Random answers under a grammar are parsed: tool calls follow their schemas, and tool choices are enforced."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.detection import AddedVocabulary, detect_chat_format
from engine.chat_format.message import (
    AnswerConstraint,
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolCallStart,
    ToolChoice,
)
from engine.errors import InvalidRequest
from tests.engine.chat_format.examples import EXAMPLES, calls_of, every_format, read

BUNDLED = Path(__file__).parents[3] / "models" / "target"
ORDINARY = 2048
LONGEST = 300
WALKS = 2

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 4},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "sure": {"type": "boolean"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "spots": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "where": {"$ref": "#/$defs/point"},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    },
    "required": ["city", "days", "where"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [Tool("get_weather", "", json.dumps(SCHEMA), strict=True), Tool("ring-2", "", json.dumps(EMPTY), strict=True)]
BODY = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@cache
def vocabulary(name: str) -> tuple[PreTrainedTokenizerFast, LLTokenizer, ChatFormat]:
    """The bundled tokenizer with the markers of a format as special tokens, and the detected chat format."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    example = EXAMPLES[name]
    special = [token for token in example.tokens if not token.isalpha()]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    added = {str(token): number for token, number in tokenizer.get_added_vocab().items()}

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    chat_format = detect_chat_format(example.template, AddedVocabulary(added, frozenset(special), encode))
    return tokenizer, from_tokenizer(tokenizer), chat_format


def chat_format(name: str) -> ChatFormat:
    return vocabulary(name)[2]


def walk(name: str, source: str, random: Random) -> str | None:
    """A random text under a grammar, usually ended at a possible end; None: not ended within LONGEST tokens."""
    tokenizer, llguidance, _ = vocabulary(name)
    matcher = LLMatcher(llguidance, LLMatcher.grammar_from_lark(source))
    assert not matcher.is_error(), f"{matcher.get_error()}\n{source}"
    tokens: list[int] = []
    for _ in range(LONGEST):
        if matcher.is_accepting() and (matcher.is_stopped() or random.random() < 0.3):
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.setdiff1d(np.flatnonzero(mask), llguidance.eos_tokens)
        # Markers end parts that would be long otherwise; their ids follow the ids of the bundled model.
        marks = allowed[allowed >= ORDINARY]
        token = int(random.choice(marks if len(marks) and random.random() < 0.3 else allowed))
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return None


def walks(
    name: str, choice: ToolChoice, body: AnswerConstraint | None = None, generation_prompt: str = ""
) -> list[list[AnswerDelta]]:
    """The deltas of random answers."""
    example, random = EXAMPLES[name], Random(f"{name} {choice} {body}")
    generation_prompt = example.generation_prompt + generation_prompt
    grammar = chat_format(name).grammar(TOOLS, choice, body, generation_prompt)
    assert grammar is not None
    texts = [text for _ in range(WALKS) if (text := walk(name, grammar.source, random)) is not None]
    tools = [] if choice.mode == "none" else TOOLS
    return [read(chat_format(name), [text], tools, generation_prompt) for text in texts]


def check_calls(deltas: list[AnswerDelta]) -> None:
    """Every call is of a known tool, with arguments that follow its schema."""
    for called, arguments in calls_of(deltas):
        tool = next(tool for tool in TOOLS if tool.name == called)
        jsonschema.validate(json.loads(arguments), json.loads(tool.parameters))


@every_format
def test_required_calls_follow_their_schemas(name: str) -> None:
    """At least one call, and no text."""
    for deltas in walks(name, ToolChoice("required")):
        check_calls(deltas)

        assert calls_of(deltas)
        assert not [delta for delta in deltas if isinstance(delta, TextDelta)], deltas


@every_format
def test_named_tool_without_parallel_calls_is_called_once(name: str) -> None:
    for deltas in walks(name, ToolChoice("required", ("get_weather",), parallel=False)):
        check_calls(deltas)

        assert ["get_weather"] == [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]


@every_format
def test_strict_tools_follow_their_schemas_beside_text(name: str) -> None:
    for deltas in walks(name, ToolChoice("auto")):
        check_calls(deltas)


@every_format
def test_tool_choice_none_excludes_calls(name: str) -> None:
    """A parser with tools finds no calls in the answer."""
    example = EXAMPLES[name]
    grammar = chat_format(name).grammar(TOOLS, ToolChoice("none"), None, example.generation_prompt)
    assert grammar is not None
    texts = [walk(name, grammar.source, Random(seed)) for seed in range(WALKS)]

    assert [[]] * WALKS == [
        calls_of(read(chat_format(name), [text or ""], TOOLS, example.generation_prompt)) for text in texts
    ]


@every_format
def test_answer_follows_its_schema_after_reasoning(name: str) -> None:
    """The prompt opens reasoning: the answer is constrained, or consists of calls."""
    opens = EXAMPLES[name].reasoning[0]
    for deltas in walks(name, ToolChoice("auto"), AnswerConstraint("json_schema", json.dumps(BODY)), opens):
        check_calls(deltas)
        text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))

        assert bool(text) != bool(calls_of(deltas))
        if text:
            jsonschema.validate(json.loads(text), BODY)


@pytest.mark.parametrize(
    ("constraint", "is_allowed"),
    [
        (AnswerConstraint("regex", r"[a-c/]{3}"), lambda text: set(text) <= set("abc/") and len(text) == 3),
        (AnswerConstraint("choices", choices=('yes "sir"', "no\n")), lambda text: text in ('yes "sir"', "no\n")),
        (AnswerConstraint("json_object"), lambda text: isinstance(json.loads(text), dict)),
        (AnswerConstraint("grammar", 'start: "a" x\nx: "b" | "c"'), lambda text: text in ("ab", "ac")),
        (AnswerConstraint("grammar", 'root ::= "a" ("b" | "c")'), lambda text: text in ("ab", "ac")),
    ],
)
def test_constraints_of_every_kind(constraint: AnswerConstraint, is_allowed: Callable[[str], bool]) -> None:
    grammar = chat_format("hermes").grammar([], ToolChoice(), constraint, "<think></think>")
    assert grammar is not None
    texts = [text for seed in range(5) if (text := walk("hermes", grammar.source, Random(seed))) is not None]

    assert texts
    assert all(is_allowed(text) for text in texts)


def test_unconstrained_requests_have_no_grammar() -> None:
    """Tools without `strict`, and no tools."""
    loose = [Tool("f")]

    assert chat_format("hermes").grammar(loose, ToolChoice(), None, "") is None
    assert chat_format("hermes").grammar([], ToolChoice("none"), None, "") is None
    assert chat_format("hermes").grammar(loose, ToolChoice(parallel=False), None, "") is not None


def test_required_call_without_callable_tool_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        chat_format("hermes").grammar([], ToolChoice("required"), None, "")
    with pytest.raises(InvalidRequest):
        detect_chat_format("", AddedVocabulary({}, frozenset(), lambda _: [])).grammar(
            TOOLS, ToolChoice("required"), None, ""
        )


@pytest.mark.parametrize(
    "source",
    [
        "root ::= (",
        "root ::= missing",
        'main ::= "a"',
        'root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"',
        f'root ::= {"(" * 3000}"a"{")" * 3000}',
        f'root ::= "a"{{{"9" * 5000}}}',
        "\n" * 60_000,
    ],
    ids=lambda source: source[:30],
)
def test_invalid_grammar_is_refused(source: str) -> None:
    """Whatever exception the grammar parser raises."""
    with pytest.raises(InvalidRequest, match="neither Lark nor GBNF"):
        chat_format("hermes").grammar([], ToolChoice(), AnswerConstraint("grammar", source), "")


def test_a_long_gbnf_grammar_is_refused() -> None:
    """Its conversion takes the square of its length."""
    with pytest.raises(InvalidRequest, match="the limit is 65536"):
        chat_format("hermes").grammar([], ToolChoice(), AnswerConstraint("grammar", 'root ::= "a"\n' * 10_000), "")


@pytest.mark.parametrize("start", ["", "\n \n", "\n\t", "%llguidance {}\n", "x: y\n"])
def test_lark_is_recognized_in_any_line(start: str) -> None:
    source = f"{start}start : /a/"

    grammar = chat_format("hermes").grammar([], ToolChoice(), AnswerConstraint("grammar", source), "")
    assert grammar is not None
    assert source in grammar.source


def test_reasoning_may_come_before_required_calls() -> None:
    found = [deltas for deltas in walks("hermes tokens", ToolChoice("required"), generation_prompt="<think>\n")]

    assert all(isinstance(deltas[0], ReasoningDelta | ToolCallStart) for deltas in found)
    assert any(isinstance(deltas[0], ReasoningDelta) for deltas in found)


@every_format
def test_unsupported_keywords_of_a_loose_schema_are_ignored(name: str) -> None:
    """Keywords that llguidance does not support are ignored in schemas of tools without `strict`."""
    unknown = {"type": "string", "pattern": "^(?=x)", "not": {"const": "y"}, "format": "moon"}
    schema = {"type": "object", "properties": {"a": unknown, "b": True}, "dependentRequired": {"a": ["b"]}}
    loose = [Tool("ring-2", "", json.dumps(schema))]
    grammar = chat_format(name).grammar(loose, ToolChoice("required"), None, EXAMPLES[name].generation_prompt)

    assert grammar is not None
    assert not LLMatcher(vocabulary(name)[1], LLMatcher.grammar_from_lark(grammar.source)).get_error()


@every_format
@pytest.mark.parametrize("times", [2, 9])
def test_recursive_schema_is_converted_in_bounded_time(name: str, times: int) -> None:
    """Values beyond some hundreds are unconstrained."""
    choices = {"anyOf": [{"$ref": "#/properties/a"}] * times}
    members = {"type": "object", "properties": {f"m{at}": {"$ref": "#"} for at in range(times)}}
    began = time.thread_time()
    for schema in ({"type": "object", "properties": {"a": choices}}, members):
        tool = Tool("f", "", json.dumps(schema), strict=True)
        EXAMPLES[name].chat_format.grammar([tool], ToolChoice("required", ("f",)), None, "")

    assert time.thread_time() - began < 2
