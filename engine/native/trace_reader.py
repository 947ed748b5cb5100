"""A way through the events of a trace, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from engine.native.comparison import is_close, require_close
from engine.native.decoder import NO_NORM, Norm, UnsupportedArchitecture
from engine.native.recurrence_trace import TracedConvolution, TracedDeltaRule, TracedStateSpace
from engine.native.trace import Event, TracedAttention, TracedExperts, TracedLinear, TracedNorm, TracedRouter

One = TypeVar("One", TracedLinear, TracedRouter, TracedExperts)

_OTHER = "its layers are not of projections, attention and matrices"


class TraceReader:
    """Where one stands among the events; whatever steps on raises UnsupportedArchitecture where the next event is another."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events, self._at = events, 0

    def next_input(self) -> Tensor:
        """The rows that the next layer takes."""
        event = self._next()
        if isinstance(event, TracedAttention | TracedDeltaRule | TracedStateSpace):
            raise UnsupportedArchitecture(_OTHER)
        return event.input

    def next_hidden_states(self, states: Tensor) -> Tensor:
        """The same, where they are as wide as these."""
        taken = self.next_input()
        if taken.shape != states.shape:
            raise UnsupportedArchitecture("its rows change their width")
        return taken

    def read_norm(self, states: Tensor) -> tuple[Norm, Tensor]:
        """The norm that these states go through next, and what it makes of them; where there is none, themselves."""
        event = self._next()
        if not isinstance(event, TracedNorm) or not is_close(states, event.input):
            return NO_NORM, states
        self._at += 1
        return event.norm, event.output

    def recurrent_layers(self) -> list[bool]:
        """Of each layer that follows whether it has a recurrence, which has one convolution, in place of attention."""
        layers = (event for event in self._events[self._at :] if isinstance(event, TracedAttention | TracedConvolution))
        return [isinstance(event, TracedConvolution) for event in layers]

    def read_until_output(self, entering: Tensor) -> list[Event]:
        """What comes before the next linear layer that takes other rows than these."""
        before: list[Event] = []
        while not isinstance(event := self._next(), TracedLinear) or is_close(entering, event.input):
            before.append(event)
            self._at += 1
        return before

    def read_until_attention(self) -> tuple[Sequence[TracedLinear | TracedNorm], TracedAttention]:
        """What comes before the next attention, and that."""
        before: list[TracedLinear | TracedNorm] = []
        while not isinstance(event := self._next(), TracedAttention):
            if not isinstance(event, TracedLinear | TracedNorm):
                raise UnsupportedArchitecture(_OTHER)
            before.append(event)
            self._at += 1
        self._at += 1
        return before, event

    def read_linear(self, what: str, rows: Tensor) -> TracedLinear:
        """The linear layer that takes these rows next."""
        event = self._next()
        if not isinstance(event, TracedLinear):
            raise UnsupportedArchitecture(_OTHER)
        require_close(what, rows, event.input)
        self._at += 1
        return event

    def read_linears(self, rows: Tensor) -> list[TracedLinear]:
        """Those that take these rows, one after the other."""
        found = []
        while isinstance(event := self._next(), TracedLinear) and is_close(rows, event.input):
            found.append(event)
            self._at += 1
        return found

    def next_branch(self, rows: Tensor) -> TracedLinear | TracedRouter | TracedExperts | None:
        """The next event if it takes these rows and is no norm."""
        event = self._next()
        if isinstance(event, TracedLinear | TracedRouter | TracedExperts) and is_close(rows, event.input):
            return event
        return None

    def read_event(self, kind: type[One]) -> One:
        """The next event, of a kind that it is known to be of."""
        event = self._next()
        assert isinstance(event, kind)
        self._at += 1
        return event

    def _next(self) -> Event:
        if self._at == len(self._events):
            raise UnsupportedArchitecture(_OTHER)
        return self._events[self._at]
