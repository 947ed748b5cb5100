"""One forward over what a plan grants, and what becomes known after it: what sequences say, scores, states.

The rows of a grant are its span of the sequence and, behind it, a draft. Of the draft the cache keeps what was said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from engine.load.load import Loaded
from engine.model.sight import Sight
from engine.sample.logprobs import Ask, logprobs
from engine.sample.verify import Choose, Trial, verify
from engine.schedule.scheduler import Grant
from engine.types.events import Alternative, TokenLogprob
from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.spec import Span


@dataclass(frozen=True, slots=True)
class Said:
    """What is known of one sequence after a step; None is where its output was not finite.

    tokens    what it says; none where its prompt is not computed yet, or nothing is to follow it
    logprobs  of these before a None; none where the request did not ask for them
    scores    of further tokens of the prompt, in order
    states    [rows, width] of further tokens of the prompt; None where none are asked for
    """

    grant: Grant
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    scores: tuple[TokenLogprob | None, ...] = ()
    states: Tensor | None = None

    @property
    def broken(self) -> bool:
        """Whether some of its output was not finite."""
        sound = self.states is None or bool(self.states.isfinite().all())
        return None in self.tokens or None in self.scores or not sound


@dataclass(slots=True)
class _Share:
    """What one grant has of a batch.

    logits  the first of its rows of logits
    states  the first of its rows of states
    wanted  the rows of the batch whose logits are asked for, those last behind which something is said
    pooled  the rows whose states are asked for
    said    of the logits those behind which something is said
    """

    grant: Grant
    logits: int
    states: int
    wanted: Sequence[int]
    pooled: Sequence[int]
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
        compute = self._tell if all([grant.silent for grant in grants]) else self._show
        with self._cache.forward([grant.rows for grant in grants]) as forward:
            said = compute(forward, grants)
            for each in said:
                if each.grant.draft is not None:
                    # The last token that was said has no row yet, and neither has anything drafted behind it.
                    forward.keep(each.grant.span.slot, each.grant.span.stop + len(each.tokens) - 1)
        return said

    def _tell(self, forward: Forward, grants: Sequence[Grant]) -> list[Said]:
        """What is said, where nobody asks for logits or states."""
        tokens: list[int] = []
        wanted: list[int] = []
        for grant in grants:
            tokens += grant.tokens
            wanted += range(len(tokens) - grant.telling, len(tokens))
        said = _verified(grants, partial(self._runner.tell, forward, tokens, wanted, _sights(grants)))
        return [Said(grant, tuple(own)) for grant, own in zip(grants, said, strict=True)]

    def _show(self, forward: Forward, grants: Sequence[Grant]) -> list[Said]:
        """What is said, and all that is asked for besides."""
        shares, sights = _shares(grants, forward.spans), _sights(grants)
        tokens = [token for grant in grants for token in grant.tokens]
        wanted = [row for share in shares for row in share.wanted]
        pooled = [row for share in shares for row in share.pooled]
        states = None
        if pooled:
            logits, states = self._runner.run_with_states(forward, tokens, wanted, pooled, sights)
        else:
            logits = self._runner.run(forward, tokens, wanted, sights)
        rows = [row for share in shares for row in share.said]
        telling = logits[rows] if len(rows) < len(wanted) else logits
        said = _verified(grants, partial(self._runner.choose, telling))
        return list(self._told(shares, said, logits, states))

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
            described = tuple(next(entries) for _ in said)
            pooled = None if states is None else states[share.states : share.states + len(share.pooled)]
            yield Said(share.grant, tuple(own), described, scored, pooled)


def _shares(grants: Sequence[Grant], spans: Sequence[Span]) -> list[_Share]:
    """How the grants share a batch, one after the other."""
    shares: list[_Share] = []
    row = logits = states = 0
    for grant, span in zip(grants, spans, strict=True):
        scored, pooled = grant.scored, grant.pooled
        stop = row + span.length
        before = row - span.start
        wanted = [*(before + position for position in scored), *range(stop - grant.telling, stop)]
        said = range(logits + len(scored), logits + len(wanted))
        shares.append(_Share(grant, logits, states, wanted, [before + position for position in pooled], said))
        row = stop
        logits += len(wanted)
        states += len(pooled)
    return shares


def _sights(grants: Sequence[Grant]) -> list[Sight | None]:
    """What each sequence sees of its media."""
    return [grant.sequence.sight for grant in grants]


def _verified(grants: Sequence[Grant], choose: Choose) -> list[list[int | None]]:
    """What each grant says; nothing where nothing is to be said."""
    speaking = [grant for grant in grants if grant.speaks]
    trials = [Trial(grant.guesses, grant.sequence.draw(), grant.sequence.stops) for grant in speaking]
    said = verify(trials, choose)
    if len(speaking) == len(grants):
        return said
    told = iter(said)
    return [next(told) if grant.speaks else [] for grant in grants]


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
