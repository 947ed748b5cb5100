"""What happens to the choices of one answer, for the one reader that tells it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from engine.types.events import Delta, Event

# Takes a delta of a choice; False: its reader shall.
DeltaSink = Callable[[int, Delta], bool]


class ChoiceEvents:
    """Pairs of a choice and its event, in order.

    reading  yields them; closing it ends the reading
    shorten  hands deltas that come while the reader waits to a `DeltaSink`, right where the engine delivers them
    """

    def __init__(self, reading: AsyncGenerator[tuple[int, Event], None], shorten: Callable[[DeltaSink], None]) -> None:
        self.reading, self.shorten = reading, shorten

    def __aiter__(self) -> AsyncGenerator[tuple[int, Event], None]:
        return self.reading
