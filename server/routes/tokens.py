"""POST /tokenize, /detokenize and /apply-template, also under /v1, and the token count of a chat."""

from __future__ import annotations

import uuid

from fastapi import FastAPI
from starlette.responses import Response

from server.http.encoding import JsonResponse, large_json_response
from server.models.registry import ModelRegistry
from server.openai.tokens import detokenize, prompt_of, render, tokenize
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.chat import ChatRequest
from server.schemas.tokens import Detokenized, DetokenizeRequest, InputTokens, Rendered, TokenizeRequest, Tokens


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    @app.post("/v1/tokenize", responses={**ERROR_RESPONSES, 200: {"model": Tokens}})
    @app.post("/tokenize", responses={**ERROR_RESPONSES, 200: {"model": Tokens}})
    async def create_tokens(body: TokenizeRequest) -> Response:
        """Tokenize a text or a conversation."""
        return await large_json_response(await tokenize(models.use(body.model), body, _request_id()))

    @app.post("/v1/detokenize", responses={**ERROR_RESPONSES, 200: {"model": Detokenized}})
    @app.post("/detokenize", responses={**ERROR_RESPONSES, 200: {"model": Detokenized}})
    async def create_text(body: DetokenizeRequest) -> Response:
        """Turn tokens into text."""
        return JsonResponse(await detokenize(models.use(body.model), body))

    @app.post("/v1/apply-template", responses={**ERROR_RESPONSES, 200: {"model": Rendered}})
    @app.post("/apply-template", responses={**ERROR_RESPONSES, 200: {"model": Rendered}})
    async def apply_template(body: ChatRequest) -> Response:
        """Render a chat with the model's template."""
        return await large_json_response(await render(models.use(body.model), body, _request_id()))

    @app.post("/v1/chat/completions/input_tokens", responses={**ERROR_RESPONSES, 200: {"model": InputTokens}})
    async def count_input_tokens(body: ChatRequest) -> Response:
        """Count the tokens of a chat's prompt."""
        tokens = await prompt_of(models.use(body.model), body, _request_id())
        return JsonResponse(InputTokens(object="response.input_tokens", input_tokens=len(tokens)))


def _request_id() -> str:
    return f"tok-{uuid.uuid4().hex}"
