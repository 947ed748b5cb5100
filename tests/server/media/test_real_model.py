"""Images through the HTTP API of a server with a real, tiny model and its own processor."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.config import EngineConfig
from engine.engine import Engine
from server.app import create_app
from tests.engine.kit.content_models import save_content_model
from tests.engine.kit.media_in_process import use_media_in_process
from tests.server.fakes import Answer, call, settings
from tests.server.media.requests import data_url

pytestmark = pytest.mark.filterwarnings("ignore")


def png(colour: tuple[int, int, int]) -> bytes:
    """A picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return file.getvalue()


def test_images_of_a_request_reach_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another image gives other logits; damaged bytes are a 400 that names the part."""
    use_media_in_process(monkeypatch)
    save_content_model("llava", tmp_path)
    asyncio.run(_compare(tmp_path))


async def _compare(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", context=256))
    app = create_app(engine, settings())

    async def ask(url: str, path: str = "/v1/chat/completions", **more: Any) -> Answer:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hi"}]
        body = {"model": "fake", "messages": [{"role": "user", "content": parts}], **more}
        return await call(app, "POST", path, json_body=body)

    engine.start()
    try:
        await engine.wait_ready()
        options = {"max_tokens": 3, "temperature": 0, "logprobs": True}
        red, again, blue = [
            await ask(data_url(png(colour)), **options) for colour in ((255, 0, 0), (255, 0, 0), (0, 0, 255))
        ]
        damaged = await ask(data_url(png((9, 9, 9))[:40]), **options)
        counted = await ask(data_url(png((255, 0, 0))), "/v1/chat/completions/input_tokens")
    finally:
        engine.close()

    assert [answer.status for answer in (red, again, blue)] == [200, 200, 200], red.body
    scores = [
        [entry["logprob"] for entry in answer.json["choices"][0]["logprobs"]["content"]]
        for answer in (red, again, blue)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert scores[0] != pytest.approx(scores[2], abs=1e-5)
    usage = red.json["usage"]
    assert 0 < usage["prompt_tokens_details"]["image_tokens"] < usage["prompt_tokens"]
    assert counted.json["input_tokens"] == usage["prompt_tokens"]
    assert damaged.status == 400
    assert (damaged.json["error"]["code"], damaged.json["error"]["param"]) == (
        "image_parse_error",
        "messages[0].content[0].image_url.url",
    )
