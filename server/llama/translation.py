"""Requests of llama.cpp's API as completion requests, and their engine requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread

from engine.errors import EngineError
from engine.types.request import Request
from server.generation.error_fields import with_client_field_names
from server.http.errors import ApiError, unsupported_parameter
from server.openai.prepared_completion import prepare_completion
from server.schemas.completions import CompletionRequest
from server.schemas.llama import InfillRequest, LlamaCompletionRequest, LlamaGeneration
from server.service import Service

# llama.cpp's defaults of the parameters that are not neutral.
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# The parameters of each sampler, with their neutral values.
_SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "typ_p": {"typical_p": 1.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "xtc": {"xtc_probability": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
# Other names of samplers.
_ALIASES = {"typical_p": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p"}
_OWN_FIELDS = LlamaGeneration.model_fields.keys() - CompletionRequest.model_fields.keys()
# Fields of OpenAI's API without a counterpart in answers of llama.cpp.
_UNSUPPORTED = (
    *("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "stream_options", "stream_interval"),
    *("metadata", "timings_per_token", "return_progress", "include_stop_str_in_output", "request_id", "continue_from"),
)
_ERROR_FIELDS = {"max_tokens": "n_predict", "logprobs": "n_probs", "suffix": "input_suffix"}


@dataclass(frozen=True, slots=True)
class PreparedLlama:
    """A validated request.

    prompts   the texts of the prompts, one for each engine request
    settings  the parameters in effect, for `generation_settings`
    """

    model: str
    body: LlamaGeneration
    requests: tuple[Request, ...]
    prompts: tuple[str, ...]
    settings: dict[str, Any]
    warnings: tuple[str, ...]


async def prepare_llama_completion(service: Service, body: LlamaCompletionRequest, id: str) -> PreparedLlama:
    """The engine requests of a completion; raises ApiError or EngineError."""
    return await _prepared(service, body, body.prompt, (), id)


async def prepare_infill(service: Service, body: InfillRequest, id: str) -> PreparedLlama:
    """The engine request that fills a gap; raises ApiError or EngineError."""
    service.check_ready()
    tokenizer = service.engine.tokenizer
    if tokenizer.fill_in_middle is None:
        raise unsupported_parameter("input_prefix", "its vocabulary has no fill-in-the-middle tokens")
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    before = body.input_prefix + body.prompt
    try:
        tokens = await anyio.to_thread.run_sync(tokenizer.encode_gap, before, body.input_suffix, files)
    except EngineError as error:
        raise with_client_field_names(error, "/infill", _ERROR_FIELDS) from error
    return await _prepared(service, body, [tokens], tokenizer.fill_in_middle.ends, id)


async def _prepared(
    service: Service, body: LlamaGeneration, prompts: list[Any], ends: tuple[int, ...], id: str
) -> PreparedLlama:
    for name in _UNSUPPORTED:
        if getattr(body, name):
            raise unsupported_parameter(name, "the answers of this endpoint have no field for it")
    if body.n not in (None, 1):
        raise unsupported_parameter("n", "a prompt has one answer here")
    settings = _settings(body)
    completion = CompletionRequest(**{**settings, "prompt": prompts, "max_tokens": _limit(body)})
    try:
        prepared = await prepare_completion(service, completion, id)
    except (ApiError, EngineError) as error:
        raise with_client_field_names(error, "/completion", _ERROR_FIELDS) from error
    return PreparedLlama(
        model=prepared.model,
        body=body,
        requests=tuple(_with_limit(request, body, ends) for request in prepared.requests),
        prompts=tuple([await _text(service.engine.tokenizer.decode, prompt) for prompt in prompts]),
        settings={
            **completion.model_dump(mode="json", exclude_none=True, exclude={"prompt", "model", "max_tokens"}),
            "n_predict": -1 if body.n_predict is None else body.n_predict,
        },
        warnings=prepared.warnings,
    )


def _settings(body: LlamaGeneration) -> dict[str, Any]:
    """The parameters in effect, by the names of a completion request."""
    arguments = {name: getattr(body, name) for name in body.model_fields_set if getattr(body, name) is not None}
    settings = {
        **DEFAULTS,
        **{name: value for name, value in arguments.items() if name not in (*_OWN_FIELDS, "prompt")},
    }
    settings = {name: value for name, value in settings.items() if name in CompletionRequest.model_fields}
    if settings.get("seed", 0) < 0:
        # llama.cpp's -1: a random one.
        del settings["seed"]
    settings["top_k"] = max(settings["top_k"], 0)
    if body.samplers is not None:
        used = {_ALIASES.get(name, name) for name in body.samplers}
        for sampler, neutral in _SAMPLERS.items():
            # Greedy sampling has no sampler in llama.cpp either.
            if sampler not in used and not (sampler == "temperature" and settings["temperature"] == 0):
                settings |= neutral
    if body.n_probs:
        settings["logprobs"] = body.n_probs
    return settings


def _limit(body: LlamaGeneration) -> int | None:
    return body.n_predict if body.n_predict is not None and body.n_predict > 0 else None


def _with_limit(request: Request, body: LlamaGeneration, ends: tuple[int, ...]) -> Request:
    limit = 0 if body.n_predict == 0 else request.max_tokens
    return replace(request, max_tokens=limit, stop_token_ids=(*request.stop_token_ids, *ends))


async def _text(decode: Callable[[list[int]], str], prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else await anyio.to_thread.run_sync(decode, prompt)
