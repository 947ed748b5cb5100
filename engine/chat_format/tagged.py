"""Answers in which reasoning and calls stand between markers, and everything else is text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.chat_format.calls import Offer
from engine.chat_format.frame import Frame
from engine.chat_format.lark import ANYTHING, Lark
from engine.chat_format.message import Body, Tool, ToolChoice
from engine.chat_format.reasoning import Thoughts
from engine.chat_format.source import Literals, Source, Steps
from engine.chat_format.speech import Speech
from engine.types.request import Thinking

# Where a call may be a bare object, no text begins like one.
_NO_OBJECT = r"(\s*[^{\s](?s:.)*)?"


@dataclass(frozen=True, slots=True)
class Tagged:
    """How such an answer is read.

    silent  special tokens that are part of no text
    """

    thoughts: Thoughts | None = None
    frame: Frame | None = None
    silent: frozenset[str] = frozenset()
    _closing: Literals = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        closes = () if self.thoughts is None else (self.thoughts.closes,)
        object.__setattr__(self, "_closing", Literals((*closes, *self.silent)))

    @property
    def reasons(self) -> bool:
        """Whether the model may reason before it answers."""
        return self.thoughts is not None

    @property
    def calls(self) -> bool:
        """Whether it has a way to call tools."""
        return self.frame is not None

    def limit(self, budget: int, opened: str) -> Thinking | None:
        """A limit to the reasoning in tokens; None: there is none to limit."""
        return None if self.thoughts is None else self.thoughts.limit(budget, opened)

    def read(self, source: Source, speech: Speech, tools: Mapping[str, Tool], opened: str) -> Steps[None]:
        """Read an answer behind what the prompt ended with."""
        if self.thoughts is not None:
            yield from self._reasoning(self.thoughts, source, speech, opened)
        if self.frame is not None and tools:
            yield from self._calls(self.frame, source, speech, tools)
        else:
            yield from self._text(Literals(self.silent), source, speech)
        speech.finish()

    def write(self, lark: Lark, tools: Sequence[Tool], choice: ToolChoice, body: Body | None, opened: str) -> str:
        """An answer as an expression of the grammar."""
        thoughts = "" if self.thoughts is None else self.thoughts.write(lark, opened)
        if self.frame is None or not tools:
            return f"{thoughts} {lark.body(body) if body else lark.text()}"
        return f"{thoughts} {self._answer(lark, self.frame, tools, choice, body)}"

    def _answer(self, lark: Lark, frame: Frame, tools: Sequence[Tool], choice: ToolChoice, body: Body | None) -> str:
        text = lark.text(frame.opening[0], like=(_NO_OBJECT if frame.bare else ANYTHING,))
        calls = frame.write(lark, tools, parallel=choice.parallel)
        if choice.mode == "required":
            return calls
        if body is not None:
            return lark.body(body) if choice.mode == "none" else f"({lark.body(body)} | {calls})"
        if choice.mode == "none":
            return text
        rest = frame.write_rest(lark, tools, parallel=choice.parallel)
        later = f"({lark.until(frame.opening[0])} {rest} {lark.space()}){'*' if choice.parallel else '?'} {text}"
        return f"({calls} | {later})" if frame.bare else later

    def _reasoning(self, thoughts: Thoughts, source: Source, speech: Speech, opened: str) -> Steps[None]:
        if not thoughts.begun(opened):
            if thoughts.over(opened):
                return
            if not (yield from source.tried(source.expect("", thoughts.opens))):
                return
            yield from source.accept(thoughts.label)
        while (found := (yield from source.until(self._closing, speech.think))) in self.silent:
            if found == thoughts.closes:
                break
        if found:
            speech.part()

    def _text(self, literals: Literals, source: Source, speech: Speech) -> Steps[None]:
        while (yield from source.until(literals, speech.say)):
            pass

    def _calls(self, frame: Frame, source: Source, speech: Speech, tools: Mapping[str, Tool]) -> Steps[None]:
        opening = frame.opening[0]
        offer = Offer(tools, only=frame.bare)
        if frame.bare:
            called = yield from frame.read_bare(source, speech, offer)
            # Without a marker nothing says that the beginning of an object is no text.
            if called and source.broken:
                source.drop()
        literals = Literals((opening, *self.silent))
        while found := (yield from source.until(literals, speech.say)):
            if found != opening:
                continue
            called = yield from frame.read(source, speech, offer)
            if source.broken:
                source.drop()
                speech.part()
            elif not called and opening not in self.silent:
                speech.say(opening)
