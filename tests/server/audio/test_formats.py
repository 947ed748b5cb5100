"""Formats of transcriptions, and limits that need no model."""

from __future__ import annotations

import asyncio

import pysubs2
import pytest
import webvtt

from server.app import create_app
from server.audio.budget import FeatureBudget
from server.audio.formats import TextDeltas, plain_text, srt, verbose_segment, vtt
from server.audio.segments import SpeechSegment
from server.http.errors import ApiError
from tests.engine.kit.speech import sound, wav
from tests.server.fakes import FakeEngine, call, settings

TRICKY = (
    SpeechSegment(0, 0.0, 2.5, (1,), " Hello there.", (), 0.0),
    SpeechSegment(0, 3599.9996, 3601.25, (2,), "a --> b\n\n<c> & d ", (), 0.0),
)
FORM = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + wav(sound(0.5)) + b"\r\n--x--\r\n"


def test_cues_survive_any_text() -> None:
    """Empty lines, arrows and markup."""
    events = pysubs2.SSAFile.from_string(srt(TRICKY), format_="srt")
    captions = webvtt.from_string(vtt(TRICKY)).captions

    assert [(event.start, event.end) for event in events] == [(0, 2500), (3_600_000, 3_601_250)]
    assert [caption.end for caption in captions] == ["00:00:02.500", "01:00:01.250"]
    assert events[0].text == captions[0].text == "Hello there."
    assert captions[1].raw_text == "a -&gt; b &lt;c&gt; &amp; d"


def test_deltas_join_to_the_text() -> None:
    """White space at the ends of the text is left out, and kept between segments."""
    deltas = TextDeltas()
    texts = ["  ", " a ", "", " b", "\n", "c  "]

    joined = "".join(map(deltas.append, texts))

    segments = [SpeechSegment(0, 0, 0, (), text, (), 0.0) for text in texts]
    assert joined == plain_text(segments) == "a  b\nc"


def test_a_segment_without_log_probabilities_has_numbers() -> None:
    segment = verbose_segment(3, TRICKY[1], 0.5)

    assert (segment["id"], segment["start"], segment["end"]) == (3, 3600.0, 3601.25)
    assert (segment["avg_logprob"], segment["temperature"]) == (0.0, 0.5)


def test_a_budget_refuses_what_exceeds_it() -> None:
    """But never a sound alone."""
    budget = FeatureBudget(100)
    with budget.hold(150), pytest.raises(ApiError) as refusal, budget.hold(1):
        pass
    with budget.hold(60), budget.hold(40):
        pass

    assert refusal.value.status_code == 429


@pytest.mark.parametrize("path", ["transcriptions", "translations"])
def test_a_text_model_is_named(path: str) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}

    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]
    answer = asyncio.run(call(app, "POST", f"/v1/audio/{path}", body=FORM, headers=headers))

    assert answer.status == 400
    assert answer.json["error"]["message"] == "Invalid value for 'model': fake reads text only, no audio."
