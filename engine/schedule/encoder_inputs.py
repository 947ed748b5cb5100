"""Encoder entries of sequences with media: encoded once, pinned while in use, cached while there is memory for them.

Owns the encoder cache (kvcache/encoder_cache.py). A sequence gets its entry before it gets a slot.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from engine.model.encoder import Encoder
from engine.schedule.sequence import Sequence
from engine.types.request import Media
from kvcache.encoder_cache import EncoderCache, EncoderEntry
from kvcache.encoder_files import ENCODER_CODEC, EncoderFiles
from kvcache.offload import OffloadConfig


class EncoderInputs:
    """The encoder entries of all sequences. `encoder` None: the model has no encoder.

    files  on disk, for entries that outlive the process; written when the engine is idle
    """

    def __init__(self, encoder: Encoder | None, offload: OffloadConfig, device: torch.device) -> None:
        self._encoder, self.files = encoder, EncoderFiles(offload, device, ENCODER_CODEC)
        self.store = EncoderCache[EncoderEntry](0 if encoder is None else encoder.budget_bytes)

    def prepare(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its encoder mask; whether the next one may be prepared in the same step.

        One entry is encoded a step, which bounds the delay of running sequences. While pinned entries leave no memory
        for another one, the queue waits.
        """
        media = sequence.request.media
        if media is None or self._encoder is None or sequence.encoder_mask is not None:
            return True
        key = _entry_key(sequence.request.salt, media)
        entry = self.store.pin(key)
        is_cached = entry is not None
        if entry is None:
            if self.store.evict_for(self._encoder.entry_bytes(media)):
                return False
            entry = self.files.read(key)
            if entry is None:
                entry = replace(self._encoder.encode(media), digest=key)
                if sequence.request.cacheable:
                    self.files.enqueue(entry)
            self.store.put(entry)
        sequence.encoder_mask = self._encoder.mask(entry, media, sequence.request.prompt)
        if sequence.encoder_mask.parts is not None:
            # A context shift would move tokens away from the images that they attend to.
            sequence.overflow = "length"
        return is_cached

    def release(self, sequence: Sequence) -> None:
        """Unpin the entry of a finished sequence; that of an uncached request ends with its last choice."""
        if sequence.encoder_mask is not None:
            digest = sequence.encoder_mask.entry.digest
            self.store.unpin(digest)
            if not sequence.request.cacheable:
                self.store.remove(digest)
            sequence.encoder_mask = None


def _entry_key(salt: bytes, media: Media) -> bytes:
    """The key of an entry: media under another salt never match."""
    return hashlib.sha256(salt + media.digest).digest() if salt else media.digest
