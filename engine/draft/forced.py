"""Drafts that a grammar makes: where it leaves one way on, that is what will be said, or nearly always.

It leaves one text, of which a model may choose other tokens than these: so they are drafts like all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.schedule.draft import Want


class ForcedDrafter:
    """Proposes what the grammar of a request forces; implements Drafter."""

    kind = "grammar"

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want what must come next, if anything must."""
        return [
            [] if want.draw.constraints is None else want.draw.constraints.forced_tokens(want.limit) for want in wants
        ]

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """Nothing was kept."""

    def rest(self, budget_bytes: int) -> bool:
        """Nothing outlives the process."""
        return False
