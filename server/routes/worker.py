"""GET /server_info and /model_info, by which routers find a worker, and the render routes."""

from __future__ import annotations

import uuid

from fastapi import FastAPI
from starlette.responses import Response

from server.http.encoding import JsonResponse, large_json_response
from server.http.version import version
from server.metrics.vllm import BLOCK_TOKENS
from server.models.registry import ModelRegistry
from server.openai.tokens import prompt_of, prompts_of_completion
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.worker import (
    BlockConfig,
    NamedModel,
    RenderedRequest,
    WorkerConfig,
    WorkerInfo,
    WorkerModel,
)
from server.service import Service


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes."""

    @app.get("/get_server_info", responses={**ERROR_RESPONSES, 200: {"model": WorkerInfo}})
    @app.get("/server_info", responses={**ERROR_RESPONSES, 200: {"model": WorkerInfo}})
    async def server_info() -> Response:
        """Describe this server to a router, by the names of SGLang and vLLM."""
        service = models.use()
        service.check_ready()
        return JsonResponse(_worker(service))

    @app.get("/get_model_info", responses={**ERROR_RESPONSES, 200: {"model": WorkerModel}})
    @app.get("/model_info", responses={**ERROR_RESPONSES, 200: {"model": WorkerModel}})
    async def model_info() -> Response:
        """Describe the model to a router, by the names of SGLang."""
        service = models.use()
        service.check_ready()
        return JsonResponse(_model(service))

    @app.post("/v1/chat/completions/render", responses={**ERROR_RESPONSES, 200: {"model": RenderedRequest}})
    async def render_chat(body: ChatRequest) -> Response:
        """Render a chat as prompt tokens, without generation."""
        service, id = models.use(body.model), _request_id()
        tokens = await prompt_of(service, body, id)
        return await large_json_response(_rendered(service, body, id, tokens))

    @app.post("/v1/completions/render", responses={**ERROR_RESPONSES, 200: {"model": list[RenderedRequest]}})
    async def render_completion(body: CompletionRequest) -> Response:
        """Tokenize the prompts of a completion, without generation."""
        service, id = models.use(body.model), _request_id()
        prompts = await prompts_of_completion(service, body, id)
        return await large_json_response([_rendered(service, body, id, tokens) for tokens in prompts])


def _worker(service: Service) -> WorkerInfo:
    info, cells = service.engine.info, service.engine.memory.cells
    name = service.settings.model_names[0]
    return WorkerInfo(
        version=version(),
        model_path=name,
        served_model_name=name,
        status=service.engine.phase,
        tp_size=info.tensor_parallel,
        dp_size=1,
        max_total_num_tokens=cells,
        max_running_requests=info.slots,
        max_req_input_len=info.context,
        vllm_config=WorkerConfig(
            model_config=NamedModel(model=name, max_model_len=info.context),
            cache_config=BlockConfig(block_size=BLOCK_TOKENS, num_gpu_blocks=cells // BLOCK_TOKENS),
        ),
    )


def _model(service: Service) -> WorkerModel:
    info = service.engine.info
    return WorkerModel(
        model_path=service.settings.model_names[0],
        tokenizer_path=None,
        is_generation=True,
        weight_version=info.fingerprint,
        model_type=info.architecture,
        architectures=[info.architecture],
        has_image_understanding="image" in info.input_modalities,
        has_audio_understanding="audio" in info.input_modalities,
    )


def _rendered(service: Service, body: ChatRequest | CompletionRequest, id: str, tokens: list[int]) -> RenderedRequest:
    return RenderedRequest(
        request_id=id,
        model=service.name,
        token_ids=tokens,
        features=None,
        cache_salt=body.cache_salt,
    )


def _request_id() -> str:
    return f"render-{uuid.uuid4().hex}"
