"""Text of requests, as a string or a list of parts, and the base class of all parts of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from server.schemas import policy
from server.schemas.first_fault import fail_fast, field_names

MAX_PARTS = 2048
# Maximum members of an object with free names: a JSON schema, the arguments of a call.
MAX_KEYS = 1024
# Maximum tokens of a prompt, or of a text to decode.
MAX_TOKENS = 2**18

Object = Annotated[dict[str, Any], Field(max_length=MAX_KEYS)]


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """Validation context in which hints are removed instead of refused.

    lenient   whether all unsupported and unknown fields are
    left_out  (object of the body, name of the field, why it has no effect or ""), in the order of the body
    """

    lenient: bool = False
    left_out: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)


class Strict(BaseModel):
    """Base class: no coercion, no unknown fields, immutable.

    Validation stops at the first error of a list, of an object's size or of unknown fields, so a body of megabytes has
    one error, not one per value.

    documented     documented fields that are not supported, with the values that have no effect
    hints          those that are left out with a warning, and the reason
    drops_unknown  whether unknown fields are left out with a warning
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    documented: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    hints: ClassVar[Mapping[str, str]] = {}
    drops_unknown: ClassVar[bool] = False

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's schema with fail-fast lists, and objects whose size is checked before their values."""
        schema = handler(source)
        fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _strip(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict) or body.keys() <= field_names(cls):
            return body
        asked = policy.strip(body, cls.documented)
        unknown = [name for name in asked if name not in field_names(cls)]
        ignored = cls._left_out(body, unknown, info.context)
        # Of the others the first one stays, as the error.
        removed = {*ignored, *[name for name in unknown if name not in ignored][1:]}
        return {name: value for name, value in asked.items() if name not in removed} if removed else asked

    @classmethod
    def _left_out(cls, body: dict[str, Any], unknown: list[str], context: object) -> frozenset[str]:
        """The unknown fields that the context leaves out, which it records."""
        if not isinstance(context, IgnoredFields):
            return frozenset()
        ignored = [
            name
            for name in unknown
            if context.lenient or name in cls.hints or (cls.drops_unknown and name not in policy.DOCUMENTED)
        ]
        context.left_out.extend((body, name, cls.hints.get(name, "")) for name in ignored)
        return frozenset(ignored)


def one_of(*kinds: str) -> BeforeValidator:
    """A validator whose error lists all kinds, for the fallback member of a union."""
    *first_kinds, last_kind = (f"'{kind}'" for kind in kinds)

    def check(kind: object) -> object:
        if kind not in kinds:
            raise PydanticCustomError("invalid_value", f"Input should be {', '.join(first_kinds)} or {last_kind}")
        return kind

    return BeforeValidator(check)


def _only_text(kind: object) -> object:
    if isinstance(kind, str) and kind not in ("text", "thinking"):
        raise PydanticCustomError("unsupported_value", "this server reads text only, no images, audio or files")
    return kind


def as_text(part: object) -> object:
    """Text parts under the names of other APIs: their clients send received parts back."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in ("input_text", "output_text"):
        return {**part, "type": "text"}
    if isinstance(part, dict) and kind == "refusal" and "refusal" in part:
        return {"type": "text", "text": part["refusal"]}
    if isinstance(part, dict) and kind == "thinking" and "thinking" in part:
        return {"type": "thinking", "text": _thinking_text(part["thinking"])}
    return part


def _thinking_text(thinking: object) -> object:
    """Reasoning as a text: that of Anthropic, or a list of text parts as that of Mistral."""
    if not isinstance(thinking, list):
        return thinking
    texts = [part.get("text") if isinstance(part, dict) else None for part in thinking]
    return (
        "".join(text for text in texts if isinstance(text, str))
        if all(isinstance(text, str) for text in texts)
        else None
    )


def _shape(content: object) -> str:
    return "parts" if isinstance(content, list) else "string"


class Breakpoint(Strict):
    """Cache breakpoint: the end of a prefix that other requests share. `ttl` is accepted without effect."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(Strict):
    """A text part, or the reasoning of an assistant's message."""

    hints: ClassVar[Mapping[str, str]] = policy.PART_HINTS

    type: Annotated[Literal["text", "thinking"], BeforeValidator(_only_text)]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


Content = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[Annotated[TextPart, BeforeValidator(as_text)]], Field(max_length=MAX_PARTS), Tag("parts")],
    Discriminator(_shape),
]


def text_of(content: str | list[TextPart], between: str) -> str:
    """The text, with its parts joined."""
    return content if isinstance(content, str) else between.join(part.text for part in content)
