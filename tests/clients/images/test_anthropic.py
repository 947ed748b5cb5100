"""anthropic-python with an image: messages, counts, tool results, errors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from subject import IMAGE, Server, image_prompt_tokens


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=60) as client:
        yield client


def _block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def test_images(client: anthropic.Anthropic, server: Server) -> None:
    """The tokens of a base64 block are those of the chat, and the count is the usage."""
    content = [_block(IMAGE), {"type": "text", "text": server.question}]
    messages: list[Any] = [{"role": "user", "content": content}]
    counted = client.messages.count_tokens(model=server.model, messages=messages)
    usage = client.messages.create(model=server.model, max_tokens=4, messages=messages).usage

    tokens = image_prompt_tokens(server)
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == tokens
    assert usage.input_tokens + cached == tokens


def test_damaged_image(client: anthropic.Anthropic, server: Server) -> None:
    """A damaged image is the client's error for bad requests."""
    messages: list[Any] = [{"role": "user", "content": [_block(IMAGE[:60])]}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=server.model, max_tokens=4, messages=messages)

    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
