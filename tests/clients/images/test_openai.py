"""openai-python with an image: chat, Responses, files."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from subject import IMAGE, Server, data_url, image_prompt_tokens


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=60) as client:
        yield client


def test_images(client: openai.OpenAI, server: Server) -> None:
    """A data URL in a chat; its tokens are part of the usage."""
    answer = client.chat.completions.create(
        model=server.model,
        max_completion_tokens=4,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_url(IMAGE)}},
                    {"type": "text", "text": server.question},
                ],
            }
        ],
    )

    assert answer.usage is not None
    assert answer.usage.prompt_tokens == image_prompt_tokens(server)
    details = answer.usage.prompt_tokens_details
    assert details is not None
    assert details.to_dict()["image_tokens"] > 0


def test_responses_images(client: openai.OpenAI, server: Server) -> None:
    """A data URL and a file have the tokens of the chat."""
    file = client.files.create(file=("image.png", IMAGE, "image/png"), purpose="vision")
    inputs = ({"image_url": data_url(IMAGE)}, {"file_id": file.id})
    answers = [
        client.responses.create(
            model=server.model,
            max_output_tokens=4,
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "detail": "auto", **image},  # type: ignore[typeddict-item]
                        {"type": "input_text", "text": server.question},
                    ],
                }
            ],
        )
        for image in inputs
    ]
    client.files.delete(file.id)

    tokens = image_prompt_tokens(server)
    assert [answer.usage and answer.usage.input_tokens for answer in answers] == [tokens, tokens]
