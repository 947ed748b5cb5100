"""Entries of the images and sounds that running sequences compute next: encoded once, pinned while in use.

A sequence needs an entry only for tokens that the prefix cache does not have; its tokens before them are computed
meanwhile. One content is encoded at a time, in slices between the steps (engine/media/slices.py). Entries that are not
pinned stay while there is memory for them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from engine.media.entry_codec import CONTENT_CODEC
from engine.media.slices import CallFailed, SlicedCall
from engine.schedule.fairness import OwnerTurns
from engine.schedule.sequence import Sequence
from engine.step.content import ContentEncoder, ContentEntry
from engine.types.content import Content, ContentKind
from engine.types.status import EncoderCounts
from kvcache.encoder_cache import EncoderCache
from kvcache.encoder_files import EncoderFiles
from kvcache.offload import OffloadConfig


class EncodingFailed(Exception):
    """The encoder failed for a content that `sequences` need."""

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        super().__init__("an image or a sound could not be encoded")
        self.sequences = tuple(sequences)


@dataclass(frozen=True, slots=True)
class _Need:
    """The next content of a sequence without an entry, by its number in the prompt, and the key of its entry."""

    sequence: Sequence
    number: int
    key: bytes

    @property
    def content(self) -> Content:
        return self.sequence.request.contents[self.number]


@dataclass(frozen=True, slots=True)
class _Encoding:
    """An encoding in progress; `entry_bytes`: maximum bytes of its entry."""

    key: bytes
    kind: ContentKind
    entry_bytes: int
    call: SlicedCall[ContentEntry]


class ContentInputs:
    """The entries of all sequences. `encoder` None: the model reads text only.

    files  on disk, for entries that outlive the process; written when the engine is idle
    """

    def __init__(self, encoder: ContentEncoder | None, offload: OffloadConfig, device: torch.device) -> None:
        self._encoder, self.files = encoder, EncoderFiles(offload, device, CONTENT_CODEC)
        self.store = EncoderCache[ContentEntry](0 if encoder is None else encoder.budget_bytes)
        self._holders: set[Sequence] = set()
        self._turns = OwnerTurns()
        self._encoding: _Encoding | None = None
        self._counts: dict[ContentKind, EncoderCounts] = {}

    @property
    def counts(self) -> tuple[EncoderCounts, ...]:
        """Of each kind that was needed so far."""
        return tuple(self._counts.values())

    def release_computed(self, cached_length: Callable[[Sequence], int]) -> None:
        """Unpin entries with computed tokens, and entries of sequences that lost their slot."""
        for sequence in tuple(self._holders):
            if sequence.slot is None or not _holds_next(sequence, cached_length(sequence)):
                self.release(sequence)

    def prepare(
        self, sequences: Iterable[Sequence], cached_length: Callable[[Sequence], int], seconds: Callable[[], float]
    ) -> None:
        """Pin the next entries of sequences with slots, and encode a missing one for about `seconds`.

        Owners take turns, the first sequence of an owner first. While pinned entries leave no memory for another one,
        all wait. An encoding that no sequence needs any more ends. Raises EncodingFailed.
        """
        needs = [
            _need(sequence, cached_length(sequence))
            for sequence in sequences
            if not _holds_next(sequence, cached_length(sequence))
        ]
        needs = [need for need in needs if not self._pin_cached(need)]
        if self._encoding is not None and all(need.key != self._encoding.key for need in needs):
            self.close()
        if needs and self._encoding is None:
            self._start(needs)
        if self._encoding is not None and self._advance(self._encoding, needs, seconds()):
            self.close()

    def release(self, sequence: Sequence) -> None:
        """Unpin the entry of a sequence; that of an uncached request is removed with its last pin."""
        contents = sequence.contents
        if contents is None or contents.entry is None:
            return
        self.store.unpin(contents.entry.digest)
        if not sequence.request.cacheable:
            self.store.remove(contents.entry.digest)
        contents.entry, contents.entry_number = None, None
        self._holders.discard(sequence)

    def close(self) -> None:
        """End the encoding in progress."""
        if self._encoding is not None:
            self._encoding.call.close()
            self._encoding = None

    def _pin_cached(self, need: _Need) -> bool:
        is_cached = self._pin(need)
        if is_cached:
            self._count(need.content.kind, memory_hits_total=1)
        return is_cached

    def _pin(self, need: _Need) -> bool:
        """Give a sequence its entry; whether there is one."""
        contents, entry = need.sequence.contents, self.store.pin(need.key)
        if contents is None or entry is None:
            return False
        contents.entry, contents.entry_number = entry, need.number
        self._holders.add(need.sequence)
        return True

    def _start(self, needs: list[_Need]) -> None:
        """Read the next entry from its file, or start its encoding, if there is memory for it."""
        assert self._encoder is not None, "requests are checked before"
        encoder, sequence = self._encoder, self._turns.choose([need.sequence for need in needs])
        need = next(need for need in needs if need.sequence is sequence)
        content = need.content
        size = encoder.entry_bytes(content)
        if self.store.evict_for(size):
            return
        if (entry := self.files.read(need.key)) is not None:
            self._count(content.kind, disk_hits_total=1)
            self._put(entry, needs)
            return
        tokens = sequence.request.prompt[content.start : content.stop]
        call = SlicedCall(lambda: replace(encoder.encode(content, tokens), digest=need.key), encoder.modules)
        self._encoding = _Encoding(need.key, content.kind, size, call)

    def _advance(self, encoding: _Encoding, needs: list[_Need], seconds: float) -> bool:
        """Compute a slice; whether the entry is complete and pinned by the sequences that need it."""
        users = [need for need in needs if need.key == encoding.key]
        began = time.perf_counter()
        try:
            is_complete = encoding.call.advance(seconds)
        except CallFailed as error:
            self.close()
            raise EncodingFailed(need.sequence for need in users) from error.__cause__
        self._count(encoding.kind, seconds_total=time.perf_counter() - began)
        # Sequences may have pinned other entries meanwhile.
        if not is_complete or self.store.evict_for(encoding.entry_bytes):
            return False
        self._count(encoding.kind, encodings_total=1)
        if any(need.sequence.request.cacheable for need in users):
            self.files.enqueue(encoding.call.result)
        self._put(encoding.call.result, users)
        return True

    def _put(self, entry: ContentEntry, needs: Iterable[_Need]) -> None:
        """Add an entry, pinned by the sequences that need it: hits of all but the first."""
        self.store.put(entry)
        users = [need for need in needs if need.key == entry.digest]
        for index, need in enumerate(users):
            self._pin(need)
            self._count(need.content.kind, memory_hits_total=int(index > 0))
        self.store.unpin(entry.digest)

    def _count(self, kind: ContentKind, **increments: float) -> None:
        counts = self._counts.get(kind, EncoderCounts(kind))
        self._counts[kind] = replace(
            counts, **{name: getattr(counts, name) + increment for name, increment in increments.items()}
        )


def _holds_next(sequence: Sequence, cached_length: int) -> bool:
    """Whether it has the entry of its first content with uncomputed tokens, or there is none."""
    return sequence.contents is None or sequence.contents.next_number(cached_length) == sequence.contents.entry_number


def _need(sequence: Sequence, cached_length: int) -> _Need:
    """The need of a sequence that does not hold its next entry."""
    number = None if sequence.contents is None else sequence.contents.next_number(cached_length)
    assert number is not None, "all contents are computed"
    digest = sequence.request.contents[number].digest
    # Contents under another salt never match.
    return _Need(sequence, number, hashlib.sha256(sequence.request.salt + digest).digest())
