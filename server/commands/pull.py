"""`cellar pull`: downloads a model of the hub."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from engine.config import BUNDLED_NAME
from engine.errors import ModelError
from engine.load.hub.hub import download
from engine.load.hub.hub_cache import remove_partial_files
from engine.types.progress import progress_to
from server.terminal.load_screen import load_screen
from server.terminal.sizes import format_file_size

EXIT_FAILED = 1


def run_pull(model: str, revision: str | None) -> int:
    """Download a model; prints its folder or file, and its size. The exit code."""
    messages = Console(stderr=True, highlight=False)
    if model == BUNDLED_NAME:
        messages.print(f"cellar: {BUNDLED_NAME} is bundled: there is nothing to download")
        return 0
    screen = load_screen(messages, lambda text: messages.print(Text(text), soft_wrap=True), f"pull {model}")

    def end(number: int, _: FrameType | None) -> None:
        screen.print("cellar: interrupted; the same command continues with the files that are missing")
        remove_partial_files()
        # An exception would wait for the download threads, which end with their files.
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        with progress_to(screen.set_progress):
            path = download(model, revision)
    except ModelError as error:
        screen.print(f"cellar: {error}")
        return EXIT_FAILED
    screen.stop()
    sys.stdout.write(f"{path}  {format_file_size(size_of(path))}\n")
    return 0


def size_of(path: Path) -> int:
    """The bytes of a folder, or of a GGUF file with all of its shards."""
    if path.is_file():
        from engine.gguf.container import shard_files

        return sum(shard.stat().st_size for shard in shard_files(path))
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
