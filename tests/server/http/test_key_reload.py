"""Keys of a changed key file, while the server runs."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from server.configuration.key_file import KeyEntry
from server.configuration.key_file_watch import KeyFileWatch
from server.configuration.settings import MAX_KEY_FILE_BYTES
from server.http.auth import AcceptedKey, ApiKeys, count_owners, first_owner
from tests.server.fakes import FakeEngine, ask, settings
from tests.server.http.test_key_limits import Clock, admit


class WatchedKeys:
    """A key file and the keys of a server that has it."""

    def __init__(self, path: Path, text: str, **values: Any) -> None:
        self.path, self.clock = path, Clock()
        path.write_text(text)
        configured = settings(key_file=str(path), **values)
        watch = KeyFileWatch(configured, self.clock)
        self.keys = ApiKeys(configured.all_keys, configured.key_entries, watch)

    def write(self, text: str) -> None:
        """Replace the file, as editors and mounted secrets do, and let a second pass."""
        replacement = self.path.with_name("next")
        replacement.write_text(text)
        os.replace(replacement, self.path)
        self.clock.now += 1

    def find(self, key: str) -> AcceptedKey | None:
        return self.keys.find([(b"x-api-key", key.encode())])

    def valid(self, *keys: str) -> list[str]:
        return [key for key in keys if self.find(key) is not None]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("keys", "a,wines:b", "wines:b\nc"),
        (
            "keys.toml",
            '[[key]]\nkey = "a"\n[[key]]\nkey = "b"\norganisation = "wines"',
            '[[key]]\nkey = "b"\norganisation = "wines"\n[[key]]\nkey = "c"',
        ),
    ],
)
def test_a_changed_file_adds_and_removes_keys_but_none_of_the_option(
    tmp_path: Path, name: str, before: str, after: str
) -> None:
    watched = WatchedKeys(tmp_path / name, before, keys=("option",))
    owner = watched.find("b")

    assert watched.valid("a", "b", "c", "option", "wines:b") == ["a", "b", "option", "wines:b"]
    watched.write(after)
    assert watched.valid("a", "b", "c", "option", "wines:b") == ["b", "c", "option", "wines:b"]
    assert owner is not None
    assert watched.keys.owner([(b"x-api-key", b"b")]) == owner.owner


def test_the_file_is_looked_at_once_a_second(tmp_path: Path) -> None:
    watched = WatchedKeys(tmp_path / "keys", "a")
    watched.write("b")
    watched.clock.now -= 0.5

    assert watched.valid("a", "b") == ["a"]
    watched.clock.now += 0.5
    assert watched.valid("a", "b") == ["b"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret",
        '[[key]]\nkey = "secret"\nscope = 1',
        '[[key]]\nkey = "option"',
        '[[key]]\nkey = "secret"\n#' + "x" * MAX_KEY_FILE_BYTES,
    ],
)
def test_an_invalid_file_keeps_the_keys_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Also one that is valid alone, but not beside the keys of the option."""
    watched = WatchedKeys(tmp_path / "keys.toml", '[[key]]\nkey = "a"', keys=("wines:option",))

    with caplog.at_level(logging.INFO, "cellar.keys"):
        watched.write(text)
        assert watched.valid("a", "secret") == ["a"]
        watched.clock.now += 5
        assert watched.valid("a", "secret") == ["a"]

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "secret" not in caplog.text
    watched.write('[[key]]\nkey = "b"')
    assert watched.valid("a", "b") == ["b"]


def test_a_file_that_is_away_keeps_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = WatchedKeys(tmp_path / "keys", "a")
    watched.path.unlink()
    watched.clock.now += 1

    assert watched.valid("a") == ["a"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    watched.write("b")
    assert watched.valid("a", "b") == ["b"]


def test_what_a_key_has_used_still_counts_after_a_change(tmp_path: Path) -> None:
    entry = '[[key]]\nkey = "a"\norganisation = "{}"\nrequests_per_minute = {}\nstreams = {}'
    watched = WatchedKeys(tmp_path / "keys.toml", entry.format("wines", 2, 3))
    before = watched.find("a")
    assert before is not None
    assert before.limits is not None

    with before.limits.admitted():
        watched.write(entry.format("beers", 60, 1))
        after = watched.find("a")
        assert after is not None
        assert after.limits is not None
        assert admit(after.limits) == "1"
    assert after.owner != before.owner
    assert after.limits.headers()["x-ratelimit-remaining-requests"] == "1"
    assert admit(after.limits) == ""


def test_a_key_keeps_owner_and_limits_when_its_digest_replaces_it(tmp_path: Path) -> None:
    rest = "requests_per_minute = 9\nscopes = ['use']\n"
    wines = 'organisation = "wines"\n'
    digests = [hashlib.sha256(key).hexdigest().upper() for key in (b"a", b"b")]
    clear, hashed = (
        f"[[key]]\n{first}\n{rest}[[key]]\n{second}\n{wines}"
        for first, second in (('key = "a"', 'key = "b"'), [f'sha256 = "{digest}"' for digest in digests])
    )
    watched = WatchedKeys(tmp_path / "keys.toml", clear)
    before = [watched.find(key) for key in ("a", "b")]
    watched.write(hashed)
    after = [watched.find(key) for key in ("a", "b")]

    assert None not in before
    assert [key and key.owner for key in after] == [key and key.owner for key in before]
    assert [key and key.limits for key in after] == [key and key.limits for key in before]
    assert [key and key.entry and len(key.entry.scopes) for key in after] == [1, 2]
    assert watched.valid(*digests, *(digest.lower() for digest in digests), "", "c") == []
    assert watched.keys.label(after[1].owner if after[1] else "") == "wines"


def test_a_file_of_digests_closes_the_server(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nsha256 = "{hashlib.sha256(b"a").hexdigest()}"')
    configured = settings(key_file=str(path), host="0.0.0.0")
    app = create_app(FakeEngine(), configured)  # type: ignore[arg-type]

    assert (configured.all_keys, configured.has_keys) == ((), True)
    assert count_owners(configured.all_keys, configured.key_entries) == 1
    assert [ask(app, "GET", "/v1/models", headers=headers).status for headers in ({}, {"x-api-key": "a"})] == [401, 200]


def test_the_first_owner_is_known_of_keys_in_clear_and_of_organisations() -> None:
    digest = hashlib.sha256(b"a").hexdigest()
    alone, wines = KeyEntry(sha256=digest), KeyEntry(sha256=digest, organisation="wines")

    assert first_owner([], [alone]) == ""
    assert first_owner([], [alone, wines]) == first_owner(["wines:b"])
    assert first_owner(["c"], [wines]) == first_owner(["c"])


def test_one_key_in_two_organisations_is_refused_also_as_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nsha256 = "{hashlib.sha256(b"a").hexdigest()}"\norganisation = "wines"')

    with pytest.raises(ValueError, match="a key of beers and wines twice"):
        settings(key_file=str(path), keys=("beers:a",)).check()
