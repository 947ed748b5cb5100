"""POST /tokenize, /detokenize and /apply-template, also under /v1, and the count of what a chat would cost."""

from __future__ import annotations

import uuid

from fastapi import FastAPI
from starlette.responses import Response

from server.http.encoding import Json, large_json
from server.openai.tokens import detokenize, prompt_of, render, tokenize
from server.routes.documented import RESPONSES
from server.schemas.chat import ChatRequest
from server.schemas.tokens import Detokenized, DetokenizeRequest, InputTokens, Rendered, TokenizeRequest, Tokens
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/tokenize", responses={**RESPONSES, 200: {"model": Tokens}})
    @app.post("/tokenize", responses={**RESPONSES, 200: {"model": Tokens}})
    async def create_tokens(body: TokenizeRequest) -> Response:
        """Cut a text, or a conversation, into tokens."""
        return await large_json(await tokenize(service, body, _id()))

    @app.post("/v1/detokenize", responses={**RESPONSES, 200: {"model": Detokenized}})
    @app.post("/detokenize", responses={**RESPONSES, 200: {"model": Detokenized}})
    async def create_text(body: DetokenizeRequest) -> Response:
        """Turn tokens into text."""
        return Json(await detokenize(service, body))

    @app.post("/v1/apply-template", responses={**RESPONSES, 200: {"model": Rendered}})
    @app.post("/apply-template", responses={**RESPONSES, 200: {"model": Rendered}})
    async def apply_template(body: ChatRequest) -> Response:
        """Show what a chat would send to the model."""
        return await large_json(await render(service, body, _id()))

    @app.post("/v1/chat/completions/input_tokens", responses={**RESPONSES, 200: {"model": InputTokens}})
    async def count_input_tokens(body: ChatRequest) -> Response:
        """Count the tokens that a chat would send to the model."""
        tokens = await prompt_of(service, body, _id())
        return Json(InputTokens(object="response.input_tokens", input_tokens=len(tokens)))


def _id() -> str:
    return f"tok-{uuid.uuid4().hex}"
