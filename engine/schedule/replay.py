"""The tokens that an earlier stream emitted are added to waiting sequences: some in each step, beside other work."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from engine.errors import InvalidRequest
from engine.schedule.sequence import Sequence
from engine.types.events import Failed

log = logging.getLogger("cellar.engine")

# Time of a step: a token takes 6 to 20 microseconds, with a grammar sometimes more.
REPLAY_SECONDS = 0.01
# Tokens between two readings of the clock.
REPLAY_TOKENS = 16


def replay(waiting: Iterable[Sequence], seconds: Callable[[], float]) -> Iterator[tuple[Sequence, Failed | None]]:
    """Add tokens to sequences by turns; yields the sequences that are complete now, and failed ones with the error.

    seconds  since the start of the step; at least one sequence gets tokens in each step
    """
    incomplete = deque(sequence for sequence in waiting if not sequence.is_replayed)
    while incomplete:
        sequence = incomplete.popleft()
        try:
            sequence.replay(REPLAY_TOKENS)
        except InvalidRequest as error:
            yield sequence, Failed(str(error), caused_by_request=True)
        except Exception as error:
            log.exception("the tokens of an earlier stream failed")
            yield sequence, Failed(f"the tokens of 'continue_from' failed ({type(error).__name__})")
        else:
            if sequence.is_replayed:
                yield sequence, None
            else:
                incomplete.append(sequence)
        if seconds() >= REPLAY_SECONDS:
            return
