"""The servers that are measured: what their addresses and lists of models say."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.client import Server

LOCAL = ("127.0.0.1", "localhost", "::1")


class BenchError(Exception):
    """The benchmark cannot start; the text says what to change."""


def check_url(url: str, allow_remote: bool) -> str:
    """The base URL without its last slash; other schemes are refused, and other machines unless allowed."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchError(f"--base-url must look like http://127.0.0.1:8000/v1, not {url!r}")
    if parts.hostname not in LOCAL and not allow_remote:
        raise BenchError(
            f"{parts.hostname} is another machine, and a benchmark is a heavy load: add --allow-remote if permitted"
        )
    return url.rstrip("/")


def find(name: str, url: str, *, model: str | None, api_key: str | None, context: int | None) -> Server:
    """The server at `url`; missing values are requested from it: its first model, and the context of that."""
    try:
        listed = ask_models(url, api_key)
    except BenchError:
        # Some servers have no list; with a given name the first request shows whether the model exists.
        if model is None:
            raise
        listed = []
    if model is None:
        if not listed:
            raise BenchError(f"{url}/models lists no model: add --served-model-name")
        model = str(listed[0].get("id"))
    entry = next((entry for entry in listed if entry.get("id") == model), {})
    return Server(name, url, model, api_key, context or context_of(entry))


def ask_models(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """The models that /v1/models lists."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/models", headers=headers, timeout=30, trust_env=False)
        if answer.is_error:
            advice = ": URLs of OpenAI's API end with /v1" if answer.status_code == httpx.codes.NOT_FOUND else ""
            raise BenchError(f"{url}/models is answered with {answer.status_code}{advice}")
        return [entry for entry in answer.json()["data"] if isinstance(entry, dict)]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{url}/models does not answer with a list of models: {error}") from error


def context_of(model: dict[str, Any]) -> int | None:
    """The tokens of a sequence as reported by vLLM, SGLang, Cellar or llama.cpp; else None."""
    meta = model.get("meta") if isinstance(model.get("meta"), dict) else {}
    reported = (model.get("max_model_len"), model.get("context_length"), (meta or {}).get("n_ctx"))
    return next((value for value in reported if isinstance(value, int) and value > 0), None)
