"""The command `cellar`. Imports nothing heavy: --help answers before torch would have loaded."""

from __future__ import annotations

import asyncio
import difflib
import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.config import Env

from bench.options import BenchOptions
from engine.config import Dtype, KvDtype, Quantize
from engine.types.request import DrafterChoice, MlaMode, Overflow
from server.http.version import version
from server.settings import LogLevel, Settings, is_world_readable, make_disk_cache, read_keys, split_keys
from server.store.database import StoreError
from server.store.store import check_store

if TYPE_CHECKING:
    from engine.engine import Engine

ENVIRONMENT_PREFIX = "CELLAR_"
# Read by compose.yaml and by the scripts in docker/.
OTHER_VARIABLES = frozenset({"CELLAR_MEMORY", "CELLAR_IMAGES"})
_service_link = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")
EXIT_USAGE, EXIT_ADDRESS = 2, 1
# Rounds for which a computing thread waits for others before it sleeps; libgomp's own default is 300,000. Measured with
# two threads on busy cores: a step took 451 ms of the clock so, 8 with 0 or 200 rounds, 13 with 2,000, 67 with 20,000.
SPIN_COUNT = "1000"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `cellar serve` takes besides the model.

    Parameters
    ----------
    host
        Address to listen on. Any but a loopback address needs an API key.
    port
        Port to listen on; 0 takes a free one.
    dtype
        Number format of weights and computation; auto takes what this machine computes fastest.
    kv_dtype
        Number format of the cached keys and values. Default: that of the computation.
    quantize
        Bits of the weights of linear layers and experts on a CPU: int8, int4, or auto: what fits where it is faster.
    context
        Tokens that a sequence may hold. Default: what the model and the memory allow.
    slots
        Sequences that run at once. Default: what the memory allows, 8 at most.
    served_model_name
        What requests call the model. Repeatable. Default: the hub id or the folder's name.
    api_key
        Key that requests must bring; several separated by commas. Visible in the process list: prefer the file. Keys
        given as organisation:key share the prefix cache with those of the same organisation.
    api_key_file
        File with keys, separated by commas or lines.
    overflow
        At a full context: end with finish_reason length, or shift the oldest tokens out.
    max_waiting
        Requests that may wait for a slot; one more is answered 429.
    itl_target_ms
        Milliseconds from token to token to keep while prompts are computed; 0: prompts first; auto: 60, or three
        times a step without prompts where that is more.
    threads
        Threads to compute with. Default: the processors that affinity and the quota of a container leave.
    mla
        Latent attention: absorb the projections, expand the latents, or auto: what costs less.
    drafter
        Who guesses ahead: lookup (repetitions), model (a draft model), mtp (the model's own head), auto (lookup and one
        of the others) or none. Never changes a text.
    draft_model
        Folder or hub id of a smaller model with the same tokenizer. The bundled model brings its own.
    draft_tokens
        Tokens guessed at a time, 0 to 16; auto: as many as pay.
    draft_quantize
        As --quantize, for the draft model. Default: the same.
    embedding_model
        Folder or hub id of a model that makes vectors, or ranks texts, beside the model.
    shelf
        Folder where computed prompts are kept for the next start; none, the default: they end with the process.
    shelf_bytes
        Bytes that the files in the folder may take.
    shelf_memory_bytes
        Bytes of host memory for prompts that had to leave the cache; on a CPU better given to --slots.
    store
        Where /v1/responses are kept: a file, postgresql://..., memory or none. Default: a file in your folder for data.
    allowed_host
        Host header to answer besides localhost and --host. Repeatable; * allows all. With a scheme, as in
        https://chat.example.org: an origin whose pages may call the server from a browser.
    grace
        Seconds that running requests get after SIGTERM.
    lenient
        Answer with a list of warnings where a parameter is not honoured, in place of an error.
    log_level
        How much to log.
    insecure_no_auth
        Serve anyone who can reach an address that is not loopback.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    dtype: Dtype = "auto"
    kv_dtype: KvDtype = "auto"
    quantize: Quantize = "none"
    context: int | None = None
    slots: int | None = None
    served_model_name: list[str] | None = None
    api_key: str | None = None
    api_key_file: str | None = None
    overflow: Overflow = "length"
    max_waiting: int = 64
    itl_target_ms: Literal["auto"] | float = "auto"
    threads: int | None = None
    mla: MlaMode = "auto"
    drafter: DrafterChoice = "auto"
    draft_model: str | None = None
    draft_tokens: Literal["auto"] | int = "auto"
    draft_quantize: Quantize | None = None
    embedding_model: str | None = None
    shelf: str | None = None
    shelf_bytes: int = 8 * 2**30
    shelf_memory_bytes: int = 0
    store: str | None = None
    allowed_host: list[str] | None = None
    grace: float = 30.0
    lenient: bool = False
    log_level: LogLevel = "info"
    insecure_no_auth: bool = False

    def settings(self, model: str | None) -> Settings:
        """The settings they make; ValueError or OSError says what is wrong with them."""
        return Settings(
            model=model,
            host=self.host,
            port=self.port,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            quantize=self.quantize,
            context=self.context,
            slots=self.slots,
            overflow=self.overflow,
            max_waiting=self.max_waiting,
            itl_target_ms=None if self.itl_target_ms == "auto" else self.itl_target_ms,
            threads=self.threads,
            mla=self.mla,
            drafter=self.drafter,
            draft_model=self.draft_model or None,
            draft_tokens=None if self.draft_tokens == "auto" else self.draft_tokens,
            draft_quantize=self.draft_quantize,
            embedding_model=self.embedding_model or None,
            disk_cache=None if self.shelf in (None, "", "none") else self.shelf,
            disk_cache_bytes=self.shelf_bytes,
            host_cache_bytes=self.shelf_memory_bytes,
            store=self.store or None,
            served_names=tuple(self.served_model_name or ()),
            keys=self.all_keys,
            allowed_hosts=tuple(self.allowed_host or ()),
            grace_seconds=self.grace,
            lenient=self.lenient,
            log_level=self.log_level,
            insecure_no_auth=self.insecure_no_auth,
        )

    @property
    def all_keys(self) -> tuple[str, ...]:
        """The keys given here and in the file; ValueError or OSError says what is wrong with the file."""
        from_file = read_keys(Path(self.api_key_file)) if self.api_key_file else ()
        if from_file and is_world_readable(Path(str(self.api_key_file))):
            _print_line(
                f"cellar: warning: every user of this machine can read {self.api_key_file}; chmod o-r keeps the key"
            )
        return (*split_keys(self.api_key or ""), *from_file)

    def arguments(self) -> Iterator[str]:
        """The command line that says the same to another process, but for the address and the keys."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("host", "port", "api_key", "api_key_file") or value == field.default:
                continue
            for one in value if isinstance(value, list) else [value]:
                flag = f"--{field.name.replace('_', '-')}"
                yield from [flag] if one is True else [flag, str(one)]


def check_environment() -> None:
    """ValueError at a CELLAR_ variable that no option has, with the name that comes nearest."""
    options = (field.name for kind in (ServeOptions, BenchOptions) for field in fields(kind))
    known = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in ("model", *options)} | OTHER_VARIABLES
    for name, value in sorted(os.environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in known or _is_service_link(name, value):
            continue
        nearest = difflib.get_close_matches(name.upper(), known, 1, 0.0)[0]
        raise ValueError(f"the environment variable {name} is no setting; the nearest one is {nearest}")


def _is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes or Docker made the variable, for a service whose name begins with "cellar"."""
    return value.startswith(("tcp://", "udp://")) or _service_link.search(name) is not None


def make_app() -> App:
    """The command line. Every option can also be given as an environment variable; argv wins."""
    app = App(
        name="cellar",
        help="An OpenAI-compatible LLM inference server.",
        version=version,
        config=Env(ENVIRONMENT_PREFIX, command=False),
        default_parameter=Parameter(negative=()),
    )
    app.command(serve)
    app.command(bench)
    return app


def main() -> None:
    """The entry point of the distribution."""
    make_app()()


def serve(model: str | None = None, *, options: Annotated[ServeOptions | None, Parameter(name="*")] = None) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    Parameters
    ----------
    model
        A folder, or a hub id such as Qwen/Qwen3-0.6B. Without it the small bundled model is served.
    """
    try:
        check_environment()
        settings = (options or ServeOptions()).settings(model)
        check_store(settings.store)
        make_disk_cache(settings.disk_cache)
    except (ValueError, OSError, StoreError) as error:
        _print_line(f"cellar: {error}")
        sys.exit(EXIT_USAGE)
    sys.exit(run(settings))


def bench(
    model: str | None = None,
    *,
    bench_options: Annotated[BenchOptions | None, Parameter(name="*")] = None,
    options: Annotated[ServeOptions | None, Parameter(name="*")] = None,
) -> None:
    """Measure latency, throughput, reuse of prompts and long context, of a model or of running servers.

    Starts `cellar serve` with the options of that command, unless --base-url names servers: any that speak OpenAI's
    wire format. Exits with 1 if a request failed.

    Parameters
    ----------
    model
        As for `cellar serve`; with --base-url, what requests call the model there. Default: the first that it names.
    """
    from bench.command import ServeArguments, measured

    given, asked = options or ServeOptions(), bench_options or BenchOptions()
    try:
        check_environment()
        keys = given.all_keys
    except (ValueError, OSError) as error:
        _print_line(f"cellar: {error}")
        sys.exit(EXIT_USAGE)
    serving = ServeArguments(
        arguments=(*([model] if model else []), *given.arguments()),
        environment={"CELLAR_API_KEY": ",".join(keys)} if keys else {},
        names=given.served_model_name or ([model] if model and asked.base_url else []),
        api_key=keys[0] if keys else None,
        context=given.context,
    )
    sys.exit(measured(asked, serving))


def run(settings: Settings) -> int:
    """Serve with `settings`; returns the exit code."""
    # Seconds of imports, so not before the settings are known to be good.
    from server.lifecycle import Lifecycle, listen

    _configure_logging(settings.log_level)
    limit_spinning()
    try:
        listening = listen(settings.host, settings.port)
    except OSError as error:
        _print_line(f"cellar: cannot listen on {settings.host}:{settings.port}: {error}")
        return EXIT_ADDRESS
    with listening:
        return asyncio.run(Lifecycle(_engine(settings), settings, _print_line).run(listening))


def limit_spinning() -> None:
    """Bound how long threads spin, unless the user has said so; libgomp reads it once, when torch is imported.

    On a busy machine one that spins takes the processor from the thread for which it waits.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def _engine(settings: Settings) -> Engine:
    # Collections find nothing in what imports make, and take a sixth of their time (5.4 s to 4.6 s, measured).
    gc.disable()
    from engine.load.imports import import_transformers

    import_transformers()
    from engine.engine import Engine

    gc.freeze()
    gc.enable()
    return Engine(settings.engine_config(), on_phase=_print_phase)


def _print_line(text: str) -> None:
    print(text, flush=True)


def _print_phase(phase: str) -> None:
    _print_line(f"cellar: {phase}")


def _configure_logging(level: LogLevel) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # These would log every chunk of every answer, or every packet, at DEBUG.
    for name in ("sse_starlette", "asyncio", "urllib3", "httpcore"):
        logging.getLogger(name).setLevel(logging.INFO)
    # A warning for every malformed request would let strangers fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
