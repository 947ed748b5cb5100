"""Conversations: what the generators write, the trainer reads and the evaluation asks.

Owns the shape of a conversation and its rendering to text. The rendering is the Python twin of
`template.jinja`; a test holds the two equal. It exists because the trainer must know which characters
the assistant speaks, and a rendered template no longer says so.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

TOOLS_HEAD = "# Tools\n\nYou may call one of these functions to help the user.\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n"
    '<tool_call>\n{"name": "function", "arguments": {"name": "value"}}\n</tool_call>'
)

Schema: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, object]

    def text(self) -> str:
        """The call as the model writes it."""
        body = json.dumps({"name": self.name, "arguments": dict(self.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: role is system, user, assistant or tool."""

    role: str
    content: str
    call: ToolCall | None = None

    def text(self) -> str:
        """What stands between the header and the end of turn."""
        if self.call is None:
            return self.content
        return f"{self.content}\n{self.call.text()}" if self.content else self.call.text()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A dialogue whose last turn is the wanted answer.

    topic   the generator's name, a row of the evaluation table
    exact   whether the last turn is the only right answer; stories and lists are open
    raw     plain text without turns, for /v1/completions; then there is one message
    """

    topic: str
    messages: tuple[Message, ...]
    tools: tuple[Schema, ...] = ()
    exact: bool = True
    raw: bool = False

    @property
    def answer(self) -> str:
        """The text of the last turn."""
        return self.messages[-1].text()

    def prompt(self) -> list[dict[str, object]]:
        """All but the last turn, as the chat template takes them."""
        return [_plain(message) for message in self.messages[:-1]]

    def after(self, earlier: "Conversation") -> "Conversation":
        """This conversation with another one, without a system turn, spoken before it."""
        return replace(self, messages=(*earlier.messages, *self.messages))


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of rendered text; `spoken` marks what the assistant says."""

    text: str
    spoken: bool


def render(conversation: Conversation) -> Iterator[Segment]:
    """Yield the text of a conversation in order; the pieces tokenize alone as they do joined."""
    if conversation.raw:
        yield Segment(conversation.answer + "<|im_end|>", True)
        return
    messages = conversation.messages
    system, turns = (messages[0].content, messages[1:]) if messages[0].role == "system" else ("", messages)
    head = _system(system, conversation.tools)
    pending = f"<|im_start|>system\n{head}<|im_end|>\n" if head else ""
    for message in turns:
        if message.role == "assistant":
            yield Segment(f"{pending}<|im_start|>assistant\n", False)
            yield Segment(f"{message.text()}<|im_end|>", True)
            pending = "\n"
        elif message.role == "tool":
            pending += f"<|im_start|>user\n<tool_response>\n{message.content}\n</tool_response><|im_end|>\n"
        else:
            pending += f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n"


def _system(content: str, tools: tuple[Schema, ...]) -> str:
    if not tools:
        return content
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    offer = TOOLS_HEAD + lines + TOOLS_TAIL
    return f"{content}\n\n{offer}" if content else offer


def _plain(message: Message) -> dict[str, object]:
    plain: dict[str, object] = {"role": message.role, "content": message.content}
    if message.call is not None:
        function = {"name": message.call.name, "arguments": dict(message.call.arguments)}
        plain["tool_calls"] = [{"type": "function", "function": function}]
    return plain
