"""Which sequence looks at what: media are encoded once, pinned while somebody needs them, and kept while there is room.

Owns the store of encoder entries (kvcache/encoder.py). A sequence gets its entry before it gets a slot.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from engine.model.encoder import Encoder
from engine.schedule.sequence import Sequence
from engine.types.request import Media
from kvcache.encoder import EncoderStore
from kvcache.entries import EntryFiles


class Crossing:
    """The encoder entries of an engine's sequences. `encoder` None: the model has none, and no sequence has media.

    files  where entries outlive the process; they are written in pauses
    """

    def __init__(self, encoder: Encoder | None, files: EntryFiles) -> None:
        self._encoder, self.files = encoder, files
        self.store = EncoderStore(0 if encoder is None else encoder.budget_bytes)
        self.encoded = 0

    def prepare(self, sequence: Sequence) -> bool:
        """Give a waiting sequence what it looks at; whether the next in line may be prepared in the same step.

        A step encodes once, so that those who run do not wait for a whole queue; where entries in use leave no room,
        the line waits until somebody is done.
        """
        media = sequence.request.media
        if media is None or self._encoder is None or sequence.sight is not None:
            return True
        key = _key(sequence.request.salt, media)
        entry = self.store.pin(key)
        found = entry is not None
        if entry is None:
            if self.store.make_room(self._encoder.size_bytes(media)):
                return False
            entry = self.files.find(key)
            if entry is None:
                entry = replace(self._encoder.encode(media), digest=key)
                self.encoded += 1
                self.files.offer(entry)
            self.store.put(entry)
        sequence.sight = self._encoder.sight(entry, media, sequence.request.prompt)
        if sequence.sight.parts is not None:
            # A shift would move the rows away from the images that they look at.
            sequence.overflow = "length"
        return found

    def release(self, sequence: Sequence) -> None:
        """The sequence is over: others may have the room of its entry."""
        if sequence.sight is not None:
            self.store.unpin(sequence.sight.entry.digest)
            sequence.sight = None


def _key(salt: bytes, media: Media) -> bytes:
    """Under which media are kept: what was encoded under another salt does not exist."""
    return hashlib.sha256(salt + media.digest).digest() if salt else media.digest
