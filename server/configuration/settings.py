"""The settings of one server. Every option of `cellar serve` is declared once: of the engine in engine/config.py, of
the server here, as a field of `Settings`.

The command line (cli.py), the environment variables, the configuration file (config_file.py), `cellar serve --help`
and the tables of docs/options.md (docs/options.py) are derived from these fields.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
import stat
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_type_hints

from cyclopts import Parameter

from engine.config import BUNDLED_NAME, ConfigError, EngineConfig
from engine.types.model_name import plain_name
from engine.types.setting import Setting
from server.configuration.converters import convert_keys, parse_by, split_keys

if TYPE_CHECKING:
    from server.configuration.key_file import KeyEntry

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
# Among the served names: requests may have any name.
ANY_NAME = "*"

ENVIRONMENT_PREFIX = "CELLAR_"
CONTAINER_SECRETS = "/run/secrets"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# A key file with this suffix has entries with scopes.
TOML_SUFFIX = ".toml"
# It is read on the event loop when it has changed: 2,700 entries of TOML take 0.2 s.
MAX_KEY_FILE_BYTES = 2**18

_origin = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#*\s]+")
# The last label is no number, which a resolver would read as an address.
_media_host = re.compile(r"\.?([a-z0-9-]+\.)*[a-z][a-z0-9-]*")
# Fields that are no options.
INTERNAL = Parameter(parse=False)


class ConfiguredKeys(NamedTuple):
    """The API keys of a server, and the entries of a key file in TOML."""

    keys: tuple[str, ...]
    entries: tuple[KeyEntry, ...]

    def check(self) -> None:
        """Raise ValueError for keys that contradict each other."""
        owners: dict[bytes, str] = {}
        pairs = [(hashlib.sha256(key.encode()).digest(), name) for name, key in map(split_organisation, self.keys)]
        for digest, organisation in [*pairs, *((entry.digest, entry.organisation or "") for entry in self.entries)]:
            if owners.setdefault(digest, organisation) != organisation:
                named = " and ".join(sorted(filter(None, (organisation, owners[digest]))))
                raise ValueError(f"--api-key has a key of {named} twice: a key belongs to one organisation, or to none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Size and time limits of client connections.

    body_bytes            of a body without its images and sounds
    media_body_bytes      of a body with images or sounds, for a model that reads them
    media_buffer_bytes    of all bodies above body_bytes at the same time
    file_bytes            of the form of an uploaded file
    head_bytes, headers   of one request line with its headers
    head_seconds          from the first byte, or the connection, to the end of the headers
    body_seconds          from the headers to the end of the body; more for a large file
    upload_rate           least bytes a second of a large file
    write_seconds         without progress of a response's transmission before the connection is closed
    keep_alive_seconds    longer than in the connection pools of common clients, so that they close first
    ping_seconds          without an event before an SSE stream gets a comment line
    """

    body_bytes: int = 4 * 1024 * 1024
    media_body_bytes: int = 64 * 1024 * 1024
    media_buffer_bytes: int = 2**29
    file_bytes: int = 200 * 1024 * 1024
    head_bytes: int = 16 * 1024
    headers: int = 100
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    upload_rate: int = 256 * 1024
    write_seconds: float = 30.0
    keep_alive_seconds: int = 120
    ping_seconds: float = 15.0
    connections: int = 1024


def _with_engine_options(settings: type[EngineConfig]) -> type[EngineConfig]:
    """Tell cyclopts which inherited fields are options, with their help texts."""
    types, annotated = get_type_hints(EngineConfig), get_type_hints(EngineConfig, include_extras=True)
    for inherited in fields(EngineConfig):
        parameter = _parameter(inherited.default, *getattr(annotated[inherited.name], "__metadata__", ()))
        settings.__annotations__[inherited.name] = Annotated[types[inherited.name], parameter]
    # cyclopts reads those of the constructor too, where inherited ones are texts in the names of another module.
    vars(settings)["__init__"].__annotations__.update(settings.__annotations__)
    return settings


def _parameter(default: object, setting: Setting | None = None) -> Parameter:
    """The option of a setting of the engine; INTERNAL if it is none."""
    if setting is None:
        return INTERNAL
    parsed = None if setting.parse is None else parse_by(setting.parse)
    return Parameter(
        alias=f"--{setting.older_name.replace('_', '-')}" if setting.older_name else None,
        converter=parsed,
        n_tokens=1 if parsed else None,
        help=setting.help,
        show_default=setting.default_text or ("off" if default is False else None),
    )


@_with_engine_options
@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(EngineConfig):
    """The options of `cellar serve`: the engine's options, inherited, and the server's. `check` validates them.

    media          no route accepts media; no option
    limits         of client connections; no option
    direct_writes  whether text deltas go to the socket from the engine's delivery callback (DirectWriter) without
                   passing ASGI's `send`; False where middleware has to see every body; no option
    """

    media: bool = False
    host: Annotated[str, Parameter(help="Address to listen on. Any but a loopback address needs an API key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Parameter(help="Port to listen on; 0 selects a free one.")] = 8000
    served_names: Annotated[
        tuple[str, ...],
        Parameter(
            name="--served-model-name",
            help="Model name in requests; * is any name. Repeatable.",
            show_default="the hub id or the folder's name",
        ),
    ] = ()
    keys: Annotated[
        tuple[str, ...],
        Parameter(
            name="--api-key",
            converter=convert_keys,
            n_tokens=1,
            help="API keys, separated by commas; requests send one as Authorization: Bearer or x-api-key. Keys of one "
            "organisation, written as organisation:key, share the prefix cache. Visible in the process list: prefer "
            "the file.",
            show_default="none",
        ),
    ] = ()
    key_file: Annotated[
        str | None,
        Parameter(
            name="--api-key-file",
            help="File with API keys, separated by commas or lines; .toml: with scopes.",
            show_default="none",
        ),
    ] = None
    store: Annotated[
        str | None,
        Parameter(
            help="Store of responses, files and batches: a file, postgresql://..., memory or none.",
            show_default="a file in the user's data folder",
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Parameter(
            name="--allowed-host",
            help="Without API keys: accepted Host header besides localhost and --host; * accepts all. Repeatable. "
            "With a scheme, as in https://chat.example.org: an origin whose pages may call the server from a browser "
            "(CORS), besides those of the browser's own machine.",
            show_default="loopback names",
        ),
    ] = ()
    media_hosts: Annotated[
        tuple[str, ...],
        Parameter(
            name="--allow-media-host",
            help="Host that images of requests are fetched from, by https; with a leading dot, as in .example.org: all "
            "hosts below. Repeatable.",
            show_default="none: images are sent in the request",
        ),
    ] = ()
    models_dir: Annotated[
        str | None,
        Parameter(
            name="--models",
            help="Folder of models, loaded on demand: folders with config.json, and GGUF files.",
            show_default="none",
        ),
    ] = None
    pinned: Annotated[
        tuple[str, ...],
        Parameter(
            name="--pin",
            help="With several models: one that is loaded at the start and never unloaded. Repeatable.",
            show_default="none",
        ),
    ] = ()
    keep_alive: Annotated[
        str | None,
        Parameter(
            help="With several models: time without a request after which one is unloaded, such as 5m.",
            show_default="until its memory is needed",
        ),
    ] = None
    load_timeout: Annotated[
        float, Parameter(help="With several models: seconds that a request waits for the load of its model.")
    ] = 300.0
    grace_seconds: Annotated[
        float, Parameter(name="--grace", help="Seconds for running requests to finish after SIGTERM.")
    ] = 30.0
    lenient: Annotated[
        bool,
        Parameter(
            show_default="off",
            help="An unsupported parameter adds a line to the answer's warnings, in place of an error.",
        ),
    ] = False
    strict_system_role: Annotated[
        bool,
        Parameter(
            show_default="off",
            help="A system message is an error if the chat template has none; else its text joins the user message.",
        ),
    ] = False
    log_level: Annotated[LogLevel, Parameter(help="Lowest level of log lines.")] = "info"
    otlp_traces_endpoint: Annotated[
        str | None,
        Parameter(
            help="Collector of OpenTelemetry traces, such as http://127.0.0.1:4318/v1/traces.",
            show_default="none",
        ),
    ] = None
    log_format: Annotated[LogFormat, Parameter(help="Lines of text, or a JSON object a line.")] = "text"
    insecure_no_auth: Annotated[
        bool, Parameter(help="Allow an address that is not loopback without API keys.", show_default="off")
    ] = False
    config: Annotated[
        str | None,
        Parameter(
            help="TOML file with options: the names above without the dashes, as in max-waiting = 16.",
            show_default="cellar.toml in the user's configuration folder, if it exists",
        ),
    ] = None
    limits: Annotated[ClientLimits, INTERNAL] = field(default_factory=ClientLimits)
    direct_writes: Annotated[bool, INTERNAL] = True

    def __post_init__(self) -> None:
        """Any values: `check` validates them, in the words of the command line."""

    def check(self) -> None:
        """Raise ValueError for settings that cannot work or open the server by accident, OSError for the key file."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be between 0 and 65535, not {self.port}")
        if not 0 <= self.grace_seconds < math.inf:
            raise ValueError(f"--grace must be a number of seconds from 0 on, not {self.grace_seconds}")
        self._check_models()
        if not self.has_keys and not self.insecure_no_auth and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached by others: give --api-key (or CELLAR_API_KEY_FILE), "
                "or --insecure-no-auth to serve anyone"
            )
        self.check_keys()
        for origin in self.origins:
            if not _origin.fullmatch(origin):
                raise ValueError(
                    f"--allowed-host {origin} is no origin: give scheme and host, as in https://chat.example.org, "
                    "without a path"
                )
        _check_media_hosts(self.media_hosts)
        if self.embedding_name in self.model_names:
            raise ValueError(
                f"--embedding-model {self.embedding_model} has the name of the model: "
                "give that another one with --served-model-name"
            )
        try:
            self.engine_config()
        except ConfigError as error:
            raise ValueError(f"--{error.setting.replace('_', '-')} {error.reason}") from error
        for name in self.adapters.keys() & {*self.model_names, self.embedding_name}:
            raise ValueError(f"--lora {name} has the name of a model: give the adapter another one")

    def _check_models(self) -> None:
        """Raise ValueError for settings of several models that cannot work."""
        if not 0 < self.load_timeout < math.inf:
            raise ValueError(f"--load-timeout must be a number of seconds, not {self.load_timeout}")
        if self.models_dir is not None and not Path(self.models_dir).expanduser().is_dir():
            raise ValueError(f"--models {self.models_dir} is no folder")

    def check_keys(self) -> None:
        """Raise ValueError for API keys that contradict each other or are missing in the key file, OSError."""
        self.read_keys().check()

    def read_keys(self) -> ConfiguredKeys:
        """The API keys of `keys` and of the key file, in one reading of the file.

        ValueError for a file without a key, OSError.
        """
        if not self.key_file:
            return ConfiguredKeys(self.keys, ())
        path = Path(self.key_file)
        entries = _read_entries(path) if path.suffix == TOML_SUFFIX else ()
        keys = tuple(entry.text for entry in entries if entry.text is not None) if entries else read_key_list(path)
        return ConfiguredKeys((*self.keys, *keys), entries)

    @property
    def all_keys(self) -> tuple[str, ...]:
        """The API keys, without those that the key file has as digests only; errors as of `read_keys`."""
        return self.read_keys().keys

    @property
    def key_entries(self) -> tuple[KeyEntry, ...]:
        """The keys of a key file in TOML, with their scopes; errors as of `read_keys`."""
        return self.read_keys().entries

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key; errors as of `read_keys`."""
        return any(self.read_keys())

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in requests, the main name first."""
        if names := tuple(name for name in self.served_names if name != ANY_NAME):
            return names
        return (BUNDLED_NAME if self.model is None else model_name(self.model),)

    @property
    def serves_any_name(self) -> bool:
        """Whether requests may have any model name."""
        return ANY_NAME in self.served_names

    @property
    def embedding_name(self) -> str | None:
        """The embedding model's name in requests, if there is one."""
        return model_name(self.embedding_model) if self.embedding_model else None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted values of the Host header, without ports, in lower case."""
        bound = f"[{self.host}]" if ":" in self.host else self.host
        named = (host for host in self.allowed_hosts if "://" not in host)
        return tuple(host.lower() for host in (*LOOPBACK_NAMES, bound, *named))

    @property
    def origins(self) -> tuple[str, ...]:
        """Accepted values of the Origin header, in lower case as browsers write them."""
        return tuple(host.lower() for host in self.allowed_hosts if "://" in host)

    def engine_config(self) -> EngineConfig:
        """The settings of the engine; ConfigError for a value that cannot work."""
        values = {option.name: getattr(self, option.name) for option in fields(EngineConfig)}
        # An empty text counts as not set, as an empty environment variable does.
        return EngineConfig(**{name: value for name, value in values.items() if value != ""})


def model_name(model: str) -> str:
    """The name in requests of a folder, a file or a model of the hub."""
    path = Path(model)
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else plain_name(model)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; names other than localhost may resolve to any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_disk_cache(folder: str | None) -> None:
    """Make the folder of the disk cache, private to its user, if there is to be one; ValueError if impossible."""
    try:
        if folder is not None:
            Path(folder).expanduser().mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--disk-cache {folder}: there can be no such folder: {error.strerror}") from error


def is_world_readable(path: Path) -> bool:
    """Whether every user of this machine can read a file, other than a secret of a container."""
    return bool(path.stat().st_mode & stat.S_IROTH) and not path.is_relative_to(CONTAINER_SECRETS)


def split_organisation(entry: str) -> tuple[str, str]:
    """Organisation and key of `organisation:key`; "" and the entry for any other entry."""
    organisation, _, key = entry.partition(":")
    return (organisation, key) if organisation and key else ("", entry)


def _check_media_hosts(hosts: tuple[str, ...]) -> None:
    for host in hosts:
        if not _media_host.fullmatch(host):
            raise ValueError(
                f"--allow-media-host {host} is no host name: give a name in lower case, as in images.example.org, or "
                ".example.org for all hosts below it"
            )


def read_key_list(path: Path) -> tuple[str, ...]:
    """The keys of a file; ValueError if there is none, so that an empty mounted secret does not open the server."""
    keys = split_keys(read_bounded(path))
    if not keys:
        raise ValueError(f"no API key in {path}")
    return keys


def read_bounded(path: Path) -> str:
    """The text of a key file; ValueError for one that is too long to be read again between requests."""
    with path.open("rb") as file:
        content = file.read(MAX_KEY_FILE_BYTES + 1)
    if len(content) > MAX_KEY_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_KEY_FILE_BYTES // 1024} KiB")
    return content.decode("utf-8")


def _read_entries(path: Path) -> tuple[KeyEntry, ...]:
    # Imported here: pydantic would delay the start of every command.
    from server.configuration.key_file import read_key_file

    return read_key_file(path)
