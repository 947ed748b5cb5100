"""GET /v1/capabilities: what becomes of each parameter of each endpoint, read from the code that decides it."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response

from engine.wording import names
from server.ability import unable
from server.encoding import Json
from server.routes.documented import RESPONSES
from server.schemas import policy
from server.schemas.capabilities import Capabilities, Endpoint, ModelCapabilities, Parameter
from server.schemas.chat import RESERVED_ARGUMENTS, ChatRequest
from server.schemas.content import Strict
from server.service import Service


def add(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.get("/v1/capabilities", responses={**RESPONSES, 200: {"model": Capabilities}})
    async def capabilities() -> Response:
        """Tell what this server does with each parameter, and what its model can do."""
        service.check_ready()
        return Json(
            Capabilities(
                object="capabilities",
                lenient=service.settings.lenient,
                model=_model(service),
                endpoints={path: Endpoint(parameters=_parameters(service, body)) for path, body in _bodies(app)},
            )
        )


def _model(service: Service) -> ModelCapabilities:
    info, tokenizer = service.engine.info, service.engine.tokenizer
    return ModelCapabilities(
        id=service.settings.names[0],
        context=info.context,
        vocabulary=info.vocabulary,
        chat=bool(tokenizer.template),
        tools=tokenizer.dialect.calls,
        reasoning=tokenizer.dialect.reasons,
        template_arguments=sorted(names(tokenizer.template) - RESERVED_ARGUMENTS),
        drafters=list(service.engine.drafting.kinds),
    )


def _bodies(app: FastAPI) -> Iterator[tuple[str, type[Strict]]]:
    """The endpoints that take a body."""
    for route in app.routes:
        field = route.body_field if isinstance(route, APIRoute) else None
        shape = None if field is None else field.field_info.annotation
        if isinstance(route, APIRoute) and isinstance(shape, type) and issubclass(shape, Strict):
            yield route.path, shape


def _parameters(service: Service, body: type[Strict]) -> dict[str, Parameter]:
    tokenizer = service.engine.tokenizer
    missing = unable(tokenizer.dialect, names(tokenizer.template)) if issubclass(body, ChatRequest) else {}
    known = {field.alias or name: _known(field.alias or name, missing) for name, field in body.model_fields.items()}
    refused = {
        name: Parameter(support="refused", accepted=[None, *idle])
        for name, idle in body.documented.items()
        if name not in known
    }
    return {**known, **refused}


def _known(name: str, missing: dict[str, str]) -> Parameter:
    if name in missing:
        return Parameter(support="refused", reason=missing[name], accepted=[None])
    if name in policy.NOTED:
        return Parameter(support="noted", reason=policy.NOTED[name])
    return Parameter(support="honoured")
