"""Draft tokens that a grammar forces: where it allows one text only, the model nearly always emits that text.

The model may split the text into other tokens, so these are drafts like all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.schedule.draft import DraftRequest


class ForcedDrafter:
    """Proposes the tokens that the grammar of a request forces; implements Drafter."""

    kind = "grammar"

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The forced tokens of each request."""
        return [
            [] if request.draw.constraints is None else request.draw.constraints.forced_tokens(request.limit)
            for request in requests
        ]

    def forget(self, sequence_id: str, output: Sequence[int]) -> None:
        """Do nothing."""

    def flush(self, budget_bytes: int) -> bool:
        """False."""
        return False
