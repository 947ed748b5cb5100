"""The time for which a model stays loaded after its last request, in the formats of Ollama."""

from __future__ import annotations

import math
import re

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"\d+(?:\.\d*)?|\.\d+")


def parse_keep_alive(value: object) -> float:
    """Seconds of a number, or of a text such as 300, 5m or 1h30m; infinite if negative. ValueError for others."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number of seconds or a duration such as 5m")
    if isinstance(value, str):
        return _parse_text(value.strip())
    if math.isnan(value):
        raise ValueError("must be a number of seconds")
    return math.inf if value < 0 else float(value)


def _parse_text(text: str) -> float:
    magnitude = text.removeprefix("-")
    if _NUMBER.fullmatch(magnitude):
        seconds = float(magnitude)
    elif parts := _whole_duration(magnitude):
        seconds = sum(float(part.rstrip("nuµmsh")) * _UNITS[part.lstrip("0123456789.")] for part in parts)
    else:
        raise ValueError(f"must be a number of seconds, or a duration such as 5m or 1h30m, not {text[:32]}")
    return math.inf if text.startswith("-") and seconds else seconds


def _whole_duration(text: str) -> list[str]:
    parts = _DURATION.findall(text)
    return parts if "".join(parts) == text else []
