"""/api/pull: downloads of models into the hub's cache, with their progress as status lines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from engine.errors import ModelMissing
from engine.load.hub.catalogue import NAMED_MODELS
from engine.load.hub.hub import split_name
from engine.types.model_name import plain_name
from server.http.errors import DISK_FULL, HUB_UNREACHABLE, INTERNAL_ERROR, MODEL_NOT_FOUND, QUEUE_FULL, ApiError
from server.models.presets import LATEST_TAG
from server.schemas.ollama import OllamaStatus

MAX_PULLS = 2
RETRY_SECONDS = 30
# Time for an ended download to delete its unfinished files.
END_SECONDS = 5.0

# Imports come from the folders of this process, not from the current folder.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from server.ollama.download import main; sys.exit(main(sys.argv[1]))"

Lines = AsyncGenerator[OllamaStatus, None]


@dataclass(slots=True)
class Downloads:
    """The running downloads. Used on the event loop.

    running  their number
    """

    running: int = 0

    def check_capacity(self) -> None:
        """Raise ApiError if as many downloads run as may."""
        if self.running >= MAX_PULLS:
            message = f"{self.running} models are being downloaded already."
            raise ApiError(QUEUE_FULL, message, headers={"Retry-After": str(RETRY_SECONDS)})

    async def lines(self, model: str) -> Lines:
        """Download a model, named as on the hub; yields status lines, the last one "success". Raises ApiError.

        Closing the generator ends the download.
        """
        self.running += 1
        try:
            yield OllamaStatus(status="pulling manifest")
            async with _download(model) as reports, aclosing(_statuses(model, reports)) as statuses:
                async for status in statuses:
                    yield status
        finally:
            self.running -= 1


async def served_lines(model: str) -> Lines:
    """The status lines for a model that is served already."""
    yield OllamaStatus(status="pulling manifest")
    yield OllamaStatus(status=f"{model} is loaded: there is nothing to download")
    yield OllamaStatus(status="success")


def hub_name(model: str) -> str:
    """The name on the hub, `organisation/model` or `organisation/model:quantisation`; ApiError for another one."""
    model = plain_name(model).removesuffix(LATEST_TAG)
    if model in NAMED_MODELS:
        return model
    try:
        split_name(model)
    except ModelMissing as error:
        message = (
            f"'{model[:128]}' is not a model of the hub: models are pulled as organisation/model, or for a GGUF file "
            "organisation/model:Q4_K_M. Ollama's own library is not used."
        )
        raise ApiError(MODEL_NOT_FOUND, message, param="model") from error
    return model


async def _statuses(model: str, reports: AsyncIterator[dict[str, object]]) -> Lines:
    # Clients tell downloads apart by digest; the files of a repository are one download here.
    digest = f"sha256:{hashlib.sha256(model.encode()).hexdigest()}"
    async for report in reports:
        match report:
            case {"done": int(done), "total": int(total)}:
                yield OllamaStatus(status=f"pulling {digest[7:19]}", digest=digest, total=total, completed=done)
            case {"error": str(reason), "kind": str(kind)}:
                raise _failure(kind, reason)
            case {"path": str()}:
                yield OllamaStatus(
                    status=f"{model} is in the hub's cache; this server keeps its model, serve it with: "
                    f"cellar serve {model}"
                )
                yield OllamaStatus(status="success")
                return
    raise ApiError(INTERNAL_ERROR, "The download ended unexpectedly.")


def _failure(kind: str, reason: str) -> ApiError:
    """The error of a download process (download.py)."""
    match kind:
        case "unreachable":
            return ApiError(HUB_UNREACHABLE, reason, headers={"Retry-After": str(RETRY_SECONDS)})
        case "disk":
            return ApiError(DISK_FULL, reason, headers={"x-should-retry": "false"})
        case _:
            return ApiError(MODEL_NOT_FOUND, reason, param="model")


@asynccontextmanager
async def _download(model: str) -> AsyncIterator[AsyncIterator[dict[str, object]]]:
    """The reports of a download process (download.py), which ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM.format(path=sys.path), model),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield _parsed(process.stdout)
    finally:
        await asyncio.shield(_end(process))


async def _parsed(lines: asyncio.StreamReader) -> AsyncIterator[dict[str, object]]:
    async for line in lines:
        yield json.loads(line)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
