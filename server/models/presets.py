"""Names that /api/create and /api/copy make: a served model with a system prompt, parameters and first messages.

They are kept in memory until the server stops. Each owner of API keys has its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from server.http.errors import STORAGE_FULL, ApiError, invalid_value
from server.schemas.ollama import (
    CreateRequest,
    GenerateRequest,
    OllamaChatRequest,
    OllamaGenerationFields,
    OllamaMessage,
    OllamaOptions,
    now,
)

# The tag that Ollama's clients add to a name without one.
LATEST_TAG = ":latest"
# Limits of an owner: presets, and characters of the texts of each.
MAX_PRESETS = 64
MAX_PRESET_CHARACTERS = 2**18

Body = TypeVar("Body", bound=OllamaGenerationFields)


@dataclass(frozen=True, slots=True)
class Preset:
    """A served model under another name.

    base        the name of the served model
    parent      the name that it was made from
    parameters  options of requests that do not set them
    messages    before those of a request
    """

    base: str
    parent: str
    system: str = ""
    parameters: OllamaOptions | None = None
    messages: tuple[OllamaMessage, ...] = ()
    license: tuple[str, ...] = ()
    created_at: str = field(default_factory=now)

    def derived(self, body: CreateRequest) -> Preset:
        """The preset that a request makes from this one; ApiError if its texts are too long."""
        license = [body.license] if isinstance(body.license, str) else body.license
        preset = replace(
            self,
            parent=body.from_ or self.parent,
            system=self.system if body.system is None else body.system,
            parameters=_merged(self.parameters, body.parameters),
            messages=self.messages if body.messages is None else tuple(body.messages),
            license=self.license if license is None else tuple(license),
            created_at=now(),
        )
        if any(message.images for message in preset.messages):
            raise invalid_value("messages", "messages of a created model have no images")
        if len(preset.modelfile()) + sum(map(len, preset.license)) > MAX_PRESET_CHARACTERS:
            raise invalid_value("system", f"a created model may have {MAX_PRESET_CHARACTERS} characters of texts")
        return preset

    def renewed(self) -> Preset:
        """A copy, made now."""
        return replace(self, created_at=now())

    def parameter_lines(self) -> Iterator[str]:
        """The parameters as in a Modelfile, a line each."""
        options = {} if self.parameters is None else self.parameters.model_dump(exclude_none=True)
        for name, value in options.items():
            for entry in value if isinstance(value, list) else [value]:
                yield f"{name:<30} {json.dumps(entry, ensure_ascii=False)}"

    def modelfile(self) -> str:
        """A Modelfile of the preset."""
        lines = [f"FROM {self.base}", *(f"PARAMETER {line}" for line in self.parameter_lines())]
        if self.system:
            lines.append(f'SYSTEM """{self.system}"""')
        lines += [f'MESSAGE {message.role} """{message.content}"""' for message in self.messages]
        return "\n".join(lines) + "\n"


class Presets:
    """The presets of a server, by owner and name. Used on the event loop."""

    def __init__(self) -> None:
        self._presets: dict[tuple[str, str], Preset] = {}

    def get(self, owner: str, name: str) -> Preset | None:
        """The preset of a name, with or without the default tag."""
        return self._presets.get((owner, _key(name)))

    def of(self, owner: str) -> Mapping[str, Preset]:
        """All presets of an owner, by name."""
        return {name: preset for (preset_owner, name), preset in self._presets.items() if preset_owner == owner}

    def set(self, owner: str, name: str, preset: Preset) -> None:
        """Add or replace a preset; ApiError if there are too many."""
        if len(self.of(owner)) >= MAX_PRESETS and self.get(owner, name) is None:
            message = f"This server keeps {MAX_PRESETS} created models at most; delete some first."
            raise ApiError(STORAGE_FULL, message, param="model")
        self._presets[owner, _key(name)] = preset

    def remove(self, owner: str, name: str) -> bool:
        """Remove a preset; whether there was one."""
        return self._presets.pop((owner, _key(name)), None) is not None


def chat_with_preset(body: OllamaChatRequest, preset: Preset) -> OllamaChatRequest:
    """The request with the preset's messages, system prompt and parameters."""
    messages = [*preset.messages, *body.messages]
    if preset.system and messages[0].role != "system":
        messages.insert(0, OllamaMessage(role="system", content=preset.system))
    return _with_parameters(body.model_copy(update={"messages": messages}), preset)


def generate_with_preset(body: GenerateRequest, preset: Preset) -> GenerateRequest:
    """The request with the preset's system prompt and parameters; a raw prompt stays as it is."""
    if not body.system and preset.system and not body.without_template:
        body = body.model_copy(update={"system": preset.system})
    return _with_parameters(body, preset)


def _with_parameters(body: Body, preset: Preset) -> Body:
    return body.model_copy(update={"options": _merged(preset.parameters, body.options)})


def _merged(first: OllamaOptions | None, second: OllamaOptions | None) -> OllamaOptions | None:
    """Both; the second one takes precedence."""
    if first is None or second is None:
        return second or first
    return first.model_copy(update=second.model_dump(exclude_none=True))


def _key(name: str) -> str:
    return name.removesuffix(LATEST_TAG)
