"""Images and sounds of four APIs reach the engine as uploads, in order and with their place in the request."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from engine.types.content import Upload
from server.app import create_app
from server.media.uploads import MAX_UPLOADS
from server.schemas.media import MAX_UPLOAD_BYTES, InlineMedia, decode_base64, image_url
from tests.server.fakes import Answer, FakeEngine, ask, settings
from tests.server.media.requests import CONTENT_TOKENS, JPEG, PNG, WAV, data_url, media_engine, text64

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
IMAGE_PART = {"type": "image_url", "image_url": {"url": data_url(PNG)}}


def post(engine: FakeEngine, path: str, body: dict[str, Any], **options: Any) -> Answer:
    """The answer to a body, with the model's name."""
    limits = {"max_tokens": 4} if path == MESSAGES else {}
    content = json.dumps({"model": "fake", **limits, **body}).encode()
    headers = {"content-length": str(len(content))}
    return ask(create_app(engine, settings(**options)), "POST", path, body=content, headers=headers)  # type: ignore[arg-type]


def chat(*parts: object, role: str = "user") -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": role, "content": [*parts]}]}


def response(*parts: object) -> dict[str, Any]:
    """A response with one message, which is not stored."""
    return {"input": [{"role": "user", "content": [*parts]}], "store": False}


def image_block(**source: str) -> dict[str, Any]:
    """Anthropic's image."""
    return {"type": "image", "source": source}


TEXT = {"type": "text", "text": "what?"}
TEMPLATE_TEXT = {"type": "text", "text": "what?"}
PARTS: list[tuple[str, dict[str, Any], list[dict[str, str]], tuple[Upload, ...]]] = [
    (
        CHAT,
        chat(
            {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "low"}},
            TEXT,
            {"type": "input_audio", "input_audio": {"data": text64(WAV), "format": "wav"}},
            {"type": "image_url", "image_url": {"url": data_url(JPEG, "image/jpg"), "detail": "original"}},
        ),
        [{"type": "image"}, TEMPLATE_TEXT, {"type": "audio"}, {"type": "image"}],
        (
            Upload("image", PNG, "messages[0].content[0].image_url.url", "low"),
            Upload("audio", WAV, "messages[0].content[2].input_audio.data"),
            Upload("image", JPEG, "messages[0].content[3].image_url.url", "high"),
        ),
    ),
    (
        RESPONSES,
        response(
            {"type": "input_text", "text": "what?"},
            {"type": "input_image", "image_url": data_url(PNG), "detail": "high"},
            {"type": "input_audio", "input_audio": {"data": text64(WAV), "format": "wav"}},
        ),
        [TEMPLATE_TEXT, {"type": "image"}, {"type": "audio"}],
        (
            Upload("image", PNG, "input[0].content[1].image_url", "high"),
            Upload("audio", WAV, "input[0].content[2].input_audio.data"),
        ),
    ),
    (
        MESSAGES,
        chat(image_block(type="base64", media_type="image/jpeg", data=text64(JPEG)), TEXT),
        [{"type": "image"}, TEMPLATE_TEXT],
        (Upload("image", JPEG, "messages[0].content[0].source.data"),),
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "what?", "images": [text64(PNG), text64(JPEG)]}], "stream": False},
        [{"type": "image"}, {"type": "image"}, TEMPLATE_TEXT],
        (Upload("image", PNG, "messages[0].images[0]"), Upload("image", JPEG, "messages[0].images[1]")),
    ),
    (
        "/api/generate",
        {"prompt": "what?", "images": [text64(PNG)], "stream": False},
        [{"type": "image"}, TEMPLATE_TEXT],
        (Upload("image", PNG, "images[0]"),),
    ),
]


@pytest.mark.parametrize(("path", "body", "parts", "uploads"), PARTS)
def test_parts_keep_their_order(
    path: str, body: dict[str, Any], parts: list[dict[str, str]], uploads: tuple[Upload, ...]
) -> None:
    engine = media_engine()

    assert post(engine, path, body).status == 200
    rendered = engine.tokenizer.rendered[-1]
    assert rendered["messages"][-1]["content"] == parts
    assert rendered["uploads"] == uploads
    assert len(engine.requests[-1].contents) == len(uploads)


def test_images_in_results_of_tools() -> None:
    """In Anthropic's tool_result and in function_call_output."""
    engine = media_engine()
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    source = image_block(type="base64", media_type="image/png", data=text64(PNG))
    result = {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": [TEXT, source]}
    answer = post(
        engine,
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
        },
    )
    assert answer.status == 200
    tool = engine.tokenizer.rendered[-1]["messages"][-1]
    assert tool["role"] == "tool"
    assert tool["content"] == [{"type": "text", "text": "Error:"}, TEMPLATE_TEXT, {"type": "image"}]
    assert engine.tokenizer.rendered[-1]["uploads"][0].field == "messages[2].content[0].content[1].source.data"

    answer = post(
        engine,
        RESPONSES,
        {
            "store": False,
            "input": [
                {"role": "user", "content": "a"},
                {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "call_1",
                    "output": [{"type": "input_image", "image_url": data_url(PNG)}],
                },
            ],
        },
    )
    assert answer.status == 200
    assert engine.tokenizer.rendered[-1]["messages"][-1]["content"] == [{"type": "image"}]
    assert engine.tokenizer.rendered[-1]["uploads"][0].field == "input[2].output[0].image_url"


OVER_LIMIT = "A" * ((MAX_UPLOAD_BYTES + 3) // 3 * 4)
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, chat({"type": "image_url", "image_url": {"url": url}}), code, "messages[0].content[0].image_url.url")
    for url, code in (
        ("data:image/png;base64,iVBORw0KGgo", "invalid_base64_image"),
        ("data:image/png;base64,iVBO\vRw0KGgo=", "invalid_base64_image"),
        ("data:image/png;base64,iVBO\u00a0Rw0KGgo=", "invalid_base64_image"),
        ("data:image/png;base64, \n", "invalid_base64_image"),
        ("data:image/png;base64,iVBORw0KGg_=", "invalid_base64_image"),
        ("data:image/png;base64,iVBORw0KGgo=AAAA", "invalid_base64_image"),
        ("data:image/png;base64,====", "invalid_base64_image"),
        ("data:image/png;base64,é", "invalid_base64_image"),
        ("data:image/png;base64,", "invalid_base64_image"),
        (f"data:image/png;base64,{text64(b'no image at all')}", "invalid_image_format"),
        (data_url(PNG, "image/jpeg"), "invalid_image_format"),
        (data_url(WAV, "audio/wav"), "invalid_image_format"),
        (data_url(b"<svg/>", "image/svg+xml"), "invalid_image_format"),
        ("data:image/png,abc", "invalid_image_url"),
        ("http://images.example.com/a.png", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"),
        ("", "invalid_image_url"),
        ("https://images.example.com/a.png", "invalid_image_url"),
        ("https://127.0.0.1/a.png", "invalid_image_url"),
    )
]
REFUSED += [
    (CHAT, chat({"type": kind, kind: {"url": "x"}}), "unsupported_value", "messages[0].content[0].type")
    for kind in ("audio_url", "video_url", "image_embeds")
]
REFUSED += [
    (
        CHAT,
        chat({"type": "input_audio", "input_audio": {"data": text64(PNG), "format": "wav"}}),
        "invalid_value",
        "messages[0].content[0].input_audio.data",
    ),
    (
        CHAT,
        chat({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}),
        "invalid_value",
        "messages[0].content[0].input_audio.data",
    ),
    (
        CHAT,
        chat({"type": "image_url", "image_url": {"url": 3}}),
        "invalid_value",
        "messages[0].content[0].image_url.url",
    ),
    (
        CHAT,
        chat({"type": "file", "file": {"file_id": "file-1"}}),
        "file_not_found",
        "messages[0].content[0].file.file_id",
    ),
    (
        CHAT,
        chat(*[IMAGE_PART] * (MAX_UPLOADS + 1)),
        "invalid_value",
        f"messages[0].content[{MAX_UPLOADS}].image_url.url",
    ),
    (RESPONSES, response({"type": "input_image"}), "invalid_value", "input[0].content[0]"),
    (
        RESPONSES,
        response({"type": "input_image", "file_id": "file-1"}),
        "file_not_found",
        "input[0].content[0].file_id",
    ),
    (RESPONSES, response({"type": "input_video", "video": "x"}), "unsupported_value", "input[0].content[0]"),
    (
        RESPONSES,
        response({"type": "input_image", "image_url": data_url(PNG, "image/gif")}),
        "invalid_image_format",
        "input[0].content[0].image_url",
    ),
]


@pytest.mark.parametrize(("path", "body", "code", "param"), REFUSED)
def test_errors_name_the_part(path: str, body: dict[str, Any], code: str, param: str) -> None:
    answer = post(media_engine(), path, body)

    error = answer.json["error"]
    assert answer.status in (400, 404)
    assert (error["code"], error["param"]) == (code, param)
    assert f"'{param}'" in error["message"] or code == "file_not_found"


@pytest.mark.parametrize("media_type", ["", "application/octet-stream", "IMAGE/X-PNG"])
def test_an_image_without_a_known_type_has_that_of_its_bytes(media_type: str) -> None:
    engine = media_engine()

    answer = post(engine, CHAT, chat({"type": "image_url", "image_url": {"url": data_url(PNG, media_type)}}))
    assert answer.status == 200
    assert [upload.kind for upload in engine.tokenizer.rendered[-1]["uploads"]] == ["image"]


def test_whitespace_in_base64_is_ignored() -> None:
    """As browsers do: lines of 76 characters, and a newline at the end."""
    lines = base64.encodebytes(PNG).decode()
    media = image_url(f"data:image/png;base64,{lines} \t\r\f")

    assert isinstance(media, InlineMedia)
    assert media.data == PNG
    assert media.characters == len(lines) + 4


@pytest.mark.parametrize("size", [3 * 2**18 - 1, 3 * 2**18, 3 * 2**18 + 1, 2**21])
def test_base64_decodes_in_pieces(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    text = base64.b64encode(data).decode()

    assert decode_base64(text).data == data
    assert decode_base64("data:" + text, offset=5).data == data


def test_padding_between_pieces_is_refused() -> None:
    with pytest.raises(PydanticCustomError, match="it is not base64"):
        decode_base64("A" * (2**20 - 2) + "==" + "AAAA")


def test_a_large_image_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binascii.a2b_base64", lambda *_, **__: pytest.fail("decoded"))
    answer = post(media_engine(), CHAT, chat({"type": "image_url", "image_url": {"url": f"data:;base64,{OVER_LIMIT}"}}))

    assert answer.json["error"]["code"] == "image_too_large"
    assert str(MAX_UPLOAD_BYTES) in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (MESSAGES, chat({"type": "document", "source": {"type": "text"}}), "messages[0].content[0]"),
        (
            MESSAGES,
            chat(image_block(type="base64", media_type="image/png", data=text64(JPEG))),
            "messages[0].content[0].source.data",
        ),
        (
            MESSAGES,
            chat(image_block(type="base64", media_type="image/tiff", data=text64(JPEG))),
            "messages[0].content[0].source.media_type",
        ),
        (MESSAGES, chat(image_block(type="file", file_id="file-1")), "file-1"),
        (MESSAGES, chat(image_block(type="url", url="https://x.test/a")), "messages[0].content[0].source.url"),
        ("/api/chat", {"messages": [{"role": "user", "images": [data_url(PNG)]}]}, "messages[0].images[0]"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["https://x.test/a"]}]}, "messages[0].images[0]"),
        ("/api/generate", {"prompt": "a", "images": [text64(b"text")]}, "images[0]"),
        ("/api/generate", {"prompt": "a", "raw": True, "images": [text64(PNG)]}, "images"),
    ],
)
def test_errors_of_other_apis_name_the_part(path: str, body: dict[str, Any], named: str) -> None:
    answer = post(media_engine(), path, body)

    assert answer.status in (400, 404)
    assert named in answer.body.decode()


@pytest.mark.parametrize(("path", "body", "parts", "uploads"), PARTS)
def test_a_model_of_text_names_itself(path: str, body: dict[str, Any], parts: object, uploads: object) -> None:
    answer = post(FakeEngine(), path, body)

    assert answer.status == 400
    assert "fake reads text only, no images" in answer.body.decode()


def test_a_model_of_images_reads_no_audio() -> None:
    part = {"type": "input_audio", "input_audio": {"data": text64(WAV), "format": "wav"}}
    error = post(media_engine("image"), CHAT, chat(part)).json["error"]

    assert error["code"] == "unsupported_value"
    assert "fake reads text and images only, no audio" in error["message"]


def test_usage_counts_tokens_of_images_and_sounds() -> None:
    body = PARTS[0][1]
    details = post(media_engine(), CHAT, body).json["usage"]["prompt_tokens_details"]
    assert (details["image_tokens"], details["audio_tokens"]) == (2 * CONTENT_TOKENS, CONTENT_TOKENS)

    streamed = post(media_engine(), CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.events[-2]["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * CONTENT_TOKENS

    details = post(media_engine(), RESPONSES, PARTS[1][1]).json["usage"]["input_tokens_details"]
    assert (details["image_tokens"], details["audio_tokens"]) == (CONTENT_TOKENS, CONTENT_TOKENS)

    text = post(media_engine(), CHAT, chat(TEXT)).json["usage"]["prompt_tokens_details"]
    assert text.keys() == {"cached_tokens", "cache_write_tokens"}


def test_counting_endpoints_count_images() -> None:
    body, tokens = chat(IMAGE_PART, TEXT), CONTENT_TOKENS + len("what?")
    assert post(media_engine(), f"{CHAT}/input_tokens", body).json["input_tokens"] == tokens
    assert post(media_engine(), "/tokenize", body).json["count"] == tokens
    counted = chat(image_block(type="base64", media_type="image/png", data=text64(PNG)), TEXT)
    assert post(media_engine(), f"{MESSAGES}/count_tokens", counted).json["input_tokens"] == tokens
    counted = {
        "input": response({"type": "input_image", "image_url": data_url(PNG)}, {"type": "input_text", "text": "what?"})[
            "input"
        ]
    }
    assert post(media_engine(), f"{RESPONSES}/input_tokens", counted).json["input_tokens"] == tokens


def test_modalities_are_listed() -> None:
    app = create_app(media_engine(), settings())  # type: ignore[arg-type]

    assert ask(app, "GET", "/v1/capabilities").json["model"]["input_modalities"] == ["text", "image", "audio"]
    assert ask(app, "GET", "/v1/models").json["data"][0]["input_modalities"] == ["text", "image", "audio"]
    assert {"vision", "audio"} <= set(ask(app, "POST", "/api/show", json_body={"model": "fake"}).json["capabilities"])
    assert ask(app, "GET", "/model_info").json["has_image_understanding"] is True


def test_a_prompt_is_not_truncated_inside_an_image() -> None:
    body = {**chat(TEXT, IMAGE_PART, TEXT), "truncate_prompt_tokens": 7}
    error = post(media_engine(), CHAT, body).json["error"]
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", "invalid_value")

    engine = media_engine()
    assert post(engine, CHAT, {**body, "truncate_prompt_tokens": 8}).status == 200
    [content] = engine.requests[-1].contents
    assert (content.start, content.stop) == (0, CONTENT_TOKENS)


def test_large_bodies_are_for_images_only() -> None:
    """Of a body above the usual limit, only base64 may exceed it; nothing may for a model of text."""
    limits = {"body_bytes": 1000, "media_body_bytes": 5000}
    image = chat({"type": "image_url", "image_url": {"url": data_url(PNG + bytes(2000))}}, TEXT)
    text = chat({"type": "text", "text": "a" * 2000}, IMAGE_PART)
    beyond = chat({"type": "image_url", "image_url": {"url": data_url(PNG + bytes(5000))}}, TEXT)

    def status(engine: FakeEngine, body: dict[str, Any]) -> int:
        return post(engine, CHAT, body, limits=limits).status

    assert status(media_engine(), image) == 200
    assert status(media_engine(), text) == 413
    assert status(media_engine(), beyond) == 413
    assert status(FakeEngine(), image) == 413
    assert status(media_engine(), chat(TEXT)) == 200
