"""`cellar bench` against a server with known counts. No time is asserted, only counts, order and shapes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.client import StreamedAnswer
from bench.launch import started
from bench.options import BenchOptions
from bench.plan import plan_of
from bench.prompts import TokenIdPrompts, TokenRatio, WordPrompts, fit_ratio
from bench.samples import LoadRun, Sample, outcomes, percentile
from bench.target import BenchError
from server.cli import make_app
from server.configuration.options import serve_arguments
from server.configuration.settings import Settings
from tests.server.peer import MEASURED, Peer, running_peer


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A running server of its own for each test."""
    with running_peer() as peer:
        yield peer


def bench(*arguments: str) -> int:
    """Run the command and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        make_app()(["bench", *arguments])
    return int(str(ended.value.code))


def measure(
    peer: Peer, out: Path, *arguments: str, only: str = "throughput", rounds: int = 1
) -> tuple[int, dict[str, Any]]:
    """Measure `peer` and return the exit status and the written JSON."""
    small = ("--max-tokens", str(MEASURED), "--prompt-tokens", "64", "--seed", "7")
    what = ("--base-url", peer.url, "--only", only, "--rounds", str(rounds), "--out", str(out))
    status = bench(*what, *small, *arguments)
    return status, json.loads((out / "bench.json").read_text())


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        (range(1, 101), 0.5, 50),
        (range(1, 101), 0.99, 99),
        (range(1, 11), 0.99, 10),
    ],
)
def test_a_percentile_is_a_value_that_was_seen(values: Any, share: float, expected: float | None) -> None:
    """It is the smallest value that this share of all values do not exceed."""
    assert expected == percentile(values, share)


def test_only_whole_answers_count() -> None:
    """Tokens of an answer that broke off count nowhere, its outcome does, and what never ended is lost."""
    whole = Sample(outcome="ok", sent=0.0, arrivals=(1.0, 1.5, 2.0), finished=2.5, completion_tokens=5)
    broken = Sample(outcome="cut", sent=0.0, arrivals=(9.0, 99.0), finished=99.0, completion_tokens=2)
    run = LoadRun(planned=4, seconds=2.5, samples=(whole, broken, whole))

    assert {"ok": 2, "cut": 1, "lost": 1} == outcomes([run])
    assert 4.0 == run.tokens_second
    assert (1.0, [0.5, 0.5], 0.25) == (whole.first_token_seconds, whole.gaps, whole.seconds_per_token)


def test_the_first_text_is_not_the_first_event() -> None:
    """An event that carries only a role, or nothing, is no arrival."""
    answer = StreamedAnswer()
    answer.parse_line(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', 0.1)
    answer.parse_line(b": ping", 0.2)
    answer.parse_line(b'data: {"choices":[{"delta":{"content":"a"}}]}\r', 0.3)
    answer.parse_line(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}', 0.4)
    answer.parse_line(b"data: [DONE]", 0.5)

    assert ([0.3], "a", {"completion_tokens": 1}, "ok") == (answer.arrivals, answer.text, answer.usage, answer.outcome)


def test_a_finish_reason_ends_an_answer_and_an_error_is_never_undone() -> None:
    """Some servers never send [DONE], and some send it behind an error."""
    answer, failed = StreamedAnswer(), StreamedAnswer()
    answer.parse_line(b'data: {"choices":[{"delta":{"content":"a"}}]}', 0.1)

    assert "cut" == answer.outcome

    answer.parse_line(b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}', 0.2)
    failed.parse_line(b'data: {"error": "it broke"}', 0.1)
    failed.parse_line(b"data: [DONE]", 0.2)

    assert ("ok", "error event") == (answer.outcome, failed.outcome)


def test_prompts_share_what_they_should() -> None:
    """Lone prompts have nothing in common, users of one key their system prompt, in words and in ids."""
    words, ids = WordPrompts(TokenRatio(template_tokens=7.0, word=2.0), seed=1), TokenIdPrompts(seed=1)
    first, second = (words.shared_system(207, 20, "key", number=number) for number in range(2))
    one, other = (ids.shared_system(64, 8, "key", number=number) for number in range(2))

    assert (first[0], 100, 10) == (second[0], len(first[0][1].split()), len(first[1][1].split()))
    assert first[1] != second[1]
    assert (one[:64], 72) == (other[:64], len(one))
    assert one[64:] != other[64:]
    assert 50 == len({tuple(ids.unshared(4, number)) for number in range(50)})
    assert words.unshared(107, "a") == words.unshared(107, "a") != words.unshared(107, "b")


def test_two_counts_give_the_length_of_a_prompt() -> None:
    """The line through two counted prompts gives the tokens of the template and of a word."""
    assert TokenRatio(template_tokens=7.0, word=2.0) == fit_ratio((40, 87), (160, 327))


@pytest.mark.slow
def test_all_scenarios_are_measured(peer: Peer, tmp_path: Path) -> None:
    """Every cell has its figures of all rounds, every request its sample, every scenario its plot."""
    peer.context = 800
    scenarios = "latency,throughput,reuse,long"
    status, content = measure(peer, tmp_path, "--lengths", "32,700,4096", "--streams", "1,3", only=scenarios, rounds=2)
    cells = {cell["label"]: cell for cell in content["cells"]}

    assert (0, ["latency of 4096 tokens does not fit a context of 800"]) == (status, content["left_out"])
    assert [
        *("prompt of 32", "prompt of 700", "1 stream", "3 streams"),
        *("second turn of 384", "users 2 to 64 of 384", "25 % of 800", "50 % of 800", "90 % of 800"),
    ] == list(cells)
    for cell in cells.values():
        assert {"ok"} == cell["outcomes"].keys()
        assert {2} == {len(figure["rounds"]) for figure in cell["figures"].values()}
        assert all(value > 0 for figure in cell["figures"].values() for value in figure["rounds"])
    assert {"ok": 128} == cells["users 2 to 64 of 384"]["outcomes"]
    assert 200 == pytest.approx(cells["25 % of 800"]["runs"][0]["samples"][0]["prompt_tokens"], abs=1)
    for scenario in ("latency", "throughput", "reuse", "long"):
        assert (tmp_path / f"{scenario}.png").read_bytes().startswith(b"\x89PNG")


def test_a_crowd_is_measured_whole(peer: Peer, tmp_path: Path) -> None:
    """All requests have the tokens that the server counted, and no more are open at once than streams."""
    status, content = measure(peer, tmp_path, "--streams", "4", "--requests", "12")
    samples = content["cells"][0]["runs"][0]["samples"]

    assert (0, 12) == (status, len(samples))
    assert {(5, 10, 3, "usage")} == {
        (len(one["arrivals"]), one["completion_tokens"], one["cached_tokens"], one["counted_by"]) for one in samples
    }
    assert all(64 == pytest.approx(one["prompt_tokens"], abs=1) for one in samples)
    assert (4, 12) == (peer.most_running, len(set(peer.prompts)))


def test_a_second_turn_has_the_answer_of_the_first(peer: Peer, tmp_path: Path) -> None:
    """The conversation goes on with what the server itself said."""
    measure(peer, tmp_path, only="reuse")
    turns = [body["messages"] for body in peer.bodies if len(body["messages"]) == 3]
    firsts = [body["messages"] for body in peer.bodies if body["messages"][0] == turns[0][0]]

    assert [1, 3] == [len(messages) for messages in firsts]
    assert ("assistant", "two tokens" * 5) == (turns[0][1]["role"], turns[0][1]["content"])


def test_the_file_has_environment_and_options(peer: Peer, tmp_path: Path) -> None:
    """Processor, version, servers and options, without the API key."""
    _, content = measure(peer, tmp_path, "--streams", "1", "--requests", "1", "--api-key", "very-secret-key")

    assert {"cpu", "cores", "threads", "usable_threads", "load_average", "cellar"} <= content["environment"].keys()
    assert ("good", 7) == (content["servers"][0]["model"], content["options"]["seed"])
    assert {"Bearer very-secret-key"} == peer.keys
    assert "very-secret-key" not in (tmp_path / "bench.json").read_text()


def test_arrivals_can_be_given_instead_of_streams(peer: Peer, tmp_path: Path) -> None:
    """An open loop sends all its requests, and each has an outcome."""
    status, content = measure(peer, tmp_path, "--rate", "200", "--requests", "9")

    assert (0, ["200 a second"], {"ok": 9}) == (
        status,
        [cell["label"] for cell in content["cells"]],
        content["cells"][0]["outcomes"],
    )


def test_what_is_refused_is_counted(peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused request is an outcome, the exit status says that not all was well, and the table says why."""
    peer.model = "busy"
    status, content = measure(peer, tmp_path, "--streams", "2", "--requests", "8")

    assert (1, {"ok": 6, "http 429": 2}) == (status, content["cells"][0]["outcomes"])
    shown = capsys.readouterr().out
    assert "2 http 429, 6 ok" in shown
    assert '2 streams: http 429: {"error":{"message":"full"}}' in shown


def test_without_usage_pieces_are_counted(peer: Peer, tmp_path: Path) -> None:
    """The fallback counts what arrived, and the file says so."""
    peer.model = "plain"
    status, content = measure(peer, tmp_path, "--streams", "2", "--requests", "4")
    samples = content["cells"][0]["runs"][0]["samples"]

    assert (0, {("chunks", 5)}) == (status, {(one["counted_by"], one["completion_tokens"]) for one in samples})


def test_a_field_that_is_refused_is_not_sent_again(peer: Peer, tmp_path: Path) -> None:
    """ignore_eos is not OpenAI's: a server that refuses it is asked without."""
    measure(peer, tmp_path, "--streams", "1", "--requests", "1")
    peer.model = "strict"
    status, _ = measure(peer, tmp_path, "--streams", "1", "--requests", "1")

    assert 0 == status
    assert [("good", True), ("strict", False)] == sorted(
        {(body["model"], "ignore_eos" in body) for body in peer.bodies}
    )


def test_extra_fields_are_laid_over_the_body(peer: Peer, tmp_path: Path) -> None:
    """A field of --extra is sent, and null takes one out."""
    extra = json.dumps({"top_k": 1, "stream_options": None})
    measure(peer, tmp_path, "--streams", "1", "--requests", "1", "--extra", extra)

    assert {1} == {body["top_k"] for body in peer.bodies}
    assert not [body for body in peer.bodies if "stream_options" in body]


def test_ids_go_to_completions(peer: Peer, tmp_path: Path) -> None:
    """With --prompts ids nothing is a chat, and lengths are exact."""
    status, _ = measure(peer, tmp_path, "--prompts", "ids", "--streams", "2", "--requests", "4")

    assert (0, []) == (status, peer.bodies)
    assert [64] * 4 == [len(body["prompt"]) for body in peer.completions if body["max_tokens"] == MEASURED]


@pytest.mark.parametrize(("model", "outcome"), [("cut", "cut"), ("broken", "error event")])
def test_a_server_that_never_ends_an_answer_is_refused(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, outcome: str
) -> None:
    """The first probe reports the error, before any measurement."""
    peer.model = model

    assert 2 == bench("--base-url", peer.url, "--out", str(tmp_path))
    assert f"does not answer for '{model}': {outcome}" in capsys.readouterr().err


def test_an_url_without_v1_is_an_error(peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The address alone is no OpenAI API."""
    assert 2 == bench("--base-url", peer.url.removesuffix("/v1"), "--out", str(tmp_path))
    assert "/models is answered with 404: URLs of OpenAI's API end with /v1" in capsys.readouterr().err


def test_a_name_makes_the_list_of_models_needless(peer: Peer, tmp_path: Path) -> None:
    """Not every server lists its models; with a name given it can be measured all the same."""
    peer.model = "nameless"

    assert 2 == bench("--base-url", peer.url, "--out", str(tmp_path))
    assert 0 == measure(peer, tmp_path, "nameless", "--streams", "1", "--requests", "1")[0]


def test_servers_take_turns(peer: Peer, tmp_path: Path) -> None:
    """Two servers get the same prompts, cell by cell, and the first one changes from round to round."""
    names = ("--base-url", f"second={peer.url}", "--served-model-name", "good", "--served-model-name", "other")
    _, content = measure(peer, tmp_path, *names, "--streams", "1,2", "--requests", "2", rounds=2)
    order = [body["model"] for body in peer.bodies if body["max_tokens"] == MEASURED]

    assert (["good", "good", "other", "other"] * 2, ["other", "other", "good", "good"] * 2) == (order[:8], order[8:])
    assert peer.prompts[:2] == peer.prompts[2:4] != peer.prompts[8:10]
    assert [2, 2, 2, 2] == [len(cell["runs"]) for cell in content["cells"]]


def test_without_matplotlib_there_are_tables(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The missing package is named once, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _ = measure(peer, tmp_path, "--streams", "1", "--requests", "1")

    assert (0, []) == (status, list(tmp_path.glob("*.png")))
    assert "pip install '.[bench]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--base-url", "127.0.0.1:8000"], "must look like"),
        (["--base-url", "http://example.test/v1"], "--allow-remote"),
        (["--base-url", "http://127.0.0.1:9/v1"], "does not answer with a list of models"),
        (["--base-url", "http://127.0.0.1:9/v1", "--served-model-name", "a", "--served-model-name", "b"], "once"),
        (["--streams", "0"], "above 0"),
        (["--streams", "2,2"], "different numbers"),
        (["--streams", "many"], "numbers separated by commas"),
        (["--streams", "1.5"], "whole numbers"),
        (["--rate", "nan"], "above 0"),
        (["--requests", "4", "--streams", "8"], "cannot fill 8 streams"),
        (["--only", "throughput,latency", "--requests", "8"], "cannot fill 32 streams"),
        (["--requests", "0"], "--requests must be more than 0"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be more than 0"),
        (["--rounds", "0"], "--rounds must be more than 0"),
        (["--only", "speed"], "--only must be some of latency, throughput, reuse, long"),
        (["--extra", "[]"], "JSON object"),
        (["--extra", "{"], "not JSON"),
    ],
)
def test_nonsense_is_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be measured ends with status 2 and a sentence that says why, before anything is sent or started."""
    assert 2 == bench(*arguments, "--out", str(tmp_path))
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "server.log").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    (tmp_path / "file").write_text("")

    assert 2 == bench("--out", str(tmp_path / "file" / "folder"))
    assert "cannot be made" in capsys.readouterr().err


def test_a_context_that_holds_nothing_is_refused(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no cell fits, nothing is measured, and every reason is told."""
    peer.context = 40

    assert 2 == bench("--base-url", peer.url, "--only", "latency,reuse", "--out", str(tmp_path))
    assert "latency of 32 tokens does not fit a context of 40; latency of 512" in capsys.readouterr().err


def test_the_started_server_gets_the_same_options() -> None:
    """All but the address and the keys, which every process list would show."""
    given = Settings(quantize="int8", slots=3, served_names=("a", "b"), lenient=True, keys=("secret",), port=9)

    assert [
        *("--quantize", "int8", "--slots", "3", "--served-model-name", "a", "--served-model-name", "b", "--lenient")
    ] == list(serve_arguments(given))


def test_a_started_server_ends_with_its_block(tmp_path: Path) -> None:
    """It gets a free port, is yielded once it answers, and is gone behind the block."""
    command = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "{port}")
    with started(command, ready="/", log=tmp_path / "log") as url:
        address = url.removesuffix("/v1")

        assert 200 == httpx.get(address, trust_env=False).status_code

    with pytest.raises(httpx.ConnectError):
        httpx.get(address, trust_env=False)


def test_a_started_server_does_not_outlive_a_signal(tmp_path: Path) -> None:
    """SIGTERM ends the block like Ctrl-C, and its handler is restored."""
    command = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "{port}")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), started(command, ready="/", log=tmp_path / "log"):
        signal.raise_signal(signal.SIGTERM)

    assert before == signal.getsignal(signal.SIGTERM)


def test_a_failed_start_has_its_reason(tmp_path: Path) -> None:
    """The end of its own output is in the message, and a program that is not there is named."""
    with (
        pytest.raises(BenchError, match="no such model"),
        started((sys.executable, "-c", "raise SystemExit('no such model')"), ready="/", log=tmp_path / "log"),
    ):
        pass
    with (
        pytest.raises(BenchError, match="nowhere cannot be started"),
        started((str(tmp_path / "nowhere"),), ready="/", log=tmp_path / "log"),
    ):
        pass


@pytest.mark.slow
def test_the_bundled_model_is_started_and_measured(tmp_path: Path) -> None:
    """The whole command, with a real server that has a key and an option."""
    few = ("--only", "throughput,reuse", "--streams", "2", "--rounds", "1", "--max-tokens", "8")
    status = bench(*few, "--threads", "1", "--slots", "2", "--api-key", "key", "--out", str(tmp_path))
    cells = json.loads((tmp_path / "bench.json").read_text())["cells"]

    assert (0, 3) == (status, len(cells))
    assert {8} == {one["completion_tokens"] for one in cells[0]["runs"][0]["samples"]}
    assert all(one["cached_tokens"] > 1000 for one in cells[2]["runs"][1]["samples"])


@pytest.mark.parametrize(
    ("options", "repeats"),
    [
        ({"only": "latency", "requests": 8}, 8),
        ({"only": "latency"}, 3),
        ({"only": "latency,reuse", "requests": 1}, 1),
        ({"only": "latency,throughput", "streams": "4", "requests": 8}, 3),
    ],
)
def test_requests_count_for_lone_streams_where_there_are_no_others(options: dict[str, Any], repeats: int) -> None:
    """Without throughput no number of streams has to be filled."""
    assert repeats == plan_of(BenchOptions(**options)).repeats
