"""One forward over what a plan grants, and what becomes known after it: what sequences say, scores, states.

The rows of a grant are its span of the sequence and, behind it, a draft. Of the draft the cache keeps what was said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from engine.load import Loaded
from engine.scheduler import Grant
from engine.scoring import Ask, logprobs
from engine.types import Alternative, TokenLogprob
from engine.verify import Trial, verify
from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.spec import Span


@dataclass(frozen=True, slots=True)
class Said:
    """What is known of one sequence after a step; None is where its output was not finite.

    tokens    what it says; none where its prompt is not computed yet, or nothing is to follow it
    logprobs  of these before a None, if the request asked for them
    scores    of further tokens of the prompt, in order
    states    [rows, width] of further tokens of the prompt; None where none are asked for
    """

    grant: Grant
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    scores: tuple[TokenLogprob | None, ...]
    states: Tensor | None

    @property
    def broken(self) -> bool:
        """Whether some of its output was not finite."""
        sound = self.states is None or bool(self.states.isfinite().all())
        return None in self.tokens or None in self.scores or not sound


@dataclass(slots=True)
class _Share:
    """What one grant has of a batch.

    logits  where its own begin among those that are asked for
    states  the same
    wanted  the rows whose logits are asked for: those that score, the last of a complete span, and all drafts
    pooled  the rows whose states are asked for
    said    of the logits those behind which something is said
    """

    grant: Grant
    logits: int
    states: int
    wanted: list[int]
    pooled: list[int]
    said: range


class Stepper:
    """Computes steps of one model over one cache. Belongs to the engine thread."""

    def __init__(self, loaded: Loaded, cache: Cache) -> None:
        self._runner, self._cache = loaded.runner, cache
        describe = loaded.tokenizer.alternative
        # To read a token costs 30 microseconds, and the likeliest tokens are often the same ones.
        self._read = lru_cache(maxsize=8192)(lambda token: describe(token, 0.0))

    def run(self, grants: Sequence[Grant]) -> list[Said]:
        """What becomes known of each grant, in order. What raises keeps no row of the step."""
        spans = [grant.rows for grant in grants]
        shares = list(_shares(grants, spans))
        with self._cache.forward(spans) as forward:
            logits, states = self._compute(forward, shares)
            tokens = self._verify(shares, logits)
            for grant, own in zip(grants, tokens, strict=True):
                if own:
                    # The last token that was said has no row yet, and neither has anything drafted behind it.
                    forward.keep(grant.span.slot, grant.span.stop + len(own) - 1)
        return list(self._told(shares, tokens, logits, states))

    def _compute(self, forward: Forward, shares: Sequence[_Share]) -> tuple[Tensor, Tensor | None]:
        """The logits and the states that are asked for."""
        tokens = [token for share in shares for token in share.grant.tokens]
        wanted = [row for share in shares for row in share.wanted]
        pooled = [row for share in shares for row in share.pooled]
        sights = [share.grant.sequence.sight for share in shares]
        if pooled:
            return self._runner.run_with_states(forward, tokens, wanted, pooled, sights)
        return self._runner.run(forward, tokens, wanted, sights), None

    def _verify(self, shares: Sequence[_Share], logits: Tensor) -> list[list[int | None]]:
        """What each grant says; nothing where nothing is to be said."""
        rows = [row for share in shares for row in share.said]
        if len(rows) < logits.shape[0]:
            logits = logits[rows]
        trials = [self._trial(share.grant) for share in shares if share.said]
        said = iter(verify(logits, trials, self._runner.choose))
        return [next(said) if share.said else [] for share in shares]

    def _trial(self, grant: Grant) -> Trial:
        request = grant.sequence.request

        def ends(token: int) -> bool:
            return token in request.stop_token_ids or grant.sequence.ends(token)

        return Trial(grant.guesses, grant.sequence.draw(), ends)

    def _describe(self, token: int, logprob: float) -> Alternative:
        known = self._read(token)
        return Alternative(token, known.text, known.bytes, logprob)

    def _told(
        self, shares: Sequence[_Share], tokens: Sequence[Sequence[int | None]], logits: Tensor, states: Tensor | None
    ) -> Iterator[Said]:
        """Everything by grant; log-probabilities are computed for all at once."""
        asked = [(_scores(share), _said(share, own)) for share, own in zip(shares, tokens, strict=True)]
        entries = logprobs(logits, [ask for some in asked for asks in some for ask in asks], self._describe)
        for share, own, (scores, said) in zip(shares, tokens, asked, strict=True):
            scored = tuple(next(entries) for _ in scores)
            described = tuple(next(entries) for _ in said) if said else (None,) * len(own)
            pooled = None if states is None else states[share.states : share.states + len(share.pooled)]
            yield Said(share.grant, tuple(own), described, scored, pooled)


def _shares(grants: Sequence[Grant], spans: Sequence[Span]) -> Iterator[_Share]:
    """How the grants share a batch, one after the other."""
    row = logits = states = 0
    for grant, span in zip(grants, spans, strict=True):
        wanted = [row + position - span.start for position in grant.scored]
        pooled = [row + position - span.start for position in grant.pooled]
        said = range(logits + len(wanted), logits + len(wanted))
        if grant.speaks:
            wanted += range(row + grant.span.length - 1, row + span.length)
            said = range(said.start, logits + len(wanted))
        yield _Share(grant, logits, states, wanted, pooled, said)
        row += span.length
        logits += len(wanted)
        states += len(pooled)


def _scores(share: _Share) -> list[Ask]:
    """What is asked of the rows that score a token of the prompt: each tells of the one behind it."""
    request = share.grant.sequence.request
    scored = enumerate(share.grant.scored, share.logits)
    return [Ask.of(request, row, request.prompt[position + 1]) for row, position in scored]


def _said(share: _Share, tokens: Sequence[int | None]) -> list[Ask]:
    """What is asked of the rows behind which something was said."""
    request = share.grant.sequence.request
    if request.logprobs is None:
        return []
    return [Ask.of(request, row, token) for row, token in zip(share.said, tokens, strict=False) if token is not None]
