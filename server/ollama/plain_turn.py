"""A prompt without the chat template: raw, or the two sides of a gap to fill."""

from __future__ import annotations

from server.generation.chat_turn import ChatTurn, MessageLocator
from server.http.errors import invalid_value
from server.ollama.translation import generate_body, plain_body
from server.openai.prepared_completion import PLAIN_TEXT_FORMAT, prepare_completion
from server.schemas.ollama import GenerateRequest
from server.service import Service


async def prepare_plain(service: Service, body: GenerateRequest, model: str, id: str) -> ChatTurn:
    """A turn whose answer is text only; raises ApiError or EngineError before anything runs."""
    _check(body)
    completion = await prepare_completion(service, plain_body(body, model), id)
    return ChatTurn(
        id=id,
        created=completion.created,
        model=completion.model,
        fingerprint=completion.fingerprint,
        body=generate_body(body, model),
        requests=completion.requests,
        chat_format=PLAIN_TEXT_FORMAT,
        message_locator=MessageLocator((), (), lambda _: ()),
        warnings=completion.warnings,
    )


def _check(body: GenerateRequest) -> None:
    reason = "'raw' and 'suffix' continue the prompt without the model's template"
    for name in ("system", "think", "images"):
        if getattr(body, name):
            raise invalid_value(name, reason)
