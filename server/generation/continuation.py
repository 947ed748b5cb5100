"""Streams that can be resumed: their chunks have the tokens of their text, and a request goes on after them.

The text of a request depends on its prompt, parameters, seed and position. So another server with the same model goes
on after the tokens that a client has received, if the client repeats its request with them (`continue_from`).
"""

from __future__ import annotations

from server.generation.sampling import check_token_ids
from server.http.errors import invalid_value
from server.schemas.common import Generation

# Fields that need the beginning of an answer, or several answers.
_EXCLUDED = ("prompt_logprobs", "return_progress", "echo", "return_cache_diagnostics")


def is_resumable(body: Generation) -> bool:
    """Whether each chunk of the stream has all tokens so far, and all text that they release."""
    return bool(body.stream and body.return_token_ids)


def emitted_tokens(body: Generation, vocabulary: int, max_tokens: int | None) -> tuple[int, ...]:
    """The tokens that the client has already. ApiError where the rest would not be exact."""
    if body.continue_from is None:
        return ()
    field, tokens = "continue_from", body.continue_from.tokens
    check_token_ids(f"{field}.tokens", tokens, vocabulary)
    if (body.n or 1) > 1 or (getattr(body, "best_of", None) or 1) > 1:
        raise invalid_value(field, "the request has several choices, and only one can be continued")
    if isinstance(prompts := getattr(body, "prompt", None), list) and len(prompts) > 1:
        raise invalid_value(field, "the request has several prompts, and only one can be continued")
    for name in _EXCLUDED:
        if _is_set(body, name):
            raise invalid_value(field, f"it cannot be combined with '{name}'")
    if body.seed is None and body.temperature != 0:
        raise invalid_value(field, "it needs the 'seed' of the first request, or the temperature 0")
    if not body.stream and _is_set(body, "logprobs"):
        raise invalid_value(field, "log-probabilities of earlier tokens are not computed again; set 'stream'")
    if max_tokens is not None and len(tokens) > max_tokens:
        raise invalid_value(field, f"it has more tokens than the answer, which has {max_tokens} tokens at most")
    return tuple(tokens)


def _is_set(body: Generation, name: str) -> bool:
    value = getattr(body, name, None)
    return value is not None and value is not False
