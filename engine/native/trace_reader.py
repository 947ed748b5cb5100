"""Reads the events of a trace in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from torch import Tensor

from engine.native.comparison import is_close, require_close
from engine.native.decoder import NO_NORM, Norm, UnsupportedArchitecture
from engine.native.recurrence_trace import TracedConvolution, TracedDeltaRule, TracedStateSpace
from engine.native.trace import (
    Event,
    TracedAttention,
    TracedEmbedding,
    TracedExperts,
    TracedLinear,
    TracedNorm,
    TracedRouter,
)

# Attention or a recurrence, an MLP, or the output head.
Part = Literal["mixer", "mlp", "head"]
EventT = TypeVar("EventT", TracedEmbedding, TracedLinear, TracedNorm, TracedRouter, TracedExperts)

_UNSUPPORTED = "its layers are not made of projections, attention and an MLP"


class TraceReader:
    """A position in a trace; `read_*` methods move it, and raise UnsupportedArchitecture for another event."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events, self._at = events, 0

    def next_input(self) -> Tensor:
        """The input rows of the next event."""
        event = self._next()
        if isinstance(event, TracedAttention | TracedDeltaRule | TracedEmbedding | TracedStateSpace):
            raise UnsupportedArchitecture(_UNSUPPORTED)
        return event.input

    def next_hidden_states(self, states: Tensor) -> Tensor:
        """The input rows of the next event, which must have the shape of `states`."""
        rows = self.next_input()
        if rows.shape != states.shape:
            raise UnsupportedArchitecture("its rows change their width")
        return rows

    def read_norm(self, states: Tensor) -> tuple[Norm, Tensor]:
        """The norm with the input `states` and its output; NO_NORM and `states` if the next event is another."""
        norm, output = self.peek_norm(states)
        self._at += output is not states
        return norm, output

    def peek_norm(self, states: Tensor) -> tuple[Norm, Tensor]:
        """As `read_norm`, without moving."""
        event = self._next()
        if not isinstance(event, TracedNorm) or not is_close(states, event.input):
            return NO_NORM, states
        return event.norm, event.output

    def next_part(self, states: Tensor) -> Part:
        """The part of the decoder that comes next, with the input `states`."""
        _, rows = self.peek_norm(states)
        has_norm = rows is not states
        for event in self._events[self._at + has_norm :]:
            if not isinstance(event, TracedLinear | TracedRouter | TracedExperts):
                return "mixer"
            if not isinstance(event, TracedLinear) or not is_close(rows, event.input):
                return "mlp"
        return "head"

    def next_is_recurrence(self) -> bool:
        """Whether a recurrence (which has one convolution) comes before the next attention."""
        for event in self._events[self._at :]:
            if isinstance(event, TracedAttention | TracedConvolution):
                return isinstance(event, TracedConvolution)
        raise UnsupportedArchitecture(_UNSUPPORTED)

    def read_until_output(self, inputs: Tensor) -> list[Event]:
        """The events before the next linear layer with another input than `inputs`."""
        before: list[Event] = []
        while not isinstance(event := self._next(), TracedLinear) or is_close(inputs, event.input):
            before.append(event)
            self._at += 1
        return before

    def read_until_attention(self) -> tuple[Sequence[TracedLinear | TracedNorm], TracedAttention]:
        """The next attention, and the events before it."""
        before: list[TracedLinear | TracedNorm] = []
        while not isinstance(event := self._next(), TracedAttention):
            if not isinstance(event, TracedLinear | TracedNorm):
                raise UnsupportedArchitecture(_UNSUPPORTED)
            before.append(event)
            self._at += 1
        self._at += 1
        return before, event

    def read_linear(self, name: str, rows: Tensor) -> TracedLinear:
        """The next event, a linear layer with the input `rows`."""
        event = self._next()
        if not isinstance(event, TracedLinear):
            raise UnsupportedArchitecture(_UNSUPPORTED)
        require_close(name, rows, event.input)
        self._at += 1
        return event

    def read_linears(self, rows: Tensor) -> list[TracedLinear]:
        """The next linear layers with the input `rows`."""
        linears = []
        while isinstance(event := self._next(), TracedLinear) and is_close(rows, event.input):
            linears.append(event)
            self._at += 1
        return linears

    def next_branch(self, rows: Tensor) -> TracedLinear | TracedRouter | TracedExperts | None:
        """The next event if it is a linear layer, router or experts with the input `rows`."""
        event = self._next()
        if isinstance(event, TracedLinear | TracedRouter | TracedExperts) and is_close(rows, event.input):
            return event
        return None

    def read_event(self, kind: type[EventT]) -> EventT:
        """The next event. Raises UnsupportedArchitecture for one of another kind."""
        event = self._next()
        if not isinstance(event, kind):
            raise UnsupportedArchitecture(_UNSUPPORTED)
        self._at += 1
        return event

    def next_are(self, *kinds: type[Event]) -> bool:
        """Whether the next events are of these kinds."""
        events = self._events[self._at : self._at + len(kinds)]
        return len(events) == len(kinds) and all(map(isinstance, events, kinds))

    def next_is(self, kind: type[Event]) -> bool:
        """Whether the next event is of this kind."""
        return isinstance(self._next(), kind)

    def _next(self) -> Event:
        if self._at == len(self._events):
            raise UnsupportedArchitecture(_UNSUPPORTED)
        return self._events[self._at]
