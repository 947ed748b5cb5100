"""The key file in TOML: API keys with their organisations, scopes and limits."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from server.configuration.settings import read_bounded

Scope = Literal["use", "admin"]
# Without the separators of the lists of keys, so that each entry has one text there.
_Key = Annotated[str, StringConstraints(pattern=r"^[^\s:,]+$")]

_ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
_Limit = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]


class KeyEntry(BaseModel):
    """A key of the file, itself or as its digest.

    sha256               of the key, in hexadecimal digits, in place of the key
    scopes               use: every route but those that change the server; admin: those, and GET
    requests_per_minute  and tokens_per_minute, of prompts and answers; None: no limit
    streams              requests at the same time
    models               names of models, as /v1/models lists them, that the key may use; None: all
    """

    # Errors reach the terminal and the log, where no key may stand.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    key: _Key | None = None
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    organisation: _Key | None = None
    scopes: Annotated[frozenset[Scope], Field(min_length=1)] = frozenset({"use", "admin"})
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    streams: _Limit | None = None
    models: Annotated[frozenset[_ModelName], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_key_or_digest(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("it needs either 'key' or 'sha256'")
        return self

    @property
    def text(self) -> str | None:
        """`key`, or `organisation:key`, as in a list of keys; None: only its digest is known."""
        return self.key if self.organisation is None or self.key is None else f"{self.organisation}:{self.key}"

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        return bytes.fromhex(self.sha256 or "") if self.key is None else hashlib.sha256(self.key.encode()).digest()


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    key: Annotated[tuple[KeyEntry, ...], Field(min_length=1)]


def read_key_file(path: Path) -> tuple[KeyEntry, ...]:
    """The keys of a TOML file; OSError, or ValueError for a file that is invalid or has a key twice."""
    try:
        entries = _KeyFile.model_validate(tomllib.loads(read_bounded(path))).key
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise ValueError(f"{path} is invalid at {place}: {fault['msg']}") from None
    if len({entry.digest for entry in entries}) < len(entries):
        raise ValueError(f"{path} has a key twice")
    return entries
