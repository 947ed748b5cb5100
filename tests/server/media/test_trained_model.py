"""A model that was trained to name shapes answers what is in the picture, in the forms of four APIs and any format."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from engine.config import EngineConfig
from engine.engine import Engine
from tests.engine.kit.shapes import COLOURS, QUESTION, SHAPES, answer_to, draw, save_shape_model
from tests.engine.media.processors import encoded
from tests.server.fakes import serve_in_thread
from tests.server.media.requests import data_url, text64

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CHAT = "/v1/chat/completions"
MODEL = {"model": "fake", "temperature": 0}
ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = save_shape_model(tmp_path_factory.mktemp("model"))
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", context=512, slots=4))
    with serve_in_thread(engine) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while client.get("/ready").status_code != 200:
            time.sleep(0.05)
        yield client


def ask(http: httpx.Client, *images: bytes, media_type: str = "image/png") -> list[str]:
    """The answers to the same question about images, in one conversation."""
    messages: list[dict[str, Any]] = []
    answers: list[str] = []
    for image in images:
        part = {"type": "image_url", "image_url": {"url": data_url(image, media_type)}}
        messages.append({"role": "user", "content": [part, {"type": "text", "text": QUESTION}]})
        answer = http.post(CHAT, json={**MODEL, "messages": messages, "max_tokens": 24})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_picture_is_named(http: httpx.Client, colour: str, shape: str) -> None:
    assert ask(http, encoded(draw(colour, shape, 200))) == [answer_to(colour, shape)]


def test_pictures_of_a_conversation_are_told_apart(http: httpx.Client) -> None:
    images = [encoded(draw("red", "circle", 90)), encoded(draw("blue", "cross", 90))]

    assert ask(http, *images) == ["A red circle.", "A blue cross."]
    assert ask(http, *reversed(images)) == ["A blue cross.", "A red circle."]


def test_apis_see_the_same_picture(http: httpx.Client) -> None:
    image = encoded(draw("green", "triangle", 120))
    response = [{"type": "input_image", "image_url": data_url(image)}, {"type": "input_text", "text": QUESTION}]
    source = {"type": "base64", "media_type": "image/png", "data": text64(image)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    message = {"role": "user", "content": QUESTION, "images": [text64(image)]}
    options = {"model": "fake", "stream": False, "options": {"temperature": 0, "num_predict": 24}}
    answers = [
        ask(http, image)[0],
        _post(http, "/v1/responses", {**MODEL, "input": [{"role": "user", "content": response}]})["output"][0][
            "content"
        ][0]["text"],
        _post(http, "/v1/messages", {**MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": blocks}]})[
            "content"
        ][0]["text"],
        _post(http, "/api/chat", {**options, "messages": [message]})["message"]["content"],
        _post(http, "/api/generate", {**options, "prompt": QUESTION, "images": [text64(image)]})["response"],
    ]

    assert set(answers) == {"A green triangle."}


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_formats_have_the_same_picture(http: httpx.Client, kind: str) -> None:
    image = encoded(draw("yellow", "cross", 200), kind)

    assert ask(http, image, media_type=f"image/{kind.lower()}") == ["A yellow cross."]


def test_modes_have_the_same_picture(http: httpx.Client) -> None:
    """CMYK, a palette, 16-bit greys, and a transparent background, which is white."""
    triangle = draw("black", "triangle", 200)
    grey = Image.fromarray(np.asarray(triangle.convert("L")).astype(np.uint16) * 257)
    transparent = triangle.convert("RGBA")
    transparent.putalpha(triangle.convert("L").point(lambda value: 255 - value))

    assert ask(http, encoded(triangle.convert("CMYK"), "JPEG"), media_type="image/jpeg") == ["A black triangle."]
    for image in (triangle.quantize(16), triangle.convert("1", dither=Image.Dither.NONE), grey, transparent):
        assert ask(http, encoded(image)) == ["A black triangle."]


def test_the_first_frame_of_an_animation_is_seen(http: httpx.Client) -> None:
    later = [draw("blue", "circle", 100), draw("black", "cross", 100)]
    image = encoded(draw("red", "triangle", 100), "GIF", save_all=True, append_images=later)

    assert ask(http, image, media_type="image/gif") == ["A red triangle."]


def test_a_turned_photo_is_upright(http: httpx.Client) -> None:
    """As phones write them: the pixels lie on their side, and the orientation tells."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    upright = draw("red", "triangle", 200)
    out = io.BytesIO()
    upright.transpose(Image.Transpose.ROTATE_90).save(out, "JPEG", exif=exif)

    assert ask(http, out.getvalue(), media_type="image/jpeg") == ["A red triangle."]


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result
