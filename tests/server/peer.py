"""A server with a minimal OpenAI API on a real socket, which records its requests."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PIECES, TOKENS_A_PIECE, TOKENS_A_WORD, TEMPLATE_TOKENS = 5, 2, 2, 7
# What the tests ask for of each answer that is measured in a crowd; no probe and no warm-up asks for as many.
MEASURED = 20


@dataclass
class Peer:
    """The server: every chat is answered by five pieces of two tokens; a word is two tokens, the template seven.

    The model chooses how it misbehaves: "busy" refuses every fourth chat, "cut" drops the end, "broken" sends an error,
    "plain" sends no usage, "strict" refuses fields that OpenAI does not have, "nameless" lists no models.
    """

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    completions: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    model: str = "good"
    context: int | None = None
    running: int = 0
    most_running: int = 0

    @property
    def prompts(self) -> list[str]:
        """The chats of crowds, without probes, warm-up and lone streams."""
        return [body["messages"][0]["content"] for body in self.bodies if body["max_tokens"] == MEASURED]

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        if self.model == "nameless":
            return Response(status_code=500)
        limits = {} if self.context is None else {"max_model_len": self.context}
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model", **limits}]})

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        body = await request.json()
        if body["model"] == "strict" and "ignore_eos" in body:
            return JSONResponse({"error": {"message": "unknown field: ignore_eos"}}, status_code=400)
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization"))
        if body["model"] == "busy" and body["max_tokens"] == MEASURED and len(self.prompts) % 4 == 0:
            return JSONResponse({"error": {"message": "full"}}, status_code=429)
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def complete(self, request: Request) -> Response:
        """Answer POST /v1/completions: as many pieces of one token as asked for, the last with why it ended."""
        body = await request.json()
        self.completions.append(body)
        return StreamingResponse(self.pieces(body), media_type="text/event-stream")

    async def pieces(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Yield the events of one completion; the model "short" forgets the last token."""
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        count = body["max_tokens"] - (body["model"] == "short" and body["max_tokens"] > 1)
        for _ in range(count):
            await asyncio.sleep(0.001)
            yield event(choices=[{"index": 0, "text": "token", "finish_reason": None}])
        self.running -= 1
        yield event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
        yield event(choices=[], usage={"prompt_tokens": len(body["prompt"]), "completion_tokens": count})
        yield "data: [DONE]\n\n"

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Yield the events of one answer."""
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for _ in range(PIECES):
            await asyncio.sleep(0.002)
            yield event(choices=[{"index": 0, "delta": {"content": "two tokens"}}])
        self.running -= 1
        if body["model"] == "broken":
            yield event(error={"message": "the sequence failed"})
        if body["model"] in ("broken", "cut"):
            return
        yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        if body["model"] != "plain":
            yield event(choices=[], usage=usage(sum(len(one["content"].split()) for one in body["messages"])))
        yield "data: [DONE]\n\n"


def event(**content: Any) -> str:
    """Return one event of the stream."""
    return f"data: {json.dumps(content)}\n\n"


def usage(words: int) -> dict[str, Any]:
    """The usage of a prompt with `words` words."""
    prompt, answer = TEMPLATE_TOKENS + TOKENS_A_WORD * words, PIECES * TOKENS_A_PIECE
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@contextmanager
def running_peer() -> Iterator[Peer]:
    """Run a server of its own."""
    peer = Peer()
    routes = [
        Route("/v1/models", peer.models),
        Route("/v1/chat/completions", peer.chat, methods=["POST"]),
        Route("/v1/completions", peer.complete, methods=["POST"]),
    ]
    # Without the protocol asyncio leaves Nagle's algorithm on, and pieces wait 40 ms for each other.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        peer.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield peer
        finally:
            server.should_exit = True
            thread.join(timeout=10)
