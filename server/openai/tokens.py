"""Tokenization and template rendering without running the model."""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread

from engine.errors import EngineError
from engine.types.events import Logprob
from server.generation.chat_turn import prepare_chat
from server.generation.error_fields import with_client_field_names
from server.http.errors import INVALID_VALUE, ApiError, invalid_value
from server.openai.prepared_completion import prepare_completion
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.tokens import Detokenized, DetokenizeRequest, Rendered, TokenizeRequest, TokenPiece, Tokens
from server.service import Service

MAX_TOKEN_TEXTS = 2**17
PIECES_SLICE = 1024


async def tokenize(service: Service, body: TokenizeRequest, id: str) -> Tokens:
    """Tokens of a text or of messages; raises ApiError or EngineError."""
    service.check_ready()
    field = _prompt_field(body)
    try:
        tokens = await _tokens(service, body, id)
    except (ApiError, EngineError) as error:
        raise with_client_field_names(error, "/tokenize", {"prompt": field}) from error
    answer = Tokens(tokens=tokens, count=len(tokens), max_model_len=service.engine.info.context)
    if body.return_token_strs or body.with_pieces:
        await anyio.to_thread.run_sync(_add_pieces, service, body, answer, tokens)
    return answer


async def detokenize(service: Service, body: DetokenizeRequest) -> Detokenized:
    """The text of tokens, including special tokens."""
    service.check_ready()
    text = await anyio.to_thread.run_sync(service.engine.tokenizer.decode, body.tokens)
    return Detokenized(prompt=text, content=text)


async def render(service: Service, body: ChatRequest, id: str) -> Rendered:
    """The prompt of a chat request."""
    tokens = await prompt_of(service, body, id)
    text = await anyio.to_thread.run_sync(service.engine.tokenizer.decode, tokens)
    return Rendered(prompt=text, tokens=tokens, count=len(tokens))


async def prompt_of(service: Service, body: ChatRequest, id: str) -> list[int]:
    """Prompt tokens of a chat request."""
    turn = await prepare_chat(service, body, id)
    return list(turn.requests[0].prompt)


async def prompts_of_completion(service: Service, body: CompletionRequest, id: str) -> list[list[int]]:
    """Prompt tokens of a completion request, a list for each of its prompts."""
    prepared = await prepare_completion(service, body, id)
    return [list(request.prompt) for request in prepared.requests[:: prepared.width]]


def _prompt_field(body: TokenizeRequest) -> str:
    present = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(present) != 1:
        message = "Give one of 'prompt', 'content' and 'messages'."
        raise ApiError(INVALID_VALUE, message, param=present[1] if present else "prompt")
    return present[0]


async def _tokens(service: Service, body: TokenizeRequest, id: str) -> list[int]:
    special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is not None:
        _refuse(("add_special_tokens", "add_special"), body, "the chat template writes special tokens itself")
        fields = {name: getattr(body, name) for name in _CHAT_ONLY}
        return await prompt_of(service, ChatRequest(model=body.model, messages=body.messages, **fields), id)
    _refuse(_CHAT_ONLY, body, "it needs 'messages'")
    text = body.content if body.prompt is None else body.prompt
    assert text is not None, "one of the three is given"
    added = body.prompt is not None if special is None else special
    return await anyio.to_thread.run_sync(lambda: service.engine.tokenizer.encode(text, add_special=added))


def _add_pieces(service: Service, body: TokenizeRequest, answer: Tokens, tokens: list[int]) -> None:
    """For a worker thread."""
    field = "with_pieces" if body.with_pieces else "return_token_strs"
    if len(tokens) > MAX_TOKEN_TEXTS:
        raise invalid_value(field, f"the text has {len(tokens)} tokens, and at most {MAX_TOKEN_TEXTS} can be listed")
    # In slices, so that other threads can use the tokenizer in between.
    starts = range(0, len(tokens), PIECES_SLICE)
    read = service.engine.tokenizer.describe_tokens
    pieces = [piece for start in starts for piece in read(tokens[start : start + PIECES_SLICE])]
    if body.with_pieces:
        answer["tokens"] = [TokenPiece(id=piece.token, piece=_token_text(piece)) for piece in pieces]
    if body.return_token_strs:
        answer["token_strs"] = [piece.text for piece in pieces]


_CHAT_ONLY = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def _refuse(names: Sequence[str], body: TokenizeRequest, reason: str) -> None:
    for name in names:
        if getattr(body, name):
            raise invalid_value(name, reason)


def _token_text(piece: Logprob) -> str | list[int]:
    """The text of a token; its bytes if they are an incomplete character."""
    return piece.text if piece.text.encode() == piece.bytes else list(piece.bytes)
