"""The access log: the numbers of each request, the name of its key, no contents."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest

from server.app import create_app
from server.configuration.logs import ExportFilter, configure_logging
from server.http.access_log import AccessRecord, RefusalLog
from tests.server.fakes import FakeEngine, ask, settings

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "secret words"}]}


def record(caplog: pytest.LogCaptureFixture, path: str, body: Any, key: str = "", **options: Any) -> logging.LogRecord:
    """The log record of one request."""
    app = create_app(FakeEngine(), settings(**options))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "cellar.http"):
        ask(app, "POST", path, json_body=body, headers={"authorization": f"Bearer {key}"} if key else {})
    [found] = [each for each in caplog.records if each.name == "cellar.http"]
    return found


def test_tokens_and_rate_of_a_generation(caplog: pytest.LogCaptureFixture) -> None:
    """Also of a stream; the text is in no line."""
    for stream in (False, True):
        caplog.clear()
        found = vars(record(caplog, CHAT, {**BODY, "stream": stream}))
        assert {"model": "fake", "generated_tokens": 3, "tokens_per_second": 24.0, "client": "127.0.0.1"} == {
            name: found[name] for name in ("model", "generated_tokens", "tokens_per_second", "client")
        }
        assert found["prompt_tokens"] > 0
        line = caplog.messages[0]
        assert f" POST {CHAT} 200 " in line
        assert line.endswith("generated_tokens=3 tokens_per_second=24.0")
        assert "secret" not in line


def test_a_long_method_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]
    with caplog.at_level(logging.DEBUG):
        answer = ask(app, "M" * 9000, "/" + "p" * 9000, headers={"user-agent": "a" * 9000, "host": "h" * 9000})

    assert answer.status == 421
    assert caplog.messages
    assert max(map(len, caplog.messages)) < 200


def test_choices_are_added(caplog: pytest.LogCaptureFixture) -> None:
    """Their prompt is one."""
    one = vars(record(caplog, CHAT, BODY))
    caplog.clear()
    two = vars(record(caplog, CHAT, {**BODY, "n": 2}))

    assert one["prompt_tokens"] == two["prompt_tokens"]
    assert 2 * one["generated_tokens"] == two["generated_tokens"]


def test_a_refused_request_has_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """Status and client are there."""
    found = vars(record(caplog, CHAT, {}))

    assert 400 == found["status"]
    assert "model" not in found
    assert "tokens" not in caplog.messages[0]


@pytest.mark.parametrize(
    ("keys", "key", "name"),
    [(("team:first", "second"), "first", "team"), ((), "", "")],
)
def test_the_key_has_a_name(caplog: pytest.LogCaptureFixture, keys: tuple[str, ...], key: str, name: str) -> None:
    """The organisation; without keys there is none."""
    assert name == vars(record(caplog, CHAT, BODY, key, keys=keys)).get("key", "")


def test_a_key_without_an_organisation_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A part of a digest stands for it."""
    found = vars(record(caplog, CHAT, BODY, "second-key", keys=("first-key", "second-key")))

    assert 8 == len(found["key"])
    assert "second-key" not in caplog.messages[0]


def test_json_lines_have_the_values_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--log-format json: one object a line."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    configure_logging("info", "json")
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]
    ask(app, "POST", CHAT, json_body=BODY, headers={"x-request-id": "mine"})

    [line] = [json.loads(text) for text in capsys.readouterr().err.splitlines() if "POST" in text]
    assert ("mine", 200, "POST", CHAT) == (line["request_id"], line["status"], line["method"], line["route"])
    assert ("info", "cellar.http") == (line["level"].lower(), line["logger"])
    assert 3 == line["generated_tokens"]
    assert line["time"]
    # Addresses of the hub are signed, and lines of batches are in the access log.
    assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)


def test_a_collector_that_is_gone_is_logged_once() -> None:
    """Each export fails with other numbers in its message."""
    export = ExportFilter()

    def passed(name: str, level: int) -> bool:
        return bool(export.filter(logging.LogRecord(name, level, "", 0, "failed", None, None)))

    exporter = "opentelemetry.exporter.otlp"
    assert [True, True, False, False] == [passed(exporter, level) for level in (30, 40, 30, 40)]
    assert all(passed("cellar.http", 30) for _ in range(2))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (logging.INFO, ["one /a client=x", "four /b client=x", "five /a client=y", "three /a client=x count=2"]),
        (
            logging.DEBUG,
            ["one /a client=x", "two /a client=x", "three /a client=x", "four /b client=x", "five /a client=y"],
        ),
    ],
)
def test_refusals_of_a_client_and_route_share_a_line(
    level: int, expected: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the time after the first one, whose line has no count; then the next has a line again."""
    monkeypatch.setattr("server.http.access_log.REFUSAL_LINE_SECONDS", 0.0)
    refusals = [("one", "/a", "x"), ("two", "/a", "x"), ("three", "/a", "x"), ("four", "/b", "x"), ("five", "/a", "y")]

    async def refuse() -> None:
        log = RefusalLog()
        for _ in range(2):
            for id, route, client in refusals:
                log.log(AccessRecord(id, "POST", client), route, 429)
            await asyncio.sleep(0.01)

    with caplog.at_level(level, "cellar.http"):
        asyncio.run(refuse())
    lines = [message for name, _, message in caplog.record_tuples if name == "cellar.http"]
    assert [re.sub(r" POST (\S+) 429 [\d.]+ms", r" \1", line) for line in lines] == expected * 2
