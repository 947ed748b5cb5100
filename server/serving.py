"""Runs the server of `cellar serve`: one model in this process, or several that are loaded on demand.

It imports torch in its functions only: `cellar serve --help` answers at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from server.configuration.config_file import exposes_keys, find
from server.configuration.logs import configure_logging
from server.configuration.settings import Settings, is_world_readable
from server.models.entry import ModelEntry
from server.terminal.load_screen import LoadScreen, load_screen, print_line

if TYPE_CHECKING:
    from engine.client import EngineClient

EXIT_ADDRESS = 1


def warn_of_exposed_keys(settings: Settings, show: Callable[[str], None] = print_line) -> None:
    """Show a warning for each file with API keys that every user of this machine can read."""
    file = find(settings.config)
    key_file = settings.key_file
    paths = [
        *([str(file)] if file is not None and exposes_keys(file) else []),
        *([key_file] if key_file and is_world_readable(Path(key_file)) else []),
    ]
    for path in paths:
        show(f"cellar: warning: every user of this machine can read {path}; chmod o-r keeps the key")


def run(settings: Settings) -> int:
    """Serve until a signal; the exit code."""
    # Garbage collections free nothing during imports and take a sixth of their time (4.6 s without, 5.4 s with them).
    gc.disable()
    screen = load_screen(Console(highlight=False), _print_status, "import torch and transformers")
    try:
        return _run(settings, screen)
    finally:
        screen.stop()


def _run(settings: Settings, screen: LoadScreen) -> int:
    # These imports take seconds: only with valid settings.
    from engine.text.template_process import template_processes

    # It imports transformers' templates meanwhile.
    template_processes().start()
    from server.hosting import Hosting
    from server.lifecycle import Lifecycle, listen

    configure_logging(settings.log_level, settings.log_format)
    try:
        listening = listen(settings.host, settings.port)
    except OSError as error:
        screen.print(f"cellar: cannot listen on {settings.host}:{settings.port}: {error}")
        return EXIT_ADDRESS
    with listening:
        hosting = Hosting(_engine(settings, screen), settings)
        return asyncio.run(Lifecycle(hosting, settings, screen.print).run(listening))


def run_several(settings: Settings, entries: tuple[ModelEntry, ...]) -> int:
    """Serve models that are loaded on demand, until a signal; the exit code."""
    from engine.errors import EngineError
    from engine.remote.planning import measure_budget
    from engine.remote.zygote import Zygote
    from server.hosting import ModelsHosting
    from server.lifecycle import EXIT_MODEL, Lifecycle, listen

    zygote = Zygote()
    zygote.start()
    configure_logging(settings.log_level, settings.log_format)
    try:
        listening = listen(settings.host, settings.port)
    except OSError as error:
        zygote.close()
        _print_status(f"cellar: cannot listen on {settings.host}:{settings.port}: {error}")
        return EXIT_ADDRESS

    async def serve_models() -> int:
        try:
            budget_bytes = await measure_budget(replace(settings, model=None).engine_config(), zygote.launch)
        except EngineError as error:
            zygote.close()
            _print_status(f"cellar: {error}")
            return EXIT_MODEL
        hosting = ModelsHosting(entries, settings, budget_bytes, zygote)
        return await Lifecycle(hosting, settings, _print_status).run(listening)

    with listening:
        return asyncio.run(serve_models())


def _engine(settings: Settings, screen: LoadScreen) -> EngineClient:
    from engine.engine import Engine

    gc.freeze()
    gc.enable()
    return Engine(settings.engine_config(), on_phase=screen.set_phase, on_progress=screen.set_progress)


def _print_status(text: str) -> None:
    """Print a line of a server, which a full disk or a closed pipe does not end."""
    try:
        print_line(text)
    except OSError:
        # Python would fail to write the line at its end, too.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
