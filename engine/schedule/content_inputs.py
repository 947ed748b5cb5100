"""Entries of the images and sounds that running sequences compute next: encoded once, pinned while in use.

A sequence needs an entry only for tokens that the prefix cache does not have; its tokens before them are computed
meanwhile. Entries that are not pinned stay while there is memory for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from engine.schedule.sequence import Sequence
from engine.step.content import ContentEncoder, ContentEntry
from kvcache.encoder_cache import EncoderCache


class ContentInputs:
    """The entries of all sequences. `encoder` None: the model reads text only."""

    def __init__(self, encoder: ContentEncoder | None) -> None:
        self._encoder = encoder
        self.store = EncoderCache[ContentEntry](0 if encoder is None else encoder.budget_bytes)
        self._holders: set[Sequence] = set()

    def release_computed(self, cached_length: Callable[[Sequence], int]) -> None:
        """Unpin entries with computed tokens, and entries of sequences that lost their slot."""
        for sequence in tuple(self._holders):
            if sequence.slot is None or not _holds_next(sequence, cached_length(sequence)):
                self.release(sequence)

    def prepare(self, sequence: Sequence, cached_length: int) -> bool:
        """Pin the next entry of a sequence with a slot; whether another one may be prepared in the same step.

        At most one content is encoded a step, which bounds the delay of running sequences. While pinned entries leave
        no memory for another one, later sequences wait too.
        """
        return _holds_next(sequence, cached_length) or self._acquire(sequence, cached_length)

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

    def _acquire(self, sequence: Sequence, cached_length: int) -> bool:
        """Give a sequence its next entry; whether other sequences may have theirs in the same call."""
        contents = sequence.contents
        assert contents is not None, "a request without contents"
        assert self._encoder is not None, "requests are checked before"
        number = contents.next_number(cached_length)
        assert number is not None, "all contents are computed"
        content = sequence.request.contents[number]
        key = _entry_key(sequence.request.salt, content.digest)
        entry = self.store.pin(key)
        is_cached = entry is not None
        if entry is None:
            if self.store.evict_for(self._encoder.entry_bytes(content)):
                return False
            tokens = sequence.request.prompt[content.start : content.stop]
            entry = replace(self._encoder.encode(content, tokens), digest=key)
            self.store.put(entry)
        contents.entry, contents.entry_number = entry, number
        self._holders.add(sequence)
        return is_cached


def _holds_next(sequence: Sequence, cached_length: int) -> bool:
    """Whether it has the entry of its first content with uncomputed tokens, or there is none."""
    return sequence.contents is None or sequence.contents.next_number(cached_length) == sequence.contents.entry_number


def _entry_key(salt: bytes, digest: bytes) -> bytes:
    """The key of an entry: contents under another salt never match."""
    return hashlib.sha256(salt + digest).digest()
