"""A server process over a FakeEngine, for signals and exit codes: `python -m tests.server.serve_fake PLAY FLAG`.

It prints its port first. PLAY is what the engine does:
  talk   says x until the file FLAG exists, then ends well
  flood  the same with large x, for readers that stand still
  gone   finds no model
  die    dies at the first request
  eat    opens files until no descriptor is left, for as long as the file FLAG exists
  stuck  never renders a chat: creates the file FLAG, and computes in a worker thread without end
  stuck worker  the same in a thread of asyncio's executor
  load   cannot be ended, and aborts a process that takes itself down meanwhile, as torch does while it loads weights
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from engine.errors import ModelMissing
from engine.types.events import Delta, Event, Failed
from engine.types.request import RenderedPrompt, Request
from server.hosting import Hosting
from server.lifecycle import Lifecycle, listen
from tests.server.fakes import FakeEngine, finished, settings

POLL_SECONDS = 0.02
GRACE_OF_STUCK_SECONDS = 1.0


class PlayEngine(FakeEngine):
    """A FakeEngine that speaks until something outside of the process happens."""

    def __init__(self, play: str, flag: Path) -> None:
        super().__init__(failure=ModelMissing("nowhere", "no such folder") if play == "gone" else None)
        self.play, self.flag = play, flag
        if play == "stuck":
            self.tokenizer.render_chat = self._compute_forever  # type: ignore[method-assign]
        self.word = "x" * 100_000 if play == "flood" else "x"

    def start(self) -> None:
        if self.play == "eat":
            threading.Thread(target=self._eat, daemon=True).start()

    def _eat(self) -> None:
        eaten: list[int] = []
        while True:
            time.sleep(POLL_SECONDS)
            hungry = self.flag.exists()
            if hungry and not eaten:
                with suppress(OSError):
                    while True:
                        eaten.append(os.dup(0))
                self.flag.with_suffix(".eaten").mkdir()
            if not hungry:
                while eaten:
                    os.close(eaten.pop())

    def _compute_forever(self, *arguments: object, **options: object) -> RenderedPrompt:
        self.flag.touch()
        while True:
            pass

    def close(self) -> None:
        """Never returns where the play says so."""
        if self.play == "load":
            atexit.register(os.abort)
            threading.Event().wait()

    async def _play(self, request: Request, cut: asyncio.Event) -> AsyncIterator[Event]:
        if self.play == "stuck worker":
            await asyncio.to_thread(self._compute_forever)
        if self.play == "die":
            self.phase, self.alive = "dead: RuntimeError", False
            yield Failed("the engine stopped")
            return
        while not cut.is_set() and not self.flag.exists():
            yield Delta(self.word, (1,))
            await asyncio.sleep(POLL_SECONDS)
        yield Failed("the server is shutting down") if cut.is_set() else finished(request)


async def serve(play: str, flag: Path) -> int:
    """One run of the server, as cli.py does it."""
    listening = listen("127.0.0.1", 0)
    print(listening.getsockname()[1], flush=True)
    grace = GRACE_OF_STUCK_SECONDS if play.startswith("stuck") else 30.0
    using = settings(grace_seconds=grace, limits={"write_seconds": 60.0})
    return await Lifecycle(Hosting(PlayEngine(play, flag), using), using, print).run(listening)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(sys.argv[1], Path(sys.argv[2]))))
