"""One forward over what a plan grants, and what the sequences say after it.

The rows of a grant are its span of the sequence and, behind it, a draft. Of the draft the cache keeps what was said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.load import Loaded
from engine.sampling import logprobs
from engine.scheduler import Grant
from engine.types import TokenLogprob
from engine.verify import Trial, verify
from kvcache.cache import Cache


@dataclass(frozen=True, slots=True)
class Said:
    """What one sequence says after a step: tokens, one of them at least; None is where its output was not finite.

    logprobs  of the tokens before that, if the request asked for them
    """

    grant: Grant
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprob | None, ...]


class Stepper:
    """Computes steps of one model over one cache. Belongs to the engine thread."""

    def __init__(self, loaded: Loaded, cache: Cache) -> None:
        self._runner, self._cache = loaded.runner, cache
        self._ends, self._describe = loaded.eos, loaded.tokenizer.alternative

    def run(self, grants: Sequence[Grant]) -> list[Said]:
        """What the complete ones among the grants say, in order. What raises keeps no row of the step."""
        complete = [grant for grant in grants if grant.complete]
        with self._cache.forward([grant.rows for grant in grants]) as forward:
            tokens = [token for grant in grants for token in grant.tokens]
            sights = [grant.sequence.sight for grant in grants]
            logits = self._runner.run(forward, tokens, list(_wanted(grants)), sights)
            said = verify(logits, [self._trial(grant) for grant in complete])
            for grant, own in zip(complete, said, strict=True):
                # The last token that was said has no row yet, and neither has anything that was drafted behind it.
                forward.keep(grant.span.slot, grant.span.stop + len(own) - 1)
        entries = self._logprobs(complete, said, logits)
        return [Said(grant, tuple(own), tuple(some)) for grant, own, some in zip(complete, said, entries, strict=True)]

    def _trial(self, grant: Grant) -> Trial:
        request = grant.sequence.request

        def ends(token: int) -> bool:
            return token in request.stop_token_ids or (token in self._ends and not request.ignore_eos)

        return Trial(grant.guesses, grant.sequence.draw(), ends)

    def _logprobs(
        self, grants: Sequence[Grant], said: Sequence[Sequence[int | None]], logits: Tensor
    ) -> list[list[TokenLogprob | None]]:
        """For every token that was said what its request wants to know of it; computed for all at once."""
        asked: list[int] = []
        tokens: list[int] = []
        row = 0
        for grant, own in zip(grants, said, strict=True):
            if grant.sequence.request.logprobs is not None:
                known = [token for token in own if token is not None]
                asked += range(row, row + len(known))
                tokens += known
            row += 1 + len(grant.guesses)
        if not asked:
            return [[None] * len(own) for own in said]
        most = max(grant.sequence.request.logprobs or 0 for grant in grants)
        chosen, top = logprobs(logits[asked], tokens, most)
        found = zip(tokens, chosen, top, strict=True)
        return [
            [self._entry(count, *next(found)) if count is not None and token is not None else None for token in own]
            for count, own in ((grant.sequence.request.logprobs, own) for grant, own in zip(grants, said, strict=True))
        ]

    def _entry(self, count: int, token: int, value: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
        return TokenLogprob(self._describe(token, value), tuple(self._describe(*other) for other in top[:count]))


def _wanted(grants: Sequence[Grant]) -> Iterator[int]:
    """The rows of the packed batch behind which something is said: the last of a complete span, and all drafts."""
    row = 0
    for grant in grants:
        row += grant.span.length
        if grant.complete:
            yield from range(row - 1, row + len(grant.guesses))
        row += len(grant.guesses)
