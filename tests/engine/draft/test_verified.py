"""What is learnt of a draft: how many of its tokens were compared, and how many were right."""

from __future__ import annotations

import pytest

from engine.draft.depth import FixedDepth, StepOutcome
from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.schedule.draft import Draft


@pytest.mark.parametrize(
    ("said", "judged", "accepted"),
    [
        ((9,), 1, 0),
        ((1, 9), 2, 1),
        # All right, and one more token behind the draft.
        ((1, 2, 3, 4, 5), 4, 4),
        # The second token ends the text: what was drafted behind it was compared with nothing.
        ((1, 2), 2, 2),
        # A row without finite logits, behind the first token.
        ((1,), 1, 1),
    ],
)
def test_draft_tokens_after_the_end_are_not_compared(said: tuple[int, ...], judged: int, accepted: int) -> None:
    """A draft of four tokens, of which the text takes some, up to an end or a token of its own."""
    depth, outcomes = FixedDepth(4), list[StepOutcome]()
    depth.observe = outcomes.append  # type: ignore[method-assign]
    speculation = Speculation(LookupDrafter(OutputStore(64)), None, depth, lambda: 0.0)

    assert accepted == speculation.verified(Draft("lookup", (1, 2, 3, 4)), said)
    speculation.stepped(5, 1.0)
    assert [[("lookup", judged, accepted)]] == [outcome.verified for outcome in outcomes]
