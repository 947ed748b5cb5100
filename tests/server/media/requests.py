"""An engine that reads images and sounds, as the server sees it, and bytes with their formats' signatures."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.types.content import Content, Upload
from engine.types.request import RenderedPrompt
from tests.server.fakes import INFO, FakeEngine, FakeTokenizer

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"
JPEG = b"\xff\xd8\xff\xe0" + b"pixels"
WAV = b"RIFF\0\0\0\0WAVE" + b"samples"
# Placeholder tokens of an image or a sound.
CONTENT_TOKENS = 3


def text64(data: bytes) -> str:
    """Base64 of the bytes."""
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    """A data URL of the bytes."""
    return f"data:{media_type};base64,{text64(data)}"


class MediaTokenizer(FakeTokenizer):
    """Renders each image or sound as CONTENT_TOKENS tokens of value 0."""

    def render_chat(
        self, messages: Sequence[Mapping[str, object]], *, uploads: Sequence[Upload] = (), **options: Any
    ) -> RenderedPrompt:
        self.rendered.append({"messages": list(messages), "uploads": tuple(uploads), **options})
        tokens: list[int] = []
        contents: list[Content] = []
        left = iter(uploads)
        for message in messages:
            for part in _parts(message["content"]):
                if part["type"] == "text":
                    tokens += part["text"].encode()
                    continue
                upload = next(left)
                assert upload.kind == part["type"]
                contents.append(Content(upload.kind, len(tokens), len(tokens) + CONTENT_TOKENS, b"digest", ()))
                tokens += [0] * CONTENT_TOKENS
        assert next(left, None) is None
        return RenderedPrompt(tuple(tokens), contents=tuple(contents))


def _parts(content: object) -> list[dict[str, str]]:
    return content if isinstance(content, list) else [{"type": "text", "text": str(content)}]


def media_engine(*modalities: str) -> FakeEngine:
    """An engine whose model reads text, and images and sounds or those given."""
    info = replace(INFO, input_modalities=("text", *(modalities or ("image", "audio"))))
    return FakeEngine(info_value=info, tokenizer=MediaTokenizer())
