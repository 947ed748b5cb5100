"""Text as requests hold it: one string, or a list of parts. And what every part of a request has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.schemas import policy


class Strict(BaseModel):
    """No coercion, no unknown fields, and immutable once made."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    documented: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _strip(cls, body: Any) -> Any:
        return policy.strip(body, cls.documented)


def one_of(*kinds: str) -> BeforeValidator:
    """A check that names all kinds, for the member of a union that is also read where the kind is none of them."""
    *some, last = (f"'{kind}'" for kind in kinds)

    def check(kind: object) -> object:
        if kind not in kinds:
            raise PydanticCustomError("invalid_value", f"Input should be {', '.join(some)} or {last}")
        return kind

    return BeforeValidator(check)


def _only_text(kind: object) -> object:
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError("unsupported_value", "this server reads text only, no images, audio or files")
    return kind


def _shape(content: object) -> str:
    return "parts" if isinstance(content, list) else "string"


class Breakpoint(Strict):
    """The exact end of a beginning that other requests will have too. `ttl` is a wish: the cache keeps what it can."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(Strict):
    """A piece of a text."""

    type: Annotated[Literal["text"], BeforeValidator(_only_text)]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Tag("parts")],
    Discriminator(_shape),
]


def text_of(content: str | list[TextPart], between: str) -> str:
    """The text, its parts joined."""
    return content if isinstance(content, str) else between.join(part.text for part in content)
