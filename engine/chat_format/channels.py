"""Answers that are messages of their own, each with a header that says whom it is for (OpenAI's harmony).

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text

A call is a message to `functions.name`. https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.chat_format.calls import arguments
from engine.chat_format.json_text import read_json
from engine.chat_format.lark import Lark, alternatives
from engine.chat_format.message import Body, Tool, ToolChoice
from engine.chat_format.source import Emit, Literals, Source, Steps
from engine.chat_format.speech import Speech
from engine.types.request import Thinking

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_ENDS = Literals((END, CALL, RETURN, START, CHANNEL))
_HEADER = Literals((MESSAGE,))
_PLACE = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_THOUGHTS = "analysis"


@dataclass(frozen=True, slots=True)
class Channels:
    """How such an answer is read and written.

    last   the tokens that end reasoning
    first  the token that names its channel
    """

    last: tuple[int, ...] = ()
    first: int | None = None
    reasons: bool = field(default=True, init=False)
    calls: bool = field(default=True, init=False)

    def limit(self, budget: int, opened: str) -> Thinking | None:
        """A limit to the reasoning, which is the first message; None: the prompt has begun another."""
        header, begun = _opened(opened)
        if begun:
            return Thinking(None, self.last, budget) if _THOUGHTS in header else None
        return None if self.first is None else Thinking(self.first, self.last, budget)

    def read(self, source: Source, speech: Speech, tools: Mapping[str, Tool], opened: str) -> Steps[None]:
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

    def _message(self, source: Source, speech: Speech, tools: Mapping[str, Tool], header: str) -> Steps[None]:
        to, place = _RECIPIENT.search(header), _PLACE.search(header)
        name = to.group(1) if to else ""
        if name.startswith(_FUNCTIONS) and tools:
            speech.call(name.removeprefix(_FUNCTIONS))
            if (yield from source.peek()) == "{":
                yield from read_json(source, speech.arguments)
            if (yield from _pass(source, speech.arguments)) and not speech.argued:
                speech.arguments("{}")
        elif (name and not name.startswith(_FUNCTIONS)) or (place and place.group(1) == _THOUGHTS):
            yield from _pass(source, speech.think)
        else:
            yield from _pass(source, speech.say)
        speech.part()

    def write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, body: Body | None, opened: str) -> str:
        """Reasoning, then a call or the answer itself. A call ends the answer, so there is one at most."""
        header, begun = _opened(opened)
        thoughts = f"{lark.until(END)} {lark.literal(START)} {lark.letters('assistant')}"
        more = f"({self._head(lark, _THOUGHTS)} {thoughts})*"
        text = lark.body(body) if body else lark.text(*MARKERS)
        final = f"{self._head(lark, 'final')} {text}"
        calls = [self._write_call(lark, tool) for tool in tools] if choice.mode != "none" else []
        if begun and _THOUGHTS not in header:
            return text
        if begun:
            more = f"{thoughts} {more}"
        if not calls:
            return f"{more} {final}"
        # Before a call the model may say what it is about to do.
        aside = f"({self._head(lark, 'commentary')} {thoughts})?" if choice.mode == "auto" and not body else ""
        answers = calls if choice.mode == "required" else [*calls, final]
        return f"{more} {aside} {alternatives(answers)}"

    def _head(self, lark: Lark, channel: str) -> str:
        return f"{lark.literal(CHANNEL)} {lark.letters(channel)} {lark.literal(MESSAGE)}"

    def _write_call(self, lark: Lark, tool: Tool) -> str:
        header = f"{lark.literal(CHANNEL)} {lark.letters(f'commentary to={_FUNCTIONS}{tool.name} ')}"
        header += f" {lark.literal(CONSTRAIN)} {lark.letters('json')} {lark.literal(MESSAGE)}"
        return lark.rule(f"{header} {arguments(lark, tool)}")


def _opened(opened: str) -> tuple[str, bool]:
    """The header of the message that the prompt has begun, and whether its text has begun too."""
    header, begun, _ = opened.rpartition(START)[2].partition(MESSAGE)
    return header, bool(begun)


def _header(source: Source) -> Steps[str]:
    """The header of the next message up to its text; "" where text comes without one."""
    yield from source.skip_space()
    for first in (START, CHANNEL, "to="):
        if (yield from source.accept(first)):
            parts = [first]
            yield from source.until(_HEADER, parts.append)
            return "".join(parts)
    return ""


def _pass(source: Source, emit: Emit) -> Steps[bool]:
    """Pass on the text of a message; whether it has ended."""
    found = yield from source.until(_ENDS, emit)
    if found in (START, CHANNEL):
        source.unread(found)
    return bool(found)
