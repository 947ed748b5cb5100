"""What a grammar lets a model say, its reader understands: calls follow their schemas, and choices are kept."""

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
from engine.chat_format.detection import Vocabulary, detect_chat_format
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
from tests.engine.chat_format.speakers import SPEAKERS, calls_of, read

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

everyone = pytest.mark.parametrize("name", SPEAKERS)


@cache
def vocabulary(name: str) -> tuple[PreTrainedTokenizerFast, LLTokenizer, ChatFormat]:
    """The bundled tokenizer, to which the markers of a format are added as special tokens, and the format's dialect."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    speaker = SPEAKERS[name]
    special = [token for token in speaker.tokens if not token.isalpha()]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    added = {str(token): number for token, number in tokenizer.get_added_vocab().items()}

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    dialect = detect_chat_format(speaker.template, Vocabulary(added, frozenset(special), encode))
    return tokenizer, from_tokenizer(tokenizer), dialect


def dialect(name: str) -> ChatFormat:
    """A format's dialect in that vocabulary."""
    return vocabulary(name)[2]


def walk(name: str, source: str, random: Random) -> str | None:
    """A random text that a grammar allows, mostly ended where it may; None where it did not end in time."""
    tokenizer, llguidance, _ = vocabulary(name)
    matcher = LLMatcher(llguidance, LLMatcher.grammar_from_lark(source))
    assert not matcher.is_error(), f"{matcher.get_error()}\n{source}"
    tokens: list[int] = []
    for _ in range(LONGEST):
        if matcher.is_accepting() and (matcher.is_stopped() or random.random() < 0.3):
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.setdiff1d(np.flatnonzero(mask), llguidance.eos_tokens)
        # A marker ends what would else go on for long; the bundled model's own tokens come before all of them.
        marks = allowed[allowed >= ORDINARY]
        token = int(random.choice(marks if len(marks) and random.random() < 0.3 else allowed))
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return None


def walks(
    name: str, choice: ToolChoice, body: AnswerConstraint | None = None, opened: str = ""
) -> list[list[AnswerDelta]]:
    """What a reader says of random answers."""
    speaker, random = SPEAKERS[name], Random(f"{name} {choice} {body}")
    opened = speaker.opened + opened
    grammar = dialect(name).grammar(TOOLS, choice, body, opened)
    assert grammar is not None
    texts = [text for _ in range(WALKS) if (text := walk(name, grammar.source, random)) is not None]
    tools = [] if choice.mode == "none" else TOOLS
    return [read(dialect(name), [text], tools, opened) for text in texts]


def check_calls(pieces: list[AnswerDelta]) -> None:
    """Every call is of a tool, and its arguments follow the schema."""
    for called, arguments in calls_of(pieces):
        tool = next(tool for tool in TOOLS if tool.name == called)
        jsonschema.validate(json.loads(arguments), json.loads(tool.parameters))


@everyone
def test_required_calls_are_made_and_follow_their_schemas(name: str) -> None:
    """At least one call and no text, whatever else the model would say."""
    for pieces in walks(name, ToolChoice("required")):
        check_calls(pieces)

        assert calls_of(pieces)
        assert not [piece for piece in pieces if isinstance(piece, TextDelta)], pieces


@everyone
def test_a_named_tool_is_called_once_where_calls_are_not_parallel(name: str) -> None:
    """One call, of that tool."""
    for pieces in walks(name, ToolChoice("required", ("get_weather",), parallel=False)):
        check_calls(pieces)

        assert ["get_weather"] == [piece.name for piece in pieces if isinstance(piece, ToolCallStart)]


@everyone
def test_strict_tools_are_kept_to_beside_free_text(name: str) -> None:
    """Calls may be made or not; those that are made follow their schemas."""
    for pieces in walks(name, ToolChoice("auto")):
        check_calls(pieces)


@everyone
def test_no_calls_are_written_where_none_may_be(name: str) -> None:
    """What is said holds nothing that a reader with tools would take for a call."""
    speaker = SPEAKERS[name]
    grammar = dialect(name).grammar(TOOLS, ToolChoice("none"), None, speaker.opened)
    assert grammar is not None
    texts = [walk(name, grammar.source, Random(seed)) for seed in range(WALKS)]

    assert [[]] * WALKS == [calls_of(read(dialect(name), [text or ""], TOOLS, speaker.opened)) for text in texts]


@everyone
def test_a_body_follows_its_schema_behind_reasoning(name: str) -> None:
    """The prompt opened reasoning: the answer is the body, or calls."""
    opens = SPEAKERS[name].reasoning[0]
    for pieces in walks(name, ToolChoice("auto"), AnswerConstraint("json_schema", json.dumps(BODY)), opens):
        check_calls(pieces)
        text = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))

        assert bool(text) != bool(calls_of(pieces))
        if text:
            jsonschema.validate(json.loads(text), BODY)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (AnswerConstraint("regex", r"[a-c/]{3}"), lambda text: set(text) <= set("abc/") and len(text) == 3),
        (AnswerConstraint("choices", choices=('yes "sir"', "no\n")), lambda text: text in ('yes "sir"', "no\n")),
        (AnswerConstraint("json_object"), lambda text: isinstance(json.loads(text), dict)),
        (AnswerConstraint("grammar", 'start: "a" x\nx: "b" | "c"'), lambda text: text in ("ab", "ac")),
        (AnswerConstraint("grammar", 'root ::= "a" ("b" | "c")'), lambda text: text in ("ab", "ac")),
    ],
)
def test_bodies_of_every_kind(body: AnswerConstraint, said: Callable[[str], bool]) -> None:
    """Without tools the answer is what the client asked for."""
    grammar = dialect("hermes").grammar([], ToolChoice(), body, "<think></think>")
    assert grammar is not None
    texts = [text for seed in range(5) if (text := walk("hermes", grammar.source, Random(seed))) is not None]

    assert texts
    assert all(said(text) for text in texts)


def test_nothing_is_constrained_that_need_not_be() -> None:
    """Tools that are not strict, and no tools: no grammar."""
    loose = [Tool("f")]

    assert dialect("hermes").grammar(loose, ToolChoice(), None, "") is None
    assert dialect("hermes").grammar([], ToolChoice("none"), None, "") is None
    assert dialect("hermes").grammar(loose, ToolChoice(parallel=False), None, "") is not None


def test_what_cannot_be_done_is_refused() -> None:
    """A call where there is no tool, or no way to call one."""
    with pytest.raises(InvalidRequest):
        dialect("hermes").grammar([], ToolChoice("required"), None, "")
    with pytest.raises(InvalidRequest):
        detect_chat_format("", Vocabulary({}, frozenset(), lambda _: [])).grammar(
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
    ],
    ids=lambda source: source[:30],
)
def test_a_grammar_that_cannot_be_read_is_refused(source: str) -> None:
    """Whatever its reader raises."""
    with pytest.raises(InvalidRequest, match="neither Lark nor GBNF"):
        dialect("hermes").grammar([], ToolChoice(), AnswerConstraint("grammar", source), "")


def test_reasoning_may_come_before_required_calls() -> None:
    """Where the model may reason, it still may, and the calls follow."""
    found = [pieces for pieces in walks("hermes tokens", ToolChoice("required"), opened="<think>\n")]

    assert all(isinstance(pieces[0], ReasoningDelta | ToolCallStart) for pieces in found)
    assert any(isinstance(pieces[0], ReasoningDelta) for pieces in found)


@everyone
def test_a_loose_schema_is_kept_as_far_as_it_can_be(name: str) -> None:
    """What llguidance does not know in the schema of a tool that is not strict costs that keyword only."""
    unknown = {"type": "string", "pattern": "^(?=x)", "not": {"const": "y"}, "format": "moon"}
    schema = {"type": "object", "properties": {"a": unknown, "b": True}, "dependentRequired": {"a": ["b"]}}
    loose = [Tool("ring-2", "", json.dumps(schema))]
    grammar = dialect(name).grammar(loose, ToolChoice("required"), None, SPEAKERS[name].opened)

    assert grammar is not None
    assert not LLMatcher(vocabulary(name)[1], LLMatcher.grammar_from_lark(grammar.source)).get_error()


@everyone
@pytest.mark.parametrize("times", [2, 9])
def test_a_schema_that_contains_itself_many_times_is_written_soon(name: str, times: int) -> None:
    """In its choices or its members: what is behind some hundreds of them is left free."""
    choices = {"anyOf": [{"$ref": "#/properties/a"}] * times}
    members = {"type": "object", "properties": {f"m{at}": {"$ref": "#"} for at in range(times)}}
    began = time.thread_time()
    for schema in ({"type": "object", "properties": {"a": choices}}, members):
        tool = Tool("f", "", json.dumps(schema), strict=True)
        SPEAKERS[name].dialect.grammar([tool], ToolChoice("required", ("f",)), None, "")

    assert time.thread_time() - began < 2
