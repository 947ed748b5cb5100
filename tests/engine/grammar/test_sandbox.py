"""The grammar sandbox: grammars of unbounded time or memory end there, and are refused."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine import sandbox as process_module
from engine.errors import GrammarTooCostly, Overloaded
from engine.grammar import sandbox as trial
from engine.grammar.sandbox import GrammarSandbox, GrammarVocabulary
from engine.text.tokenizer import Tokenizer
from engine.types.request import Grammar
from tests.engine.grammar.test_matcher import grammars_of, of_schema
from tests.engine.kit.models import END, VOCABULARY, save_tokenizer


@pytest.fixture
def tried(tmp_path: Path) -> Iterator[GrammarSandbox]:
    """A sandbox for the tokenizer of the tiny models."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(tmp_path), vocabulary_size=VOCABULARY, context=64)
    made = GrammarSandbox(
        GrammarVocabulary(
            tokenizer.token_bytes(0, VOCABULARY),
            tokenizer.markers(),
            end_tokens=[END],
            encode=tokenizer.encode_inside_text,
        )
    )
    yield made
    made.close()


def multiple_of(number: int) -> str:
    """A grammar of numbers with as many lexer states."""
    return of_schema({"type": "integer", "multipleOf": number}).source


def test_slow_compilation_is_refused(tried: GrammarSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next grammar is checked in a new subprocess."""
    monkeypatch.setattr(trial, "_MAX_COMPILE_SECONDS", 0.2)
    assert trial.COMPILE_LIMIT_EXCEEDED == tried.check(multiple_of(999_983))
    monkeypatch.undo()

    assert "" == tried.check(multiple_of(7))


@pytest.mark.slow
def test_excessive_memory_is_refused(tried: GrammarSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the subprocess before the limit of time."""
    monkeypatch.setattr(trial, "_MAX_COMPILE_SECONDS", 60.0)

    several = {"allOf": [{"type": "integer", "multipleOf": number} for number in (9973, 9967, 9949, 9941)]}
    assert trial.COMPILE_LIMIT_EXCEEDED == tried.check(of_schema(several).source)


def test_invalid_grammars_pass_the_sandbox(tried: GrammarSandbox) -> None:
    """The parent process reports their errors."""
    assert "" == tried.check("start: (")
    assert "" == tried.check(of_schema({"$ref": "#"}).source)


def test_the_process_exits_when_the_pipe_closes(tried: GrammarSandbox) -> None:
    assert "" == tried.check('start: "a"')
    process, pipe = tried._process._end.peek()[2]  # type: ignore[attr-defined]
    pipe.close()

    assert 0 == process.wait(10)


def test_a_sandbox_failure_is_an_invalid_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is cached; other grammars still compile."""
    save_tokenizer(tmp_path)
    known = grammars_of(tmp_path)
    monkeypatch.setattr(trial, "_MAX_COMPILE_SECONDS", 0.2)
    known.compile(Grammar('start: "a"'))
    costly = Grammar(multiple_of(999_983))
    with pytest.raises(GrammarTooCostly, match="too long or too much memory"):
        known.compile(costly)
    monkeypatch.undo()

    with pytest.raises(GrammarTooCostly, match="too long or too much memory"):
        known.compile(costly)
    assert json.dumps("b") in known.compile(Grammar('start: "b"')).source


def test_the_limit_of_a_compilation_is_processor_time(tried: GrammarSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for the processor uses none of it."""
    monkeypatch.setattr(trial, "_MAX_COMPILE_SECONDS", 0.5)
    assert "" == tried.check('start: "a"')
    process, _ = tried._process._end.peek()[2]  # type: ignore[attr-defined]
    process.send_signal(signal.SIGSTOP)
    continued = threading.Timer(2 * trial._MAX_COMPILE_SECONDS, process.send_signal, [signal.SIGCONT])
    continued.start()

    assert "" == tried.check('start: "b"')
    continued.join()


def test_a_subprocess_that_is_killed_is_replaced(tried: GrammarSandbox) -> None:
    """Between two checks, and during one, as by a machine without memory."""
    assert "" == tried.check('start: "a"')
    process = tried._process._process
    assert process is not None
    process.kill()
    assert "" == tried.check('start: "b"')

    process = tried._process._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    killed = threading.Timer(0.2, process.kill)
    killed.start()
    assert "" == tried.check('start: "c"')
    killed.join()


def test_a_grammar_without_an_answer_of_the_sandbox_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without processor time for it."""
    save_tokenizer(tmp_path)
    known = grammars_of(tmp_path)
    monkeypatch.setattr(process_module, "_ANSWER_TIMEOUT_SECONDS", 0.0)
    with pytest.raises(Overloaded):
        known.compile(Grammar('start: "a"'))
    monkeypatch.undo()

    assert known.compile(Grammar('start: "a"'))


def test_a_grammar_does_not_wait_for_a_subprocess_in_the_background(
    tried: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may leave it without a processor: another one, of the usual priority, takes its place."""
    monkeypatch.setattr(trial, "_BACKGROUND_SECONDS", 0.0)
    background = tried.start(in_background=True)

    assert "" == tried.check(multiple_of(7))
    assert background.closed
    assert tried.start() is tried.start()


def test_a_subprocess_that_is_ready_stays(tried: GrammarSandbox) -> None:
    """Built in the background, where no request was in the way."""
    background = tried.start(in_background=True)

    assert background.poll(60)
    assert "" == tried.check(multiple_of(7))
    assert background is tried.start()


@pytest.mark.skipif(sys.platform != "linux", reason="the policy of Linux")
def test_a_vocabulary_is_built_in_spare_time() -> None:
    """By a thread of its own, whose priority no other thread shares."""
    with ThreadPoolExecutor(1, initializer=trial._yield_processor) as thread:
        assert os.SCHED_IDLE == thread.submit(os.sched_getscheduler, 0).result()
    assert os.SCHED_IDLE != os.sched_getscheduler(0)
