"""Features of a sound of any length, by the feature extractor of a model that transcribes; for the media sandbox only.

The extractor scales its features by the largest value of the whole sound, and takes a gigabyte for each quarter of an
hour. So the sound is processed in blocks, and the floor of the values is raised to that of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoFeatureExtractor

from engine.errors import InvalidContent
from engine.media.decode import DecodeError, sound_from
from engine.text.contents import ProcessedContent
from engine.types.array import Array
from engine.types.content import ContentKind, Upload

FEATURES, SAMPLES = "input_features", "samples"
MAX_SPEECH_SECONDS = 3600.0
_BLOCK_FRAMES = 6000
# Features are log10 of the power, plus 4, divided by 4, and at least 8 below the largest one before that.
_RANGE = 2.0
_Samples = NDArray[np.float32]


class SpeechProcessor:
    """Decodes a sound, and extracts the features of all of it; a short one is extended by silence to one window."""

    markers: Mapping[ContentKind, str] = {}
    placeholders: frozenset[int] = frozenset()
    refused: Mapping[ContentKind, str] = {}

    def __init__(self, extractor: Any) -> None:
        self._extractor = extractor
        self._margin = -(-extractor.n_fft // (2 * extractor.hop_length))

    @classmethod
    def read(cls, folder: Path) -> SpeechProcessor:
        """The processor of a checkpoint. Raises the errors of transformers."""
        return cls(AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=False, local_files_only=True))

    def process(self, upload: Upload) -> ProcessedContent:
        """The features [bins, frames] and the number of samples. Raises InvalidContent, and MemoryError."""
        try:
            samples = sound_from(upload.data, self._extractor.sampling_rate, MAX_SPEECH_SECONDS)
        except DecodeError as error:
            raise InvalidContent(upload.field, f"the sound {error.reason}", error.problem) from error
        features = self.features(samples)
        count = np.asarray([len(samples)], np.int64)
        arrays = ((FEATURES, _array(features)), (SAMPLES, _array(count)))
        return ProcessedContent("audio", "", arrays, hashlib.sha256(arrays[0][1].data).digest())

    def features(self, samples: _Samples) -> NDArray[np.float32]:
        """The features [bins, frames] of samples."""
        missing = self._extractor.n_samples - len(samples)
        if missing > 0:
            samples = np.pad(samples, (0, missing))
        features = np.concatenate([*self._blocks(samples)], axis=1)
        result: NDArray[np.float32] = np.maximum(features, features.max() - _RANGE, out=features)
        return result

    def _blocks(self, samples: _Samples) -> Iterator[NDArray[np.float32]]:
        hop = self._extractor.hop_length
        for start in range(0, len(samples) // hop, _BLOCK_FRAMES):
            first = max(start - self._margin, 0)
            stop = min(start + _BLOCK_FRAMES, len(samples) // hop)
            is_last = stop == len(samples) // hop
            block = samples[first * hop : None if is_last else (stop + self._margin) * hop]
            yield self._extract(block)[:, start - first : stop - first]

    def _extract(self, samples: _Samples) -> NDArray[np.float32]:
        rate = self._extractor.sampling_rate
        extracted = self._extractor(samples, sampling_rate=rate, truncation=False, padding="longest")
        return np.asarray(extracted[FEATURES][0], np.float32)


def _array(values: NDArray[Any]) -> Array:
    contiguous = np.ascontiguousarray(values)
    little = contiguous.astype(contiguous.dtype.newbyteorder("<"), copy=False)
    return Array(contiguous.dtype.name, contiguous.shape, little.tobytes())
