"""What the event loop puts into the engine thread's inbox."""

from __future__ import annotations

from dataclasses import dataclass

from engine.grammar.matcher import GrammarMatcher
from engine.types.request import EmbeddingJob, Request


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request, with the matcher of its grammar."""

    request: Request
    matcher: GrammarMatcher | None


@dataclass(frozen=True, slots=True)
class Embed:
    """Queue texts for the embedding model."""

    job: EmbeddingJob


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request or a job."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = Submit | Embed | Cancel | Stop
