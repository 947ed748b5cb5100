"""Sums of the totals of several processes of one model, for counters that survive its unloads."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, TypeAlias

from engine.types.status import DraftCounts, EmbeddingCounts, EncoderCounts, Stats

_Counts: TypeAlias = Stats | EmbeddingCounts | EncoderCounts


def with_totals(stats: Stats, ended: Stats) -> Stats:
    """The statistics of a process, its totals increased by the totals of ended ones."""
    return replace(
        stats,
        **_sums(stats, ended),
        batch_sizes=_added(stats.batch_sizes, ended.batch_sizes),
        drafts=_drafts(stats.drafts, ended.drafts),
        encoders=_encoders(stats.encoders, ended.encoders),
        embedding=replace(stats.embedding, **_sums(stats.embedding, ended.embedding)),
    )


def only_totals(stats: Stats) -> Stats:
    """The statistics without the state of the moment: those of an ended process."""
    return with_totals(Stats(), stats)


def _sums(stats: _Counts, ended: _Counts) -> dict[str, Any]:
    names = [field.name for field in fields(stats) if field.name.endswith("_total")]
    return {name: getattr(stats, name) + getattr(ended, name) for name in names if not name.startswith("cells")}


def _drafts(counts: tuple[DraftCounts, ...], ended: tuple[DraftCounts, ...]) -> tuple[DraftCounts, ...]:
    by_kind = {count.kind: count for count in ended}
    for count in counts:
        other = by_kind.get(count.kind)
        if other is not None:
            count = DraftCounts(
                count.kind, _added(count.drafted, other.drafted), _added(count.accepted, other.accepted)
            )
        by_kind[count.kind] = count
    return tuple(by_kind.values())


def _encoders(counts: tuple[EncoderCounts, ...], ended: tuple[EncoderCounts, ...]) -> tuple[EncoderCounts, ...]:
    by_kind = {count.kind: count for count in ended}
    for count in counts:
        other = by_kind.get(count.kind)
        by_kind[count.kind] = count if other is None else replace(count, **_sums(count, other))
    return tuple(by_kind.values())


def _added(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(left + right for left, right in zip_longest(first, second, fillvalue=0))
