"""Authentication by API key. Every path needs a key unless it is listed as open: a new route is closed by default."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.configuration.key_file import KeyEntry
from server.configuration.key_file_watch import KeyFileWatch
from server.configuration.settings import Settings, split_organisation
from server.http.access_log import current
from server.http.errors import INVALID_API_KEY, ApiError, error_response
from server.http.key_limits import KeyLimitReached, KeyLimits
from server.http.scopes import check_scopes, is_limited, is_use
from server.metrics.key_usage import KeyUsage, RefusalReason

# Compared with scope["path"] literally: no prefix, no case folding, no URL rebuilt from the Host header
# (CVE-2026-48710).
OPEN_PATHS = frozenset({"/health", "/ready"})
# Lower-case names and values, as in ASGI.
RawHeaders = Iterable[tuple[bytes, bytes]]
# The key of the owner in a request's state.
OWNER_KEY = "owner"


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of an HTTP request.

    owner    the organisation of its key, or the key; "": the server has no keys, or the path is open
    request  the id of the HTTP request
    limits   of its key
    batch    whether it is a line of a batch, which other requests overtake
    key      the name of its key in the log and in metrics; "": the server has no keys, or the path is open
    admin    whether its key has the scope `admin`
    usage    counts what the key uses
    models   names of the models that its key may use; None: all
    """

    owner: str = ""
    request: str = ""
    limits: KeyLimits | None = None
    batch: bool = False
    key: str = ""
    admin: bool = True
    usage: KeyUsage | None = None
    models: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        """Whether its key may use a model, by a name of /v1/models."""
        return self.models is None or model in self.models

    def charge(self, *, prompt_tokens: int = 0, generated_tokens: int = 0) -> None:
        """Count tokens of a prompt or an answer."""
        if self.limits is not None:
            self.limits.charge(prompt_tokens + generated_tokens)
        if self.usage is not None:
            self.usage.count_tokens(self.key, prompt_tokens, generated_tokens)

    def count_refusal(self, reason: RefusalReason) -> None:
        """Count a refused request."""
        if self.usage is not None:
            self.usage.count_refusal(self.key, reason)


_ANONYMOUS = Caller()
# Tasks and worker threads of a request inherit it, so it reaches the engine from every route.
_current_caller: ContextVar[Caller] = ContextVar("caller", default=_ANONYMOUS)


@dataclass(frozen=True, slots=True)
class AcceptedKey:
    """A valid key: its owner, and its entry and limits of a key file in TOML, if any.

    models  names of the models that it may use; None: all
    """

    owner: str = ""
    entry: KeyEntry | None = None
    limits: KeyLimits | None = None
    models: frozenset[str] | None = None


# The key of the requests that this process sends to its own app. No connection's context has it.
_acting_key: ContextVar[AcceptedKey | None] = ContextVar("acting_key", default=None)


class ApiKeys:
    """The keys of a server, and their owners.

    keys     `key`, or `organisation:key`; keys of one organisation are one owner
    entries  those of `keys` with scopes and limits, and keys of which only the digest is known; other keys have all
             scopes and no limit
    watch    replaces the keys when the key file has changed; a key that stays keeps what it has used of its limits
    """

    def __init__(
        self, keys: Iterable[str], entries: Iterable[KeyEntry] = (), watch: KeyFileWatch | None = None
    ) -> None:
        self._watch = watch
        self._rules: dict[bytes, tuple[KeyEntry, KeyLimits]] = {}
        self._organisations: dict[str, str] = {}
        self._set(tuple(keys), entries)

    @classmethod
    def of(cls, settings: Settings) -> ApiKeys:
        """The keys of the settings, which follow the changes of their key file; errors as of `Settings.read_keys`."""
        # Before the file is read, so that no change is missed.
        watch = KeyFileWatch(settings)
        return cls(*settings.read_keys(), watch)

    def owner(self, headers: RawHeaders) -> str | None:
        """The owner of the key in the headers, "" on a server without keys; None: there is no valid key."""
        key = self.find(headers)
        return None if key is None else key.owner

    def find(self, headers: RawHeaders) -> AcceptedKey | None:
        """The key in the headers, without an owner on a server without keys; None: there is no valid key."""
        if self._watch is not None and (changed := self._watch.read_if_changed()) is not None:
            self._set(*changed)
        if not self._digests:
            return AcceptedKey()
        presented = {*_credentials(headers)}
        # A proxy may read the other one of two credentials. The same one twice is sent by Continue.
        return self._find(*presented) if len(presented) == 1 else None

    def label(self, owner: str) -> str:
        """The owner in the log: an organisation by its name; else a digest of the key, shortened."""
        return self._organisations.get(owner, owner[:8])

    def _set(self, keys: Sequence[str], entries: Iterable[KeyEntry]) -> None:
        rules = {}
        for entry in entries:
            earlier = self._rules.get(entry.digest)
            limits = KeyLimits(entry) if earlier is None else earlier[1]
            limits.change(entry)
            known = [] if entry.text is None else [digest for digest, _ in _owners_of([entry.text])]
            rules.update(dict.fromkeys([entry.digest, *known], (entry, limits)))
        self._rules = rules
        self._owners = {digest: _owner_of_organisation(entry) for digest, (entry, _) in rules.items()}
        self._owners.update(_owners_of(keys))
        # With those of removed keys: their requests may still run.
        names = {*(split_organisation(key)[0] for key in keys), *(entry.organisation for entry, _ in rules.values())}
        self._organisations |= {_organisation_id(name): name for name in names if name}
        self._digests = list(self._owners)

    def _find(self, key: bytes) -> AcceptedKey | None:
        # Digests of equal length, all compared: the time is independent of the keys.
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            return None
        # The owner of a hashed key is the same as with the key in clear, and known at its first request.
        owner = self._owners[digest] or _key_owner(key)
        self._owners[digest] = owner
        if digest not in self._rules:
            return AcceptedKey(owner)
        entry, limits = self._rules[digest]
        return AcceptedKey(owner, entry, limits, entry.models)


class AuthMiddleware:
    """ASGI middleware: answers 401 to requests without a valid key. BoundaryMiddleware answers its ApiError, a 403 for
    requests outside the scopes of their key.

    Without keys it accepts every request.

    open_paths  that need no key, besides OPEN_PATHS
    usage       counts the requests, tokens and refusals of keys
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str] = (), usage: KeyUsage | None = None
    ) -> None:
        self.app, self._keys, self._open_paths = app, keys, OPEN_PATHS.union(open_paths)
        self._usage = KeyUsage() if usage is None else usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its owner, or answer 401; ApiError outside the scopes of its key."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        acting = _acting_key.get()
        key = self._keys.find(scope["headers"]) if acting is None else acting
        if key is None and scope["path"] in self._open_paths:
            key = AcceptedKey()
        if key is not None:
            owner = key.owner
            state = scope.setdefault("state", {})
            state[OWNER_KEY] = owner
            label = self._keys.label(owner)
            if (record := current()) is not None:
                record.key = label
            client = Caller(
                owner,
                str(state.get("request_id", "")),
                key.limits,
                batch=acting is not None,
                key=label,
                admin=key.entry is None or "admin" in key.entry.scopes,
                usage=self._usage if owner else None,
                models=key.models,
            )
            self._check(scope, key, client)
            token = _current_caller.set(client)
            try:
                if key.limits is None:
                    await self.app(scope, receive, send)
                else:
                    await self._serve_limited(key.limits, scope, receive, send)
            finally:
                _current_caller.reset(token)
            return
        has_key = any(_credentials(scope["headers"]))
        message = "Incorrect API key provided." if has_key else "You didn't provide an API key."
        error = ApiError(INVALID_API_KEY, message, headers={"WWW-Authenticate": "Bearer"})
        await error_response(error, scope["path"])(scope, receive, send)

    def _check(self, scope: Scope, key: AcceptedKey, client: Caller) -> None:
        if client.usage is not None and is_use(scope):
            client.usage.count_request(client.key)
        try:
            if key.entry is not None:
                check_scopes(scope, key.entry.scopes)
        except ApiError:
            client.count_refusal("scope_required")
            raise

    async def _serve_limited(self, limits: KeyLimits, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of a key with limits, whose response tells what is left of them."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in limits.headers().items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        if not is_limited(scope):
            await self.app(scope, receive, send_with_headers)
            return
        try:
            with limits.admitted():
                await self.app(scope, receive, send_with_headers)
        except KeyLimitReached as error:
            caller().count_refusal("key_limit_reached")
            await error_response(error, scope["path"])(scope, receive, send_with_headers)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _owners_of(keys: Sequence[str]) -> Iterator[tuple[bytes, str]]:
    """Digest and owner of each key."""
    for entry in keys:
        organisation, key = split_organisation(entry)
        if organisation:
            owner = _organisation_id(organisation)
            # The whole entry is a key as well, since a key may contain a colon.
            yield from ((_digest(text.encode()), owner) for text in (entry, key))
        else:
            yield _digest(key.encode()), _key_owner(key.encode())


def first_owner(keys: Sequence[str], entries: Iterable[KeyEntry] = ()) -> str:
    """The owner of the first key in clear, else the first organisation; "" if there is none.

    It gets what the store has without an owner.
    """
    owners = [*(owner for _, owner in _owners_of(keys)), *filter(None, map(_owner_of_organisation, entries))]
    return next(iter(owners), "")


def count_owners(keys: Sequence[str], entries: Iterable[KeyEntry] = ()) -> int:
    """The number of owners of these keys."""
    hashed = {_owner_of_organisation(entry) or entry.digest.hex() for entry in entries if entry.key is None}
    return len(hashed.union(owner for _, owner in _owners_of(keys)))


def _owner_of_organisation(entry: KeyEntry) -> str:
    """The owner of a key in an organisation; "" if it depends on the key."""
    return _organisation_id(entry.organisation) if entry.organisation else ""


def _key_owner(key: bytes) -> str:
    return _owner_id(b"owner " + key)


def _organisation_id(name: str) -> str:
    return _owner_id(b"organisation " + name.encode())


def _owner_id(owner: bytes) -> str:
    # A prefix of the digest: it is stored with the owner's data.
    return _digest(owner).hex()[:16]


def _credentials(headers: RawHeaders) -> Iterator[bytes]:
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            yield key.strip() if scheme.lower() == b"bearer" else b""


@contextmanager
def acting_for(owner: str, models: frozenset[str] | None = None) -> Iterator[None]:
    """Requests to the app in this block need no key and have this owner: the lines of a batch that it created.

    models  names of the models that they may use; None: all
    """
    token = _acting_key.set(AcceptedKey(owner, models=models))
    try:
        yield
    finally:
        _acting_key.reset(token)


def owner(request: HTTPConnection) -> str:
    """The owner of a request: its organisation, or its key; "" on a server without keys."""
    return str(getattr(request.state, OWNER_KEY, ""))


def caller() -> Caller:
    """The client of the current HTTP request."""
    return _current_caller.get()
