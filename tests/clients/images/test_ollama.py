"""ollama-python with an image: chat, generate, the model's card, errors."""

from __future__ import annotations

import ollama
import pytest
from subject import IMAGE, Server, image_prompt_tokens


@pytest.fixture(scope="module")
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"Authorization": f"Bearer {server.key}"}, timeout=60)


def test_images(client: ollama.Client, server: Server) -> None:
    """Bytes in a chat and in a prompt have the tokens of OpenAI's chat; the card names `vision`."""
    message = {"role": "user", "content": server.question, "images": [IMAGE]}
    reply = client.chat(server.model, messages=[message], options={"num_predict": 4})
    generated = client.generate(server.model, prompt=server.question, images=[IMAGE], options={"num_predict": 4})

    tokens = image_prompt_tokens(server)
    assert reply.prompt_eval_count == tokens
    assert generated.prompt_eval_count == tokens
    assert "vision" in (client.show(server.model).capabilities or [])


def test_damaged_image(client: ollama.Client, server: Server) -> None:
    """A damaged image is an error of the client's own class."""
    message = {"role": "user", "content": server.question, "images": [IMAGE[:60]]}
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat(server.model, messages=[message])

    assert refused.value.status_code == 400
