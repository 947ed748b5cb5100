"""Tokenization, detokenization and template rendering: requests and responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from server.schemas import policy
from server.schemas.chat import ArgumentName, ArgumentValue, Message
from server.schemas.common import TokenId
from server.schemas.content import MAX_TOKENS, Strict
from server.schemas.tools import MAX_TOOLS, ToolDefinition


class TokenizeRequest(Strict):
    """One of `prompt` (vLLM's name), `content` (llama.cpp's) and `messages` to tokenize.

    By default, a prompt gets the model's special tokens, and content gets none.
    """

    documented: ClassVar[Mapping[str, tuple[object, ...]]] = policy.TOKENIZE

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: Annotated[dict[ArgumentName, ArgumentValue], Field(max_length=16)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Strict):
    """Tokens to decode."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


class TokenPiece(TypedDict):
    """A token with its text, or with its bytes if they are no valid text alone."""

    id: int
    piece: str | list[int]


class Tokens(TypedDict):
    """Tokens as ids or, if requested, as pieces; `token_strs` are their texts."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """The text, by vLLM's and llama.cpp's names."""

    prompt: str
    content: str


class Rendered(TypedDict):
    """The prompt of a chat request: text and tokens."""

    prompt: str
    tokens: list[int]
    count: int


class InputTokens(TypedDict):
    """Number of prompt tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int
