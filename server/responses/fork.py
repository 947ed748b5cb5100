"""Forks of stored responses: another response begins with the first output tokens of a stored one.

The prompt is rendered again from the stored response. Its digest tells whether it is the same one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from server.generation.chat_turn import ChatTurn
from server.generation.sampling import check_token_ids
from server.http.errors import invalid_value
from server.responses.initial import prompt_of_response
from server.schemas.response_items import ResponseBody
from server.schemas.responses import PromptFields, ResponseRequest

FIELD = "continue_from"
# Of an answer whose tokens are stored: about 128 KiB of the store.
MAX_STORED_TOKENS = 2**16
# Those of the stored response hold.
_PROMPT_FIELDS = PromptFields.model_fields.keys() - {"model", "input"}


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """The output tokens of a response, and what its prompt depends on besides the fields of the response.

    prompt              digest of the prompt's tokens
    template_arguments  of the chat template
    """

    tokens: tuple[int, ...]
    prompt: str
    template_arguments: dict[str, Any] | None = None

    @classmethod
    def of(cls, body: ResponseRequest, turn: ChatTurn, tokens: Sequence[int]) -> OutputTokens:
        """Those of a generated answer."""
        return cls(tuple(tokens), _prompt_digest(turn), body.chat_template_kwargs)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> OutputTokens:
        """Stored output tokens."""
        return cls(**{**fields, "tokens": tuple(fields["tokens"])})

    def as_json(self) -> dict[str, Any] | None:
        """Fields to store; None: there are too many tokens."""
        if len(self.tokens) > MAX_STORED_TOKENS:
            return None
        return {"tokens": self.tokens, "prompt": self.prompt, "template_arguments": self.template_arguments}


def checked_count(body: ResponseRequest, output: OutputTokens | None) -> int:
    """The number of tokens to keep; ApiError for a request that cannot continue these tokens."""
    assert body.continue_from is not None
    id, count = body.continue_from.response_id, body.continue_from.token_count
    if output is None:
        raise invalid_value(FIELD, f"the tokens of the response '{id}' are not stored")
    for name in sorted(_PROMPT_FIELDS):
        if getattr(body, name) is not None:
            raise invalid_value(name, f"with '{FIELD}' it is that of the stored response")
    if count > len(output.tokens):
        raise invalid_value(f"{FIELD}.token_count", f"the response has {len(output.tokens)} output tokens")
    if body.input is None:
        if body.top_logprobs or body.includes("message.output_text.logprobs"):
            reason = f"with '{FIELD}' log-probabilities of earlier tokens are not computed again"
            raise invalid_value("top_logprobs" if body.top_logprobs else "include", reason)
        if body.max_output_tokens is not None and body.max_output_tokens < count:
            raise invalid_value("max_output_tokens", f"the answer has {count} tokens already")
    return count


def with_prompt_of(body: ResponseRequest, stored: ResponseBody, output: OutputTokens) -> ResponseRequest:
    """The request with the fields that determine the prompt of a stored response."""
    fields = prompt_of_response(stored)
    prompt = {name: getattr(fields, name) for name in fields.model_fields_set}
    return body.model_copy(
        update={
            **prompt,
            "model": body.model or stored["model"],
            "input": None,
            "previous_response_id": stored["previous_response_id"],
            "chat_template_kwargs": output.template_arguments,
        }
    )


def continued(turn: ChatTurn, output: OutputTokens, count: int, vocabulary: int) -> ChatTurn:
    """The turn whose answer goes on after the first `count` tokens; ApiError if the prompt is not the same any more."""
    if _prompt_digest(turn) != output.prompt:
        raise invalid_value(FIELD, "the prompt of the stored response is not rendered as before")
    tokens = output.tokens[:count]
    check_token_ids(FIELD, tokens, vocabulary)
    (request,) = turn.requests
    return replace(turn, requests=(replace(request, emitted=tokens, tokens_at_once=True),))


def ended_after(turn: ChatTurn, count: int) -> ChatTurn:
    """The turn whose answer ends after `count` tokens."""
    (request,) = turn.requests
    return replace(turn, requests=(replace(request, max_tokens=count),))


def first_items(response: ResponseBody, stored: ResponseBody) -> list[dict[str, Any]]:
    """The output items of a response, which begins as a stored one, whose results of tools name its calls."""
    items = cast(list[dict[str, Any]], response["output"])
    originals = cast(list[dict[str, Any]], stored["output"])
    return [
        {**item, **{name: original[name] for name in ("call_id",) if name in item and name in original}}
        for item, original in zip(items, originals, strict=False)
    ]


def _prompt_digest(turn: ChatTurn) -> str:
    return hashlib.sha256(array("q", turn.requests[0].prompt).tobytes()).hexdigest()
