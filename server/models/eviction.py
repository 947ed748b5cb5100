"""Which models are unloaded to make space for another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from server.models.instance import ModelRecord

# A request waits so long for idle models before a model in use is unloaded, and a model that was loaded a shorter time
# ago stays: models with steady traffic take turns without a load for each request.
TURN_SECONDS = 30.0


def idle_victims(records: Iterable[ModelRecord], missing_bytes: int) -> Sequence[ModelRecord]:
    """The least recently used idle models with `missing_bytes` in all; none if they have less."""
    idle = [record for record in _unpinned(records) if record.is_idle]
    return _enough(sorted(idle, key=_last_used), missing_bytes)


def turn_victims(records: Iterable[ModelRecord], missing_bytes: int, now: float) -> Sequence[ModelRecord]:
    """Idle models, then models in use in the order of their loads, with `missing_bytes` in all; none if they have less.

    A model in use is chosen only if it has been loaded for TURN_SECONDS.
    """
    unpinned = list(_unpinned(records))
    idle = [record for record in unpinned if record.is_idle]
    used = [record for record in unpinned if not record.is_idle and turn_ends_at(record) <= now]
    return _enough([*sorted(idle, key=_last_used), *sorted(used, key=turn_ends_at)], missing_bytes)


def turn_ends_at(record: ModelRecord) -> float:
    """The time from which the loaded model may be unloaded for another one although it is in use."""
    loaded_at = None if record.instance is None else record.instance.ready_since
    assert loaded_at is not None, "the model is loaded"
    return loaded_at + TURN_SECONDS


def _unpinned(records: Iterable[ModelRecord]) -> Iterable[ModelRecord]:
    for record in records:
        if record.instance is not None and record.instance.accepts_leases and not record.entry.pinned:
            yield record


def _last_used(record: ModelRecord) -> float:
    assert record.instance is not None
    return record.instance.last_used


def _enough(candidates: Sequence[ModelRecord], missing_bytes: int) -> Sequence[ModelRecord]:
    """The first candidates with `missing_bytes` in all, without those that are not needed for it."""
    victims: list[ModelRecord] = []
    for record in candidates:
        if missing_bytes <= 0:
            break
        victims.append(record)
        missing_bytes -= record.reserved_bytes
    if missing_bytes > 0:
        return ()
    for record in victims[:]:
        if record.reserved_bytes <= -missing_bytes:
            victims.remove(record)
            missing_bytes += record.reserved_bytes
    return victims
