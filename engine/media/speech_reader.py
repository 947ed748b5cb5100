"""Features of uploaded sounds for a model that transcribes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.media.sandbox import MediaSandbox
from engine.types.content import Upload
from engine.types.speech import SpeechFeatures

# Limit of the processor time of a sound: the features of 10 minutes took 1.4 s.
_MAX_SECONDS = 120.0
_FRAMES_PER_SECOND = 100


class SpeechReader:
    """A SpeechClient. Its methods block: for worker threads; one sound at a time."""

    def __init__(self, folder: Path, *, sampling_rate: int) -> None:
        self._sampling_rate = sampling_rate
        self._sandbox = MediaSandbox(folder, reads_speech=True, max_seconds=_MAX_SECONDS)

    def start(self) -> None:
        """Start the subprocess, without a wait for it."""
        self._sandbox.start()

    def features(self, upload: Upload) -> SpeechFeatures:
        """Decode a sound and extract its features. Raises InvalidContent, and Overloaded."""
        arrays = dict(self._sandbox.process(upload).arrays)
        samples = int(np.frombuffer(arrays["samples"].data, np.int64)[0])
        array = arrays["input_features"]
        content_frames = min(samples * _FRAMES_PER_SECOND // self._sampling_rate, array.shape[1])
        return SpeechFeatures(array, samples / self._sampling_rate, content_frames)

    def close(self) -> None:
        """End the subprocess."""
        self._sandbox.close()
