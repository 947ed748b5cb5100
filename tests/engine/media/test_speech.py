"""Features for transcription: those of the checkpoint's feature extractor, for sounds of any length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.errors import InvalidContent
from engine.media import speech
from engine.media.speech import SpeechProcessor
from engine.media.speech_reader import SpeechReader
from engine.types.content import Upload
from tests.engine.kit.speech import BINS, RATE, save_speech_model, sound, wav

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speech_model(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def reader(folder: Path) -> Iterator[SpeechReader]:
    """A reader with its subprocess."""
    reader = SpeechReader(folder, sampling_rate=RATE)
    reader.start()
    yield reader
    reader.close()


@pytest.mark.parametrize("seconds", [0.3, 1.0, 3.0, 3.337])
def test_blocks_equal_the_whole_sound(folder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loud and quiet blocks, so that the floor of a block differs from that of the sound."""
    monkeypatch.setattr(speech, "_BLOCK_FRAMES", 70)
    samples = sound(seconds) * np.linspace(1e-4, 1, int(seconds * RATE), dtype=np.float32)
    processor = SpeechProcessor.read(folder)
    whole = processor._extractor(
        samples, sampling_rate=RATE, truncation=False, padding="max_length" if seconds < 1 else "longest"
    )["input_features"][0]

    features = processor.features(samples)

    assert features.shape == whole.shape == (BINS, max(int(seconds * 100), 100))
    assert np.allclose(features, whole, atol=1e-5)


def test_a_reader_extracts_in_its_subprocess(folder: Path, reader: SpeechReader) -> None:
    samples = sound(2.5)

    features = reader.features(Upload("audio", wav(samples), "file"))

    expected = SpeechProcessor.read(folder).features(samples)
    assert features.seconds == 2.5
    assert np.allclose(np.frombuffer(features.array.data, np.float32).reshape(features.array.shape), expected)


def test_windows_are_padded_by_zeros(reader: SpeechReader) -> None:
    """Beyond the end; inside, a window is a slice."""
    features = reader.features(Upload("audio", wav(sound(1.5)), "file"))
    whole = np.frombuffer(features.array.data, np.float32).reshape(BINS, 150)
    padded = np.pad(whole, ((0, 0), (0, 100)))

    for start in (0, 20, 50, 51, 149):
        [(name, array)] = features.window(start, 100).arrays
        values = np.frombuffer(array.data, np.float32).reshape(array.shape)
        assert name == "input_features"
        assert np.array_equal(values, padded[:, start : start + 100])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the sound is no WAV, MP3, FLAC, Ogg, WebM, M4A or AAC file"),
        (wav(sound(0.05)), "the sound is shorter than 0.1 s"),
        (b"RIFF1234WAVE" + bytes(100), "the sound is damaged"),
    ],
)
def test_bad_files_are_refused(reader: SpeechReader, data: bytes, reason: str) -> None:
    with pytest.raises(InvalidContent, match=reason):
        reader.features(Upload("audio", data, "file"))
