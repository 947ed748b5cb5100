"""benchmarks/serve.py against a server whose counts are known. No time is asserted, only counts and shapes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import Answer
from benchmarks.prompts import Length, Prompts, length
from benchmarks.samples import Run, Sample, Summary, percentile, summarize
from benchmarks.serve import main
from tests.benchmarks.conftest import Peer


def bench(peer: Peer, out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Measure `peer` and return the exit status and the written JSON."""
    common = ["--base-url", peer.url, "--max-tokens", "16", "--prompt-tokens", "64", "--seed", "7", "--out", str(out)]
    status = main([*common, *arguments])
    return status, json.loads((out / "serve.json").read_text())


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


def test_a_summary_counts_whole_answers_only() -> None:
    """Tokens and times of an answer that broke off count nowhere, its outcome does, and what never ended is lost."""
    whole = Sample("ok", 0.0, (1.0, 1.5, 2.0), 2.5, prompt_tokens=9, completion_tokens=5, counted_by="usage")
    broken = Sample("cut", 0.0, (9.0, 99.0), 99.0, completion_tokens=2)

    summary = summarize([Run(planned=4, seconds=2.5, samples=(whole, broken, whole))])

    assert {"ok": 2, "cut": 1} == summary.outcomes
    assert 1 == summary.lost
    assert 10 == summary.completion_tokens
    assert 4.0 == summary.tokens_second
    assert (1.0, 0.5, 0.25, 2.5) == (summary.ttft_p99, summary.itl_p99, summary.tpot_p50, summary.latency_p50)


def test_the_runs_of_a_level_add_up() -> None:
    """Throughput is all tokens over the time of all runs, not a mean of rates."""
    sample = Sample("ok", 0.0, (0.1,), 0.2, completion_tokens=6)

    summary = summarize([Run(1, 1.0, (sample,)), Run(1, 5.0, (sample,))])

    assert 2.0 == summary.tokens_second


def test_the_first_text_is_not_the_first_event() -> None:
    """An event that carries only a role, or nothing, is no arrival."""
    answer = Answer()
    answer.take(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}', 0.1)
    answer.take(b": ping", 0.2)
    answer.take(b'data: {"choices":[{"delta":{"content":"a"}}]}\r', 0.3)
    answer.take(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}', 0.4)
    answer.take(b"data: [DONE]", 0.5)

    assert [0.3] == answer.arrivals
    assert {"completion_tokens": 1} == answer.usage
    assert "ok" == answer.outcome


def test_a_finish_reason_ends_an_answer() -> None:
    """Some servers never send [DONE]; an answer that said why it ended is whole without it."""
    answer = Answer()
    answer.take(b'data: {"choices":[{"delta":{"content":"a"}}]}', 0.1)

    assert "cut" == answer.outcome

    answer.take(b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}', 0.2)

    assert "ok" == answer.outcome


def test_prompts_differ_but_for_the_shared_words() -> None:
    """Of one seed every key has its own text, and every text begins with the same words, as many as were asked for."""
    prompts = Prompts(words=30, shared=10, seed=1)
    texts = [prompts.text("level", number).split() for number in range(50)]

    assert {30} == {len(text) for text in texts}
    assert 1 == len({tuple(text[:10]) for text in texts})
    assert 50 == len({tuple(text[10:16]) for text in texts})
    assert texts[3] == prompts.text("level", 3).split()


def test_two_counts_tell_the_length_of_a_prompt() -> None:
    """The line through two counted prompts gives the tokens of the template and of a word."""
    counted = length((40, 87), (160, 327))

    assert Length(around=7.0, word=2.0) == counted
    assert 100 == counted.words(207)


def test_a_level_is_measured_whole(peer: Peer, tmp_path: Path) -> None:
    """Every request of every level has a sample with the tokens that the server counted, and the plot is drawn."""
    status, content = bench(peer, tmp_path, "--streams", "1,3", "--requests", "6")

    assert 0 == status
    assert [("streams", 1), ("streams", 3)] == [(level["kind"], level["value"]) for level in content["levels"]]
    for level in content["levels"]:
        summary, samples = level["summary"], level["runs"][0]["samples"]
        assert {field.name for field in dataclasses.fields(Summary)} == summary.keys()
        assert ({"ok": 6}, 0, 60, ["usage"]) == tuple(
            summary[name] for name in ("outcomes", "lost", "completion_tokens", "counted_by")
        )
        assert [(5, 10, 3)] * 6 == [
            (len(sample["arrivals"]), sample["completion_tokens"], sample["cached_tokens"]) for sample in samples
        ]
        assert 64 == pytest.approx(summary["prompt_tokens_p50"], abs=1)
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_the_file_says_where_it_was_measured(peer: Peer, tmp_path: Path) -> None:
    """Processor, commit, models and options are in it; the key is not."""
    _, content = bench(peer, tmp_path, "--streams", "1", "--requests", "1", "--api-key", "very-secret-key")

    assert {"cpu", "cores", "threads", "load_average", "commit", "models"} <= content["environment"].keys()
    assert ["good"] == [model["id"] for answer in content["environment"]["models"].values() for model in answer["data"]]
    assert 7 == content["options"]["seed"]
    assert "very-secret-key" not in (tmp_path / "serve.json").read_text()


def test_that_many_streams_run_at_once(peer: Peer, tmp_path: Path) -> None:
    """A closed loop of four never has more than four answers open, and gets there."""
    bench(peer, tmp_path, "--streams", "4", "--requests", "12")

    assert 4 == peer.most_running
    assert 12 == len(set(peer.prompts))


def test_a_shared_prefix_is_shared(peer: Peer, tmp_path: Path) -> None:
    """Half of every prompt is the same text, the rest its own."""
    bench(peer, tmp_path, "--streams", "2", "--requests", "4", "--shared-prefix", "32")
    beginnings = {tuple(prompt.split()[:16]) for prompt in peer.prompts}

    assert 1 == len(beginnings)
    assert 4 == len(set(peer.prompts))


def test_arrivals_can_be_given_instead_of_streams(peer: Peer, tmp_path: Path) -> None:
    """An open loop sends all its requests, and each has an outcome."""
    status, content = bench(peer, tmp_path, "--rate", "200", "--requests", "9")

    assert 0 == status
    assert ("rate", {"ok": 9}) == (content["levels"][0]["kind"], content["levels"][0]["summary"]["outcomes"])


def test_what_is_refused_is_counted(peer: Peer, tmp_path: Path) -> None:
    """A refused request is an outcome, nothing is lost, and the exit status says that not all was well."""
    status, content = bench(peer, tmp_path, "--model", "busy", "--streams", "2", "--requests", "8")
    summary = content["levels"][0]["summary"]

    assert 1 == status
    assert ({"ok": 6, "http 429": 2}, 0, 60) == (summary["outcomes"], summary["lost"], summary["completion_tokens"])


def test_without_usage_pieces_are_counted(peer: Peer, tmp_path: Path) -> None:
    """The fallback counts what arrived, and the file says so."""
    status, content = bench(peer, tmp_path, "--model", "plain", "--streams", "2", "--requests", "8")
    summary = content["levels"][0]["summary"]

    assert 0 == status
    assert (["chunks"], 40) == (summary["counted_by"], summary["completion_tokens"])


def test_extra_fields_are_laid_over_the_body(peer: Peer, tmp_path: Path) -> None:
    """A field of --extra is sent, and null takes one out."""
    extra = json.dumps({"ignore_eos": True, "stream_options": None})
    bench(peer, tmp_path, "--streams", "1", "--requests", "1", "--extra", extra)

    assert [True] * len(peer.bodies) == [body["ignore_eos"] for body in peer.bodies]
    assert not [body for body in peer.bodies if "stream_options" in body]


@pytest.mark.parametrize(("model", "outcome"), [("cut", "cut"), ("broken", "error event")])
def test_a_server_that_never_ends_an_answer_is_refused(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, outcome: str
) -> None:
    """The first probe says what is wrong, before anything is measured."""
    with pytest.raises(SystemExit, match="2"):
        bench(peer, tmp_path, "--model", model)

    assert f"does not answer a chat with '{model}': {outcome}" in capsys.readouterr().err


def test_servers_take_turns(peer: Peer, tmp_path: Path) -> None:
    """Two servers are measured one after the other at every level of every round."""
    names = ("--base-url", f"second={peer.url}", "--model", "good", "--model", "plain")
    _, content = bench(peer, tmp_path, *names, "--streams", "1,2", "--requests", "2", "--rounds", "2")
    order = [body["model"] for body in peer.bodies if body["max_tokens"] == 16]

    assert ["good", "good", "plain", "plain"] * 4 == order
    assert [2, 2, 2, 2] == [len(level["runs"]) for level in content["levels"]]


def test_servers_that_count_alike_get_the_same_prompts(peer: Peer, tmp_path: Path) -> None:
    """What one server was asked at a level, the next is asked too."""
    bench(peer, tmp_path, "--base-url", f"second={peer.url}", "--streams", "1", "--requests", "3")

    assert peer.prompts[:3] == peer.prompts[3:]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give --base-url"),
        (["--base-url", "127.0.0.1:8000"], "must look like"),
        (["--base-url", "http://example.test/v1"], "--allow-remote"),
        (["--base-url", "http://127.0.0.1:9/v1", "--serve"], "not both"),
        (["--serve", "--streams", "0"], "above 0"),
        (["--serve", "--streams", "2,2"], "different numbers"),
        (["--serve", "--streams", "many"], "numbers separated by commas"),
        (["--serve", "--streams", "1", "--rate", "1"], "give one"),
        (["--serve", "--rate", "nan"], "above 0"),
        (["--serve", "--requests", "4", "--streams", "8"], "cannot fill 8 streams"),
        (["--serve", "--rate", "1", "--requests", "0"], "--requests"),
        (["--serve", "--prompt-tokens", "0"], "--prompt-tokens must be 1 or more"),
        (["--serve", "--shared-prefix", "256"], "less than --prompt-tokens 256"),
        (["--serve", "--max-tokens", "0"], "more than 0"),
        (["--serve", "--rounds", "0"], "--rounds must be 1 or more"),
        (["--serve", "--extra", "[]"], "JSON object"),
    ],
)
def test_nonsense_is_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be measured ends with status 2 and a sentence that says why, before anything is sent or started."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)

    assert reason in capsys.readouterr().err
