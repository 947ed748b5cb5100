"""What all clients are tried on. Found by PYTHONPATH, for the environments of the clients do not know this project."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Server:
    """The server under test, the folder of its model, and things that this model was taught."""

    url: str
    key: str
    model: str
    folder: str
    question: str = "Hello"
    weather: str = "What is the weather in Paris?"
