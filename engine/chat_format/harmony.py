"""OpenAI's harmony format: an answer is a sequence of messages, each with a header that names channel and recipient.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text

A tool call is a message to `functions.name`. https://cookbook.openai.com/articles/openai-harmony
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
from engine.chat_format.source import Emit, Literals, Parser, TextSource
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
    """Layout of an answer in the harmony format.

    end_tokens   tokens that end the reasoning message
    start_token  token that names the reasoning channel
    """

    end_tokens: tuple[int, ...] = ()
    start_token: int | None = None
    supports_reasoning: bool = field(default=True, init=False)
    supports_tool_calls: bool = field(default=True, init=False)

    def reasoning_limit(self, budget: int, generation_prompt: str) -> ReasoningLimit | None:
        """A limit to the reasoning, which is the first message; None: the prompt has begun another message."""
        header, has_text = _begun_message(generation_prompt)
        if has_text:
            return ReasoningLimit(None, self.end_tokens, budget) if _REASONING_CHANNEL in header else None
        return None if self.start_token is None else ReasoningLimit(self.start_token, self.end_tokens, budget)

    def parse(
        self, source: TextSource, deltas: DeltaBuffer, tools: Mapping[str, Tool], generation_prompt: str
    ) -> Parser[None]:
        """Parse the messages of an answer; the prompt may have begun the first one."""
        header, has_text = _begun_message(generation_prompt)
        while has_text or (yield from source.peek()):
            if not has_text:
                header = f"{header} {yield from _header(source)}"
            # A header without text at the end of the answer is neither a message nor text.
            if (yield from source.peek()) or has_text:
                yield from self._message(source, deltas, tools, header)
            header, has_text = "", False
        deltas.finish()

    def _message(self, source: TextSource, deltas: DeltaBuffer, tools: Mapping[str, Tool], header: str) -> Parser[None]:
        to, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        name = to.group(1) if to else ""
        if name.startswith(_FUNCTIONS) and tools:
            deltas.begin_call(name.removeprefix(_FUNCTIONS))
            if (yield from source.peek()) == "{":
                yield from stream_json(source, deltas.add_arguments)
            if (yield from _parse_text(source, deltas.add_arguments)) and not deltas.has_arguments:
                deltas.add_arguments("{}")
        elif (name and not name.startswith(_FUNCTIONS)) or (channel and channel.group(1) == _REASONING_CHANNEL):
            yield from _parse_text(source, deltas.add_reasoning)
        else:
            yield from _parse_text(source, deltas.add_text)
        deltas.end_part()

    def grammar_rule(
        self,
        lark: LarkWriter,
        tools: Sequence[Tool],
        choice: ToolChoice,
        constraint: AnswerConstraint | None,
        generation_prompt: str,
    ) -> str:
        """Reasoning, then a call or the final message. A call ends the answer, so there is at most one."""
        header, has_text = _begun_message(generation_prompt)
        reasoning = f"{lark.until(END)} {lark.literal(START)} {lark.plain_text('assistant')}"
        analysis = f"({self._head(lark, _REASONING_CHANNEL)} {reasoning})*"
        text = lark.constrained_text(constraint) if constraint else lark.text(*MARKERS)
        final = f"{self._head(lark, 'final')} {text}"
        calls = [self._write_call(lark, tool) for tool in tools] if choice.mode != "none" else []
        if has_text and _REASONING_CHANNEL not in header:
            return text
        if has_text:
            analysis = f"{reasoning} {analysis}"
        if not calls:
            return f"{analysis} {final}"
        # The model may write a preamble before a call.
        preamble = (
            f"({self._head(lark, 'commentary')} {reasoning})?" if choice.mode == "auto" and not constraint else ""
        )
        answers = calls if choice.mode == "required" else [*calls, final]
        return f"{analysis} {preamble} {alternatives(answers)}"

    def _head(self, lark: LarkWriter, channel: str) -> str:
        return f"{lark.literal(CHANNEL)} {lark.plain_text(channel)} {lark.literal(MESSAGE)}"

    def _write_call(self, lark: LarkWriter, tool: Tool) -> str:
        header = f"{lark.literal(CHANNEL)} {lark.plain_text(f'commentary to={_FUNCTIONS}{tool.name} ')}"
        header += f" {lark.literal(CONSTRAIN)} {lark.plain_text('json')} {lark.literal(MESSAGE)}"
        return lark.rule(f"{header} {arguments_rule(lark, tool)}")


def _begun_message(generation_prompt: str) -> tuple[str, bool]:
    """The header of the message that the generation prompt has begun, and whether its text has begun."""
    header, has_text, _ = generation_prompt.rpartition(START)[2].partition(MESSAGE)
    return header, bool(has_text)


def _header(source: TextSource) -> Parser[str]:
    """The header of the next message up to its text; "" if the text has no header."""
    yield from source.skip_space()
    for first in (START, CHANNEL, "to="):
        if (yield from source.accept(first)):
            parts = [first]
            yield from source.until(_HEADER, parts.append)
            return "".join(parts)
    return ""


def _parse_text(source: TextSource, emit: Emit) -> Parser[bool]:
    """Emit the text of a message; whether it is complete."""
    literal = yield from source.until(_ENDS, emit)
    if literal in (START, CHANNEL):
        source.push_back(literal)
    return bool(literal)
