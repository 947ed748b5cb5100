"""Admission before the body is parsed: a refusal costs a small part of what a rendered and tokenized request costs.

The engine checks again when it opens the request, since the queue may fill up in between.
"""

from __future__ import annotations

from starlette.requests import HTTPConnection

from server.http.auth import caller

# Routes of which every valid request is opened in the engine. Not Ollama's chats: without a prompt they load the model.
GENERATION_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/decisions",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/api/embed",
        "/api/embeddings",
    }
)


def check_admission(connection: HTTPConnection) -> None:
    """Raise Overloaded if the queue is full for the caller."""
    connection.app.state.engine.check_admission(caller().owner)
