"""OpenAI's client against a server with a tiny model: texts and segments equal those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from tests.engine.kit.speech import save_speech_model, sound, wav
from tests.server.audio.speech_server import Reference, client_of, speech_server

pytestmark = pytest.mark.filterwarnings("ignore")

# Windows of the model have one second.
SECONDS = (0.6, 1.0, 2.5, 3.7)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(save_speech_model(tmp_path_factory.mktemp("speech"), seed=3))


@pytest.fixture(scope="module")
def address(reference: Reference) -> Iterator[str]:
    with speech_server(reference.folder) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address) as client:
        yield client


def named(data: bytes | NDArray[np.float32]) -> tuple[str, bytes]:
    return "sound.wav", data if isinstance(data, bytes) else wav(data)


def segments_of(client: openai.OpenAI, samples: NDArray[np.float32], **options: Any) -> list[tuple[float, float, str]]:
    answer = client.audio.transcriptions.create(
        model="speech", file=named(samples), response_format="verbose_json", **options
    )
    return [(segment.start, segment.end, segment.text) for segment in answer.segments or ()]


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("language", ["de", None])
def test_segments_equal_those_of_transformers(
    client: openai.OpenAI, reference: Reference, seconds: float, language: str | None
) -> None:
    """Of sounds shorter than a window, transformers goes on in the silence behind it."""
    samples = sound(seconds, seed=int(10 * seconds))
    options: dict[str, Any] = {} if language is None else {"language": language}

    segments = segments_of(client, samples, **options)

    expected = reference.segments(samples, task="transcribe", **options)
    assert segments
    assert segments == (expected if seconds >= 1 else expected[: len(segments)])
