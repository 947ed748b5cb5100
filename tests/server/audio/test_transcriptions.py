"""OpenAI's client against a server with a tiny model: texts and segments equal those of transformers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pysubs2
import pytest
import torch
import webvtt
from numpy.typing import NDArray

from tests.engine.kit.media_in_process import use_media_in_process
from tests.engine.kit.speech import save_speech_model, sound, wav
from tests.selection import quick
from tests.server.audio.speech_server import Reference, client_of, speech_server

pytestmark = pytest.mark.filterwarnings("ignore")

# Windows of the model have one second.
SECONDS = (0.6, 1.0, 2.5, 3.7)
SOUND = sound(2.5, seed=25)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(save_speech_model(tmp_path_factory.mktemp("speech"), seed=3, max_tokens=32))


@pytest.fixture(scope="module", autouse=True)
def media_in_process() -> Iterator[None]:
    """The sandbox of sounds has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        use_media_in_process(patch)
        yield


@pytest.fixture(scope="module")
def address(reference: Reference) -> Iterator[str]:
    with speech_server(reference.folder) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address) as client:
        yield client


def named(samples: NDArray[np.float32]) -> tuple[str, bytes]:
    return "sound.wav", wav(samples)


def verbose(client: openai.OpenAI, samples: NDArray[np.float32], **options: Any) -> Any:
    return client.audio.transcriptions.create(
        model="speech", file=named(samples), response_format="verbose_json", **options
    )


def segments_of(client: openai.OpenAI, samples: NDArray[np.float32], **options: Any) -> list[tuple[float, float, str]]:
    return [(segment.start, segment.end, segment.text) for segment in verbose(client, samples, **options).segments]


@pytest.mark.parametrize(
    ("seconds", "language"),
    quick([(0.6, "de"), (3.7, None)], itertools.product(SECONDS, ("de", None))),
)
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


def test_a_translation_equals_that_of_transformers(client: openai.OpenAI, reference: Reference) -> None:
    """The task is another token of the prompt."""
    answer = client.audio.translations.create(model="speech", file=named(SOUND), response_format="verbose_json")

    segments = [(segment.start, segment.end, segment.text) for segment in answer.segments or ()]
    assert segments == reference.segments(SOUND, task="translate")


def test_a_prompt_precedes_every_window(client: openai.OpenAI, reference: Reference) -> None:
    """With the token of previous text, as transformers' `prompt_ids`."""
    previous = reference.tokenizer.convert_tokens_to_ids("<|startofprev|>")
    tokens = [previous, *reference.tokenizer(" Cellar", add_special_tokens=False)["input_ids"]]

    segments = segments_of(client, SOUND, prompt=" Cellar ", language="fr")

    assert segments == reference.segments(SOUND, task="transcribe", language="fr", prompt_ids=torch.tensor(tokens))


def test_a_verbose_answer_has_all_fields(client: openai.OpenAI) -> None:
    answer = verbose(client, SOUND, timestamp_granularities=["segment"])

    assert answer.duration == 2.5
    assert answer.language in ("english", "german", "french")
    assert answer.usage.model_dump() == {"type": "duration", "seconds": 3}
    assert [segment.id for segment in answer.segments] == list(range(len(answer.segments)))
    for segment in answer.segments:
        assert segment.avg_logprob < 0
        assert 0 < segment.no_speech_prob < 1
        assert segment.compression_ratio > 0
        assert segment.tokens


def milliseconds(clock: str) -> int:
    """Of HH:MM:SS.mmm."""
    hours, minutes, seconds = clock.split(":")
    return round(((int(hours) * 60 + int(minutes)) * 60 + float(seconds)) * 1000)


def test_formats_have_the_same_segments(client: openai.OpenAI) -> None:
    """Text is that of all segments; libraries read the subtitles."""
    answer = verbose(client, SOUND, language="en")
    formats = {
        name: client.audio.transcriptions.create(model="speech", file=named(SOUND), response_format=name, language="en")
        for name in ("json", "text", "srt", "vtt")
    }

    text = "".join(segment.text for segment in answer.segments).strip()
    assert answer.text == text == formats["json"].text == formats["text"].removesuffix("\n")
    events = pysubs2.SSAFile.from_string(formats["srt"], format_="srt")
    captions = webvtt.from_string(formats["vtt"]).captions
    times = [(round(segment.start * 1000), round(segment.end * 1000)) for segment in answer.segments]
    assert [(event.start, event.end) for event in events] == times
    assert [(milliseconds(caption.start), milliseconds(caption.end)) for caption in captions] == times


def test_a_stream_has_the_text_in_deltas(client: openai.OpenAI) -> None:
    """One for each segment with text; the last event has all of it, with usage and log-probabilities."""
    whole = client.audio.transcriptions.create(model="speech", file=named(SOUND), include=["logprobs"])

    stream = client.audio.transcriptions.create(model="speech", file=named(SOUND), stream=True, include=["logprobs"])
    *deltas, done = list(stream)

    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text == whole.text
    assert done.usage.model_dump() == whole.usage.model_dump()
    assert done.usage.input_tokens == 125 + done.usage.input_token_details.text_tokens
    assert [entry.logprob for entry in done.logprobs] == [entry.logprob for entry in whole.logprobs]
    assert bytes(int(number) for entry in whole.logprobs for number in entry.bytes).decode(errors="replace").strip()
    assert all(math.isfinite(entry.logprob) for entry in whole.logprobs)
    assert sum(len(event.logprobs) for event in deltas) <= len(done.logprobs)


def test_concurrent_sounds_do_not_change_each_other(client: openai.OpenAI, reference: Reference) -> None:
    sounds = [sound(1.0 + 0.3 * seed, seed=seed) for seed in range(5)]
    with ThreadPoolExecutor(5) as threads:
        answers = list(threads.map(lambda samples: segments_of(client, samples, language="de"), sounds))

    assert answers == [reference.segments(samples, task="transcribe", language="de") for samples in sounds]


def post(address: str, path: str, data: bytes | None, **fields: Any) -> httpx.Response:
    files = None if data is None else {"file": ("sound", data)}
    return httpx.post(f"{address}/v1/audio/{path}", files=files or {"other": ("x", b"")}, data=fields, timeout=60)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "xml"}, "response_format"),
        ({"chunking_strategy": "auto"}, "chunking_strategy"),
        ({"known_speaker_names[]": ["a", "b"]}, "known_speaker_names"),
        ({"timestamp_granularities[]": ["word", "segment"]}, "timestamp_granularities[]"),
        ({"timestamp_granularities[]": ["segment"]}, "timestamp_granularities[]"),
        ({"include[]": ["logprobs"], "response_format": "srt"}, "include[]"),
        ({"stream": "true", "response_format": "vtt"}, "stream"),
        ({"temperature": "1.5"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"language": "klingon"}, "language"),
        ({"speed": "2"}, "speed"),
        ({"model": "other"}, "model"),
    ],
)
def test_invalid_fields_are_named(address: str, fields: dict[str, Any], param: str) -> None:
    answer = post(address, "transcriptions", wav(SOUND), **{"model": "speech", **fields})

    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "file"),
        (b"", "the sound is no WAV"),
        (b"RIFF\0\0\0\0WAVE" + bytes(64), "the sound is damaged"),
        (b"\x89PNG\r\n\x1a\n" + bytes(64), "the sound is no WAV"),
        (wav(sound(0.05)), "the sound is shorter than 0.1 s"),
        (bytes(25 * 2**20 + 1), "at most 26214400 are read"),
    ],
)
def test_bad_files_are_refused(address: str, data: bytes | None, reason: str, stream: str) -> None:
    answer = post(address, "transcriptions", data, model="speech", stream=stream)

    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "file"


def test_a_larger_body_is_refused(address: str) -> None:
    assert post(address, "transcriptions", bytes(26 * 2**20), model="speech").status_code == 413


def test_a_body_of_json_is_refused(address: str) -> None:
    assert httpx.post(f"{address}/v1/audio/transcriptions", json={"model": "speech"}).status_code == 415


def test_the_model_reads_audio(address: str) -> None:
    assert httpx.get(f"{address}/v1/models/speech").json()["input_modalities"] == ["text", "audio"]
    assert httpx.get(f"{address}/v1/capabilities").json()["model"]["input_modalities"] == ["text", "audio"]


def test_other_endpoints_refuse_it_by_name(address: str) -> None:
    """A prompt without a sound, and a sound in a conversation."""
    for path, body in (
        ("completions", {"prompt": "Hello"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ):
        answer = httpx.post(f"{address}/v1/{path}", json={"model": "speech", **body})
        assert answer.status_code == 400, answer.text


def test_a_model_of_one_language_has_no_tasks(tmp_path: Path) -> None:
    """Its prompt is the start token alone."""
    reference = Reference(save_speech_model(tmp_path, seed=5, multilingual=False))
    with speech_server(reference.folder) as address, client_of(address) as client:
        segments = segments_of(client, SOUND, language="english")
        translation = post(address, "translations", wav(SOUND), model="speech")
        german = post(address, "transcriptions", wav(SOUND), model="speech", language="de")

    assert segments == reference.segments(SOUND)
    assert translation.status_code == german.status_code == 400
