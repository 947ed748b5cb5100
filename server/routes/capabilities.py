"""GET /v1/capabilities: the support of each parameter of each endpoint, derived from the code that decides it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response

from engine.types.status import EmbeddingModelInfo
from server.generation.support import ignored_parameters, unsupported_parameters
from server.http.auth import caller
from server.http.encoding import JsonResponse
from server.models.demonstration import TEXT, is_demonstration, other_models
from server.models.registry import ModelRegistry
from server.openai import embeddings
from server.routes.openapi import ERROR_RESPONSES
from server.schemas import policy
from server.schemas.capabilities import (
    Capabilities,
    Demonstration,
    EmbeddingCapabilities,
    Endpoint,
    ModelCapabilities,
    OfferedModel,
    Parameter,
)
from server.schemas.chat import RESERVED_ARGUMENTS, ChatRequest
from server.schemas.content import Strict
from server.schemas.embeddings import EmbeddingRequest
from server.schemas.scoring import RerankRequest, ScoreRequest
from server.service import Service


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the route."""

    @app.get("/v1/capabilities", responses={**ERROR_RESPONSES, 200: {"model": Capabilities}})
    async def capabilities() -> Response:
        """List the support of each parameter, and the abilities of the model."""
        service = models.use()
        service.check_ready()
        listed = Capabilities(
            object="capabilities",
            lenient=service.settings.lenient,
            model=_model(service),
            endpoints={path: Endpoint(parameters=_parameters(service, body)) for path, body in _bodies(app)},
        )
        embedding_name = service.settings.embedding_name
        if service.engine.embedding is not None and embedding_name is not None and caller().may_use(embedding_name):
            listed["embedding_model"] = _embedding(embedding_name, service.engine.embedding)
        return JsonResponse(listed)


def _model(service: Service) -> ModelCapabilities:
    info, tokenizer = service.engine.info, service.engine.tokenizer
    listed = ModelCapabilities(
        id=service.settings.model_names[0],
        context=info.context,
        vocabulary=info.vocabulary,
        chat=bool(tokenizer.template),
        tools=tokenizer.chat_format.supports_tool_calls,
        reasoning=tokenizer.chat_format.supports_reasoning,
        input_modalities=list(info.input_modalities),
        template_arguments=sorted(tokenizer.template_names - RESERVED_ARGUMENTS),
        adapters=[adapter.name for adapter in info.adapters if caller().may_use(adapter.name)],
        drafters=list(service.engine.drafting.kinds),
        batch_invariant=info.batch_invariant,
        default_max_tokens=info.default_max_tokens,
    )
    if is_demonstration(service.settings):
        others = other_models(service.engine.memory.available_bytes)
        listed["demonstration"] = Demonstration(
            text=TEXT,
            models=[
                OfferedModel(name=model.name, text=model.text, command=f"cellar serve {model.name}") for model in others
            ],
        )
    return listed


def _embedding(name: str, embedding: EmbeddingModelInfo) -> EmbeddingCapabilities:
    return EmbeddingCapabilities(
        id=name,
        makes=embedding.output_kind,
        context=embedding.model.context,
        vocabulary=embedding.model.vocabulary,
        dimensions=embedding.dimensions,
        similarity=embedding.similarity,
        prompts=list(embedding.prompts),
    )


def _bodies(app: FastAPI) -> Iterator[tuple[str, type[Strict]]]:
    """The endpoints with a body."""
    for route in app.routes:
        field = route.body_field if isinstance(route, APIRoute) else None
        shape = None if field is None else field.field_info.annotation
        if isinstance(route, APIRoute) and isinstance(shape, type) and issubclass(shape, Strict):
            yield route.path, shape


def _parameters(service: Service, body: type[Strict]) -> dict[str, Parameter]:
    fields = [field.alias or name for name, field in body.model_fields.items()]
    missing, noted = _unsupported(service, body), {**policy.NOTED, **_ignored(service, body)}
    supported = {name: _parameter(name, missing, noted) for name in fields}
    refused = {
        name: Parameter(support="refused", accepted=[None, *idle])
        for name, idle in body.documented.items()
        if name not in supported
    }
    hints = {name: Parameter(support="noted", reason=reason) for name, reason in body.hints.items()}
    return {**supported, **refused, **hints}


def _unsupported(service: Service, body: type[Strict]) -> dict[str, str]:
    """Parameters that the models do not support, with the reason."""
    tokenizer = service.engine.tokenizer
    if issubclass(body, ChatRequest):
        return unsupported_parameters(tokenizer.chat_format, tokenizer.template_names)
    if issubclass(body, EmbeddingRequest):
        return embeddings.unsupported_embedding_parameters(service.embedder)
    if issubclass(body, RerankRequest | ScoreRequest) and service.engine.embedding is None:
        return {"truncate_prompt_tokens": "there is no embedding model"}
    return {}


def _ignored(service: Service, body: type[Strict]) -> dict[str, str]:
    """Parameters without effect for this model, with the reason."""
    tokenizer = service.engine.tokenizer
    return ignored_parameters(tokenizer.chat_format, tokenizer.template_names) if issubclass(body, ChatRequest) else {}


def _parameter(name: str, missing: dict[str, str], noted: Mapping[str, str]) -> Parameter:
    if name in missing:
        return Parameter(support="refused", reason=missing[name], accepted=[None])
    if name in noted:
        return Parameter(support="noted", reason=noted[name])
    return Parameter(support="honoured")
