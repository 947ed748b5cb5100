"""Options of `cellar chat` and `cellar run`. Imported by every command: no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

# Fields of a request.
_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of `cellar chat` besides the model and the options of a server that it starts."""

    url: Annotated[
        str | None,
        Parameter(
            help="A running server with OpenAI's API, as in http://127.0.0.1:8000; --api-key has its key.",
            show_default="the server at --host and --port if it has the model, else a new one",
        ),
    ] = None
    system: Annotated[str | None, Parameter(help="System prompt.", show_default="none")] = None
    temperature: Annotated[
        float | None, Parameter(help="0: always the most likely token.", show_default="the model's")
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(help="Sample from the most likely tokens with this total probability.", show_default="the model's"),
    ] = None
    top_k: Annotated[
        int | None, Parameter(help="Sample from this number of most likely tokens.", show_default="the model's")
    ] = None
    min_p: Annotated[
        float | None,
        Parameter(help="Least probability of a token, relative to the most likely one.", show_default="the model's"),
    ] = None
    max_tokens: Annotated[
        int | None, Parameter(help="Tokens of an answer, reasoning included.", show_default="up to the context")
    ] = None
    seed: Annotated[int | None, Parameter(help="Makes sampled answers repeatable.", show_default="random")] = None

    @property
    def parameters(self) -> dict[str, object]:
        """The fields of a request that are set."""
        return {name: value for name in _PARAMETERS if (value := getattr(self, name)) is not None}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ChatOptions):
    """Options of `cellar run` besides the model and the options of a server that it starts."""

    json_schema: Annotated[
        Path | None,
        Parameter(help="File with a JSON schema; the answer is JSON that satisfies it.", show_default="none"),
    ] = None
    image: Annotated[
        tuple[Path, ...],
        Parameter(help="Image file (PNG, JPEG, WebP, GIF) before the prompt; may be repeated.", show_default="none"),
    ] = ()
    audio: Annotated[
        tuple[Path, ...],
        Parameter(
            help="Sound file (WAV, MP3, FLAC, Ogg, ...) before the prompt; may be repeated.", show_default="none"
        ),
    ] = ()
    verbose: Annotated[
        bool,
        Parameter(
            help="Print tokens, tokens per second and the time to the first token to stderr.", show_default="off"
        ),
    ] = False
