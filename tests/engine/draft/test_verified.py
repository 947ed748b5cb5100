"""The outcome of a verified draft: its compared tokens, and its accepted ones."""

from __future__ import annotations

import pytest

from engine.draft.depth import FixedDepth, StepOutcome
from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.schedule.draft import Draft


@pytest.mark.parametrize(
    ("emitted", "compared", "accepted"),
    [
        ((9,), 1, 0),
        ((1, 9), 2, 1),
        # All are accepted, and one more token follows the draft.
        ((1, 2, 3, 4, 5), 4, 4),
        # The second token ends the text: draft tokens after it are not compared.
        ((1, 2), 2, 2),
        # The row after the first token has no finite logits.
        ((1,), 1, 1),
    ],
)
def test_draft_tokens_after_the_end_are_not_compared(emitted: tuple[int, ...], compared: int, accepted: int) -> None:
    """Of a draft of four tokens the text has some, up to an end or to a different token."""
    depth, outcomes = FixedDepth(4), list[StepOutcome]()
    depth.observe = outcomes.append  # type: ignore[method-assign]
    speculation = Speculation(LookupDrafter(OutputStore(64)), None, depth, lambda: 0.0)

    assert accepted == speculation.verified(Draft("lookup", (1, 2, 3, 4)), emitted)
    speculation.stepped(5, 1.0)
    assert [[("lookup", compared, accepted)]] == [outcome.verified for outcome in outcomes]
