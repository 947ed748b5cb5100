"""The settings of one server, checked when they are made. cli.py fills them from argv and CELLAR_*."""

from __future__ import annotations

import ipaddress
import math
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.config import BUNDLED_NAME, ConfigError, Dtype, EngineConfig, KvDtype, Quantize
from engine.types.request import DrafterChoice, MlaMode, Overflow

LogLevel = Literal["debug", "info", "warning", "error"]

CONTAINER_SECRETS = "/run/secrets"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

_origin = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#*\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """How much of what a client may send, and how slowly.

    head_bytes, headers   of one request line with its headers
    head_seconds          from the first byte, or the connection, to the end of the headers
    body_seconds          from the headers to the end of the body
    write_seconds         that a reader may stand still before its connection is cut
    keep_alive_seconds    longer than the pools of common clients, so that they close first
    ping_seconds          of silence in a stream before a comment line goes out
    """

    body_bytes: int = 4 * 1024 * 1024
    head_bytes: int = 16 * 1024
    headers: int = 100
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    keep_alive_seconds: int = 120
    ping_seconds: float = 15.0
    connections: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that `cellar serve` can be told; the engine's part is documented at EngineConfig.

    served_names      what requests may call the model; empty: the name of the model itself
    store             where responses are kept: a file, a URL of PostgreSQL, "memory", "none"; None: a file of the user
    keys              any of them opens the server, each `key` or `organisation:key`; empty: it is open
    allowed_hosts     values of the Host header besides localhost and `host`, "*" allows all; with a scheme, origins
                      whose pages may call the server from a browser
    grace_seconds     that running requests get after SIGTERM
    lenient           whether a parameter that is not honoured becomes a warning in the answer, not an error
    insecure_no_auth  allows an open server on an address that others can reach
    """

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: Dtype = "auto"
    kv_dtype: KvDtype = "auto"
    quantize: Quantize = "none"
    context: int | None = None
    slots: int | None = None
    overflow: Overflow = "length"
    max_waiting: int = 64
    itl_target_ms: float | None = None
    threads: int | None = None
    mla: MlaMode = "auto"
    drafter: DrafterChoice = "auto"
    draft_model: str | None = None
    draft_tokens: int | None = None
    draft_quantize: Quantize | None = None
    embedding_model: str | None = None
    disk_cache: str | None = None
    disk_cache_bytes: int = 8 * 2**30
    host_cache_bytes: int = 0
    store: str | None = None
    served_names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    grace_seconds: float = 30.0
    log_level: LogLevel = "info"
    lenient: bool = False
    insecure_no_auth: bool = False
    limits: ClientLimits = field(default_factory=ClientLimits)
    direct_writes: bool = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot work or that open the server by accident; ValueError says what to change."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be between 0 and 65535, not {self.port}")
        if not 0 <= self.grace_seconds < math.inf:
            raise ValueError(f"--grace must be a number of seconds from 0 on, not {self.grace_seconds}")
        if not self.keys and not self.insecure_no_auth and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached by others: give --api-key (or CELLAR_API_KEY_FILE), "
                "or --insecure-no-auth to serve anyone"
            )
        _check_keys(self.keys)
        for origin in self.origins:
            if not _origin.fullmatch(origin):
                raise ValueError(
                    f"--allowed-host {origin} is no origin: give scheme and host, as in https://chat.example.org, "
                    "without a path"
                )
        if self.embedding_name in self.model_names:
            raise ValueError(
                f"--embedding-model {self.embedding_model} has the name of the model: "
                "give that another one with --served-model-name"
            )
        try:
            self.engine_config()
        except ConfigError as error:
            raise ValueError(f"--{error.setting.replace('_', '-')} {error.reason}") from error

    @property
    def model_names(self) -> tuple[str, ...]:
        """What the model is called in requests, the first being its main name."""
        if self.served_names:
            return self.served_names
        return (BUNDLED_NAME if self.model is None else _model_name(self.model),)

    @property
    def embedding_name(self) -> str | None:
        """What the embedding model is called in requests; None: there is none."""
        return None if self.embedding_model is None else _model_name(self.embedding_model)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Values of the Host header that are answered, without ports, in lower case."""
        bound = f"[{self.host}]" if ":" in self.host else self.host
        named = (host for host in self.allowed_hosts if "://" not in host)
        return tuple(host.lower() for host in (*LOOPBACK_NAMES, bound, *named))

    @property
    def origins(self) -> tuple[str, ...]:
        """Values of the Origin header whose pages may read answers, in lower case as browsers write them."""
        return tuple(host.lower() for host in self.allowed_hosts if "://" in host)

    def engine_config(self) -> EngineConfig:
        """The part that the engine reads."""
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            quantize=self.quantize,
            context=self.context,
            slots=self.slots,
            overflow=self.overflow,
            max_waiting=self.max_waiting,
            itl_target_ms=self.itl_target_ms,
            threads=self.threads,
            mla=self.mla,
            drafter=self.drafter,
            draft_model=self.draft_model,
            draft_tokens=self.draft_tokens,
            draft_quantize=self.draft_quantize,
            embedding_model=self.embedding_model,
            # No route takes any.
            media=False,
            disk_cache=self.disk_cache,
            disk_cache_bytes=self.disk_cache_bytes,
            host_cache_bytes=self.host_cache_bytes,
        )


def _model_name(model: str) -> str:
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; names other than localhost may point anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_disk_cache(folder: str | None) -> None:
    """Make the folder of the shelf, if there is to be one; ValueError says why there can be none."""
    try:
        if folder is not None:
            Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--shelf {folder}: there can be no such folder: {error.strerror}") from error


def split_keys(text: str) -> tuple[str, ...]:
    """The keys in a list separated by commas or lines."""
    return tuple(key for part in text.splitlines() for key in (piece.strip() for piece in part.split(",")) if key)


def is_world_readable(path: Path) -> bool:
    """Whether every user of this machine may read a file; secrets of a container are, and only its user is there."""
    return bool(path.stat().st_mode & stat.S_IROTH) and not path.is_relative_to(CONTAINER_SECRETS)


def split_organisation(entry: str) -> tuple[str, str]:
    """The organisation and the key of `organisation:key`; of any other entry "" and the entry."""
    organisation, _, key = entry.partition(":")
    return (organisation, key) if organisation and key else ("", entry)


def _check_keys(entries: tuple[str, ...]) -> None:
    owners: dict[str, str] = {}
    for organisation, key in map(split_organisation, entries):
        if owners.setdefault(key, organisation) != organisation:
            named = " and ".join(sorted(filter(None, (organisation, owners[key]))))
            raise ValueError(f"--api-key has a key of {named} twice: a key belongs to one organisation, or to none")


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file; ValueError if there is none, so that a mounted but empty secret does not open the server."""
    keys = split_keys(path.read_text(encoding="utf-8"))
    if not keys:
        raise ValueError(f"no API key in {path}")
    return keys
