"""Answers that are messages of their own, each with a header that says whom it is for (OpenAI's harmony).

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text

A call is a message to `functions.name`. https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.chat_format.calls import arguments_rule
from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.json_text import stream_json
from engine.chat_format.lark_writer import LarkWriter, alternatives
from engine.chat_format.message import AnswerConstraint, Tool, ToolChoice
from engine.chat_format.source import Emit, Literals, Steps, TextSource
from engine.types.request import ReasoningLimit

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_ENDS = Literals((END, CALL, RETURN, START, CHANNEL))
_HEADER = Literals((MESSAGE,))
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_REASONING_CHANNEL = "analysis"


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """How such an answer is read and written.

    last   the tokens that end reasoning
    first  the token that names its channel
    """

    last: tuple[int, ...] = ()
    first: int | None = None
    supports_reasoning: bool = field(default=True, init=False)
    supports_tool_calls: bool = field(default=True, init=False)

    def reasoning_limit(self, budget: int, opened: str) -> ReasoningLimit | None:
        """A limit to the reasoning, which is the first message; None: the prompt has begun another."""
        header, begun = _opened(opened)
        if begun:
            return ReasoningLimit(None, self.last, budget) if _REASONING_CHANNEL in header else None
        return None if self.first is None else ReasoningLimit(self.first, self.last, budget)

    def parse(self, source: TextSource, speech: DeltaBuffer, tools: Mapping[str, Tool], opened: str) -> Steps[None]:
        """Read the messages of an answer, of which the prompt may have begun the first."""
        header, begun = _opened(opened)
        while begun or (yield from source.peek()):
            if not begun:
                header = f"{header} {yield from _header(source)}"
            # A header that the text ends in is no message, and no text either.
            if (yield from source.peek()) or begun:
                yield from self._message(source, speech, tools, header)
            header, begun = "", False
        speech.finish()

    def _message(self, source: TextSource, speech: DeltaBuffer, tools: Mapping[str, Tool], header: str) -> Steps[None]:
        to, place = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        name = to.group(1) if to else ""
        if name.startswith(_FUNCTIONS) and tools:
            speech.begin_call(name.removeprefix(_FUNCTIONS))
            if (yield from source.peek()) == "{":
                yield from stream_json(source, speech.add_arguments)
            if (yield from _parse_text(source, speech.add_arguments)) and not speech.has_arguments:
                speech.add_arguments("{}")
        elif (name and not name.startswith(_FUNCTIONS)) or (place and place.group(1) == _REASONING_CHANNEL):
            yield from _parse_text(source, speech.add_reasoning)
        else:
            yield from _parse_text(source, speech.add_text)
        speech.end_part()

    def grammar_rule(
        self, lark: LarkWriter, tools: Sequence[Tool], choice: ToolChoice, body: AnswerConstraint | None, opened: str
    ) -> str:
        """Reasoning, then a call or the answer itself. A call ends the answer, so there is one at most."""
        header, begun = _opened(opened)
        thoughts = f"{lark.until(END)} {lark.literal(START)} {lark.plain_text('assistant')}"
        more = f"({self._head(lark, _REASONING_CHANNEL)} {thoughts})*"
        text = lark.answer_body(body) if body else lark.text(*MARKERS)
        final = f"{self._head(lark, 'final')} {text}"
        calls = [self._write_call(lark, tool) for tool in tools] if choice.mode != "none" else []
        if begun and _REASONING_CHANNEL not in header:
            return text
        if begun:
            more = f"{thoughts} {more}"
        if not calls:
            return f"{more} {final}"
        # Before a call the model may say what it is about to do.
        aside = f"({self._head(lark, 'commentary')} {thoughts})?" if choice.mode == "auto" and not body else ""
        answers = calls if choice.mode == "required" else [*calls, final]
        return f"{more} {aside} {alternatives(answers)}"

    def _head(self, lark: LarkWriter, channel: str) -> str:
        return f"{lark.literal(CHANNEL)} {lark.plain_text(channel)} {lark.literal(MESSAGE)}"

    def _write_call(self, lark: LarkWriter, tool: Tool) -> str:
        header = f"{lark.literal(CHANNEL)} {lark.plain_text(f'commentary to={_FUNCTIONS}{tool.name} ')}"
        header += f" {lark.literal(CONSTRAIN)} {lark.plain_text('json')} {lark.literal(MESSAGE)}"
        return lark.rule(f"{header} {arguments_rule(lark, tool)}")


def _opened(opened: str) -> tuple[str, bool]:
    """The header of the message that the prompt has begun, and whether its text has begun too."""
    header, begun, _ = opened.rpartition(START)[2].partition(MESSAGE)
    return header, bool(begun)


def _header(source: TextSource) -> Steps[str]:
    """The header of the next message up to its text; "" where text comes without one."""
    yield from source.skip_space()
    for first in (START, CHANNEL, "to="):
        if (yield from source.accept(first)):
            parts = [first]
            yield from source.until(_HEADER, parts.append)
            return "".join(parts)
    return ""


def _parse_text(source: TextSource, emit: Emit) -> Steps[bool]:
    """Pass on the text of a message; whether it has ended."""
    found = yield from source.until(_ENDS, emit)
    if found in (START, CHANNEL):
        source.push_back(found)
    return bool(found)
