"""`cellar models`: the models on this machine's disk, and the models of a running server."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.config import BUNDLED_NAME
from engine.errors import ModelKept
from engine.load.hub.hub_cache import CachedModel, cached_models, find_cached, remove_revisions
from server.terminal.client import ChatClient, ServerError, model_label
from server.terminal.printable import printable
from server.terminal.sizes import format_file_size

EXIT_FAILED, EXIT_USAGE, EXIT_KEPT = 1, 2, 1
PROBE_SECONDS = 2.0
REVISION_LENGTH = 8


def list_models(*, as_json: bool, url: str, api_key: str | None) -> int:
    """Print the models; the exit code."""
    try:
        served, problem = _served(url, api_key), None
    except ServerError as error:
        served, problem = [], str(error)
    cached = cached_models()
    if as_json:
        document = {"cached": [_entry(model) for model in cached], "served": served, "bundled": BUNDLED_NAME}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    console = Console(highlight=False)
    console.print(_table(cached))
    names = printable(", ".join(map(model_label, served)))
    console.print(Text(f"served at {url}: {names}" if names else f"served: none ({problem})"), soft_wrap=True)
    return 0


def remove_model(name: str, *, confirmed: bool) -> int:
    """Remove a model from the cache, after a question on a terminal; the exit code."""
    messages = Console(stderr=True, highlight=False)
    try:
        revisions = find_cached(name)
    except ModelKept as error:
        messages.print(Text(f"cellar: {error}"), soft_wrap=True)
        return EXIT_FAILED
    if not revisions:
        known = ", ".join(dict.fromkeys(revision.id for revision in cached_models()))
        others = f"has no model {name}, only {known}" if known else "is empty"
        messages.print(Text(f"cellar: the cache {others}"), soft_wrap=True)
        return EXIT_FAILED
    size = format_file_size(sum(revision.size_bytes for revision in revisions))
    if not confirmed:
        if not sys.stdin.isatty():
            messages.print("cellar: nothing is removed without --yes or a terminal", soft_wrap=True)
            return EXIT_USAGE
        messages.print(Text(f"Remove {name} ({len(revisions)} revisions, up to {size})? [y/N] "), end="")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            messages.print("cellar: nothing is removed")
            return EXIT_KEPT
    try:
        freed = remove_revisions(revisions)
    except ModelKept as error:
        messages.print(Text(f"cellar: {error}"), soft_wrap=True)
        return EXIT_FAILED
    messages.print(Text(f"cellar: {name} is removed, {format_file_size(freed)} are free"), soft_wrap=True)
    return 0


def _served(url: str, api_key: str | None) -> list[dict[str, Any]]:
    with ChatClient(url, api_key) as client:
        return client.models(PROBE_SECONDS)


def _entry(model: CachedModel) -> dict[str, Any]:
    """A model in JSON."""
    return {
        "id": model.id,
        "revision": model.revision,
        "names": list(model.names),
        "folder": str(model.folder),
        "formats": list(model.formats),
        "files": list(model.files),
        "size_bytes": model.size_bytes,
        "incomplete_bytes": model.incomplete_bytes,
        "last_used": datetime.fromtimestamp(model.last_used, UTC).isoformat(timespec="seconds"),
    }


def _table(models: list[CachedModel]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "revision", "format", "size", "last used"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    table.add_row(BUNDLED_NAME, "", "safetensors", "bundled", "")
    for model in models:
        size = format_file_size(model.size_bytes)
        if model.incomplete_bytes:
            size += f" + {format_file_size(model.incomplete_bytes)} of an interrupted download"
        table.add_row(
            Text(model.id),
            Text(", ".join([model.revision[:REVISION_LENGTH], *model.names])),
            " and ".join(model.formats) or "no weights",
            size,
            _age(time.time() - model.last_used),
        )
    return table


def _age(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "now"
