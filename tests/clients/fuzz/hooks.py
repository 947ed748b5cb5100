"""What schemathesis cannot know: the name of the server's model, what a conversation is, and which fields go together.

Without it nearly all good requests end at a 404, or at a 400 for a message that its role cannot have or for two fields
that exclude each other. So every second body is about something good, with a few other fields at a time.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import schemathesis

MODEL = os.environ["CELLAR_CLIENTS_MODEL"]
TALK = [{"role": "user", "content": "Hello"}]
# What bodies are about, by path.
MATTERS: dict[str, tuple[str, object]] = {
    "/api/chat": ("messages", TALK),
    "/api/generate": ("prompt", "Hello"),
    "/v1/chat/completions": ("messages", TALK),
    "/v1/completions": ("prompt", "Hello"),
    "/v1/messages": ("messages", TALK),
    "/v1/responses": ("input", "Hello"),
}
NEEDED = {"model", "max_tokens"}
ONE_OF = 24

_numbers = itertools.count()


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Ask for the model that is there, wherever a body names one, and of it for a few things at a time."""
    if not isinstance(case.body, dict):
        return
    number = next(_numbers)
    if isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    if number % 2 and case.path in MATTERS:
        matter, good = MATTERS[case.path]
        others = sorted(case.body.keys() - NEEDED)
        for name in (name for at, name in enumerate(others) if (at + number // 2) % ONE_OF):
            del case.body[name]
        case.body[matter] = good
