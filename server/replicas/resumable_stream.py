"""A stream of the chat or completions API that goes on at another replica when the one that computes it ends.

The request asks for the tokens of every chunk; the next replica continues after those that have arrived.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from server.http.encoding import dumps
from server.http.errors import ENGINE_DEAD, GENERATION_FAILED, SERVER_DRAINING, THREADS_EXHAUSTED
from server.http.sse import frame

PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
# Errors of a replica that ends, or lacks threads: another one does not have them.
_REPLICA_ERRORS = frozenset(kind.code for kind in (ENGINE_DEAD, GENERATION_FAILED, SERVER_DRAINING, THREADS_EXHAUSTED))
# Fields of the first chunk that the client gets once, and those that it gets only if it asked for tokens.
_FIRST_FIELDS, _TOKEN_FIELDS = ("warnings", "prompt_token_ids", "seed"), ("prompt_token_ids", "seed")
_END, _DATA, _DONE = b"\n\n", b"data: ", b"[DONE]"


class ResumableStream:
    """One stream for the client, of one or more attempts.

    complete     the whole answer, or an error that another replica would repeat, was relayed
    interrupted  the current attempt sent an error of its replica; what follows is dropped
    tokens       those that have arrived, and those that the client had before
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._shows_tokens = bool(body.get("return_token_ids"))
        self.tokens: list[int] = [*(body.get("continue_from") or {"tokens": ()})["tokens"]]
        self.complete = self.interrupted = False
        self._rest = b""
        # Of the first chunk that was relayed.
        self._identity: dict[str, Any] = {}
        self._seed: int | None = None
        self._has_role = self._has_finish = self._has_usage = False

    @classmethod
    def of_request(cls, path: str, body: bytes) -> ResumableStream | None:
        """The stream of a request; None if it asks for no stream, or for one that cannot be continued."""
        if path not in PATHS or b'"stream"' not in body:
            return None
        try:
            fields = json.loads(body)
            return cls(fields) if isinstance(fields, dict) and _is_resumable(fields) and dumps(fields) else None
        except (ValueError, RecursionError):
            return None

    @property
    def can_continue(self) -> bool:
        """Whether another attempt sends the rest: always before the first chunk, later if the replica sent its seed."""
        return not self.complete and (not self._identity or self._seed is not None)

    def request_body(self) -> bytes:
        """The body of the next attempt. A part of an event from the attempt before is dropped."""
        self._rest, self.interrupted = b"", False
        body = {**self._body, "return_token_ids": True}
        if self._seed is not None:
            body["seed"] = self._seed
        if self.tokens:
            body["continue_from"] = {"tokens": self.tokens}
        return dumps(body)

    def relay(self, data: bytes) -> bytes:
        """The events for the client that the next bytes of the current attempt complete."""
        *events, self._rest = (self._rest + data).split(_END)
        return b"".join([self._event(event) for event in events])

    def _event(self, event: bytes) -> bytes:
        if self.complete or self.interrupted:
            return b""
        if not event.startswith(_DATA):
            return event + _END
        data = event.removeprefix(_DATA)
        if data == _DONE:
            self.complete = True
            return event + _END
        chunk = json.loads(data)
        error = chunk.get("error")
        if error is None:
            return self._chunk(chunk)
        self.interrupted = error.get("code") in _REPLICA_ERRORS
        self.complete = not self.interrupted
        return b"" if self.interrupted else event + _END

    def _chunk(self, chunk: dict[str, Any]) -> bytes:
        if not self._identity:
            self._identity = {name: chunk[name] for name in ("id", "created", "model")}
            self._seed = chunk.get("seed")
            removed: tuple[str, ...] = () if self._shows_tokens else _TOKEN_FIELDS
        else:
            removed = _FIRST_FIELDS
        for name in removed:
            chunk.pop(name, None)
        is_new = self._choice(chunk, chunk["choices"][0]) if chunk["choices"] else self._is_first_usage()
        return frame(chunk | self._identity) if is_new else b""

    def _is_first_usage(self) -> bool:
        repeated, self._has_usage = self._has_usage, True
        return not repeated

    def _choice(self, chunk: Mapping[str, Any], choice: dict[str, Any]) -> bool:
        """Take the tokens out of a choice unless the client asked for them; whether the chunk has anything new."""
        if self._has_finish:
            return False
        self._has_finish = choice.get("finish_reason") is not None
        delta = choice.get("delta", {})
        if "role" in delta:
            repeated, self._has_role = self._has_role, True
            return not repeated
        self.tokens += choice.get("token_ids") or ()
        if self._shows_tokens:
            return True
        choice.pop("token_ids", None)
        # Of a token that is part of a character or of a stop string.
        has_content = delta or choice.get("text") or choice.get("logprobs") or self._has_finish
        return bool(has_content or chunk.get("usage") or chunk.get("warnings"))


def _is_resumable(body: Mapping[str, Any]) -> bool:
    """Whether `continue_from` is accepted with these fields, and whether they are of types that a replica accepts."""
    prompt, earlier = body.get("prompt"), body.get("continue_from")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    excluded = ("echo", "return_progress", "return_cache_diagnostics")
    return (
        body.get("stream") is True
        and body.get("return_token_ids") in (None, False, True)
        and all(body.get(name) in (None, 1) for name in ("n", "best_of"))
        and not any(body.get(name) for name in excluded)
        and body.get("prompt_logprobs") is None
        and not several
        and (earlier is None or _has_tokens(earlier))
    )


def _has_tokens(earlier: object) -> bool:
    tokens = earlier.get("tokens") if isinstance(earlier, dict) else None
    return isinstance(tokens, list) and all(type(token) is int for token in tokens)
