"""Which sequence looks at what: media are encoded once, pinned while somebody needs them, and kept while there is room.

Owns the store of encoder entries (kvcache/encoder_cache.py). A sequence gets its entry before it gets a slot.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from engine.model.encoder import Encoder
from engine.schedule.sequence import Sequence
from engine.types.request import Media
from kvcache.encoder_cache import EncoderCache
from kvcache.encoder_files import EncoderFiles


class EncoderInputs:
    """The encoder entries of an engine's sequences. `encoder` None: the model has none, and no sequence has media.

    files  where entries outlive the process; they are written in pauses
    """

    def __init__(self, encoder: Encoder | None, files: EncoderFiles) -> None:
        self._encoder, self.files = encoder, files
        self.store = EncoderCache(0 if encoder is None else encoder.budget_bytes)
        self.encoded_total = 0

    def prepare(self, sequence: Sequence) -> bool:
        """Give a waiting sequence what it looks at; whether the next in line may be prepared in the same step.

        A step encodes once, so that those who run do not wait for a whole queue; where entries in use leave no room,
        the line waits until somebody is done.
        """
        media = sequence.request.media
        if media is None or self._encoder is None or sequence.encoder_mask is not None:
            return True
        key = _entry_key(sequence.request.salt, media)
        entry = self.store.pin(key)
        found = entry is not None
        if entry is None:
            if self.store.evict_for(self._encoder.entry_bytes(media)):
                return False
            entry = self.files.read(key)
            if entry is None:
                entry = replace(self._encoder.encode(media), digest=key)
                self.encoded_total += 1
                self.files.enqueue(entry)
            self.store.put(entry)
        sequence.encoder_mask = self._encoder.mask(entry, media, sequence.request.prompt)
        if sequence.encoder_mask.parts is not None:
            # A shift would move the rows away from the images that they look at.
            sequence.overflow = "length"
        return found

    def release(self, sequence: Sequence) -> None:
        """The sequence is over: others may have the room of its entry."""
        if sequence.encoder_mask is not None:
            self.store.unpin(sequence.encoder_mask.entry.digest)
            sequence.encoder_mask = None


def _entry_key(salt: bytes, media: Media) -> bytes:
    """Under which media are kept: what was encoded under another salt does not exist."""
    return hashlib.sha256(salt + media.digest).digest() if salt else media.digest
