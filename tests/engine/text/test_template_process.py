"""Chat templates that compute without end or fill the memory: the start and the requests are refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from engine.errors import InvalidRequest, Overloaded
from engine.gguf.tokenizer import read_tokenizer
from engine.text import tokenizer as tokenizer_module
from engine.text.template_process import TemplateProcesses, TemplateTooCostly, TemplateUnavailable, template_processes
from engine.text.tokenizer import Tokenizer
from tests.engine.gguf.vocabularies import exported
from tests.selection import quick

BUNDLED = Path(__file__).parents[3] / "models" / "target"
MAX_SECONDS = 0.4

DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": DOUBLING,
    "constant product": "{{ 'a' * 500000000 }}",
    "constant power": "{{ 10 ** (10 ** 9) }}",
    "format": "{{ '%500000000s' % messages[0].role }}",
    "constant center": "{{ 'a' | center(500000000) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "list product": "{{ [messages] * 500000000 }}",
    "sort": "{% for i in range(999) %}{{ (range(99999) | list * 9) | sort(reverse=true) | groupby(0) }}{% endfor %}",
    "padded": "{{ messages[0].role.ljust(500000000) }}",
    "deep list": "{{ " + "[" * 20000 + "]" * 20000 + " }}",
    "long": "{# " + " " * 20_000_000 + " #}",
}
# Each process takes half a second of processor time for its imports.
ALWAYS = quick(("nested loops", "constant product", "long"), tuple(HOSTILE))
ALWAYS_IN_FILES = quick(("constant power", "long"), tuple(HOSTILE))
# Of those that start: the hostile part is behind the condition.
LATE = quick(("nested loops",), ("nested loops", "doubling", "macro", "list product", "sort", "padded"))
MESSAGE = {"role": "user", "content": "hello"}
SPEAKERS = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@cache
def backend() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


def tokenizer(template: str) -> Tokenizer:
    backend().chat_template = template
    return Tokenizer(backend(), vocabulary_size=len(backend()), context=2000)


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcesses]:
    """Subprocesses with less time."""
    process = TemplateProcesses(MAX_SECONDS)
    monkeypatch.setattr(tokenizer_module, "template_processes", lambda: process)
    yield process
    process.close()


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_hostile_template_is_refused_at_the_start(kind: str) -> None:
    """Or by the first request, if the template fails before it exceeds a limit."""
    with pytest.raises((TemplateTooCostly, InvalidRequest), match="chat template|takes too long|characters"):
        tokenizer(HOSTILE[kind]).render_chat([MESSAGE])


@pytest.mark.parametrize("kind", ALWAYS_IN_FILES)
def test_a_hostile_template_of_a_gguf_file_is_refused_at_the_start(kind: str) -> None:
    values = exported("llama") | {"tokenizer.chat_template": HOSTILE[kind]}
    read, size = read_tokenizer(values), len(values["tokenizer.ggml.tokens"])
    with pytest.raises((TemplateTooCostly, InvalidRequest), match="chat template|takes too long|characters"):
        Tokenizer(read, vocabulary_size=size, context=2000).render_chat([MESSAGE])


@pytest.mark.parametrize("kind", LATE)
def test_a_template_that_is_hostile_for_some_messages_refuses_those(kind: str) -> None:
    """Other conversations are rendered before and after."""
    found = tokenizer(f"{SPEAKERS}{{% if messages | length > 7 %}}{HOSTILE[kind]}{{% endif %}}")
    before = found.render_chat([MESSAGE])

    with pytest.raises(InvalidRequest, match="chat template takes too long or too much memory"):
        found.render_chat([MESSAGE] * 8)

    assert before == found.render_chat([MESSAGE])


def test_the_limit_of_time_is_that_of_a_request(limited: TemplateProcesses) -> None:
    """Several renderings, each within it, exceed it together; another request starts anew."""
    slow = "{% for i in range(99999) %}{% endfor %}" * 5

    with limited.job() as job, pytest.raises(TemplateTooCostly):
        [job.render(slow, [MESSAGE], {}) for _ in range(1000)]
    for _ in range(3):
        with limited.job() as job:
            assert "" == job.render(slow, [MESSAGE], {})


def test_a_conversation_that_a_template_refuses_keeps_the_process(limited: TemplateProcesses) -> None:
    """Whatever exception the template raises."""
    with limited.job() as job:
        for template in ("{{ raise_exception('no') }}", "{% if %}", "{{ 1 / 0 }}", "{{ messages.x.y }}"):
            with pytest.raises(TemplateError):
                job.render(template, [MESSAGE], {})

        assert "hello\n" == job.render(SPEAKERS, [MESSAGE], {})


@pytest.mark.slow
def test_a_process_that_was_killed_is_replaced(limited: TemplateProcesses) -> None:
    with limited.job() as job:
        job.prepare(SPEAKERS)
    process = limited.first._process._process
    assert process is not None
    process.kill()
    process.wait()

    with limited.job() as job:
        assert "hello\n" == job.render(SPEAKERS, [MESSAGE], {})


def test_a_process_that_is_killed_refuses_one_request(limited: TemplateProcesses) -> None:
    """During a rendering: the request may be sent again, the template is not the cause."""
    with limited.job() as job:
        job.prepare(SPEAKERS)
    process = limited.first._process._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    killed = threading.Timer(0.2, process.kill)
    killed.start()

    with pytest.raises(TemplateUnavailable), limited.job() as job:
        job.render(SPEAKERS, [MESSAGE], {})
    killed.join()
    with limited.job() as job:
        assert "hello\n" == job.render(SPEAKERS, [MESSAGE], {})


def test_variables_of_a_template() -> None:
    """Read without an evaluation of its constants in this process."""
    assert {"messages", "thinking"} == tokenizer("{{ messages }}{% if thinking %}x{% endif %}").template_names


def test_the_same_processes_render_for_all_tokenizers() -> None:
    assert template_processes() is template_processes()


def test_a_conversation_does_not_wait_for_the_end_of_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering without end runs in one subprocess, and others are rendered in the second one."""
    processes = TemplateProcesses(60.0)
    monkeypatch.setattr(tokenizer_module, "template_processes", lambda: processes)
    model = tokenizer(f"{SPEAKERS}{{% if messages | length > 7 %}}{HOSTILE['nested loops']}{{% endif %}}")
    expected = model.render_chat([MESSAGE])
    errors: list[str] = []

    def render_slowly() -> None:
        with pytest.raises((InvalidRequest, Overloaded)) as error:
            model.render_chat([MESSAGE] * 8)
        errors.append(str(error.value))

    slow = threading.Thread(target=render_slowly)
    slow.start()
    while processes.first.acquire(0):
        processes.first.release()
    assert [model.render_chat([MESSAGE]) for _ in range(3)] == [expected] * 3
    assert (slow.is_alive(), errors) == (True, [])
    process = processes.first._process._process
    assert process is not None
    process.kill()
    slow.join()
    processes.close()
    assert len(errors) == 1


def test_a_conversation_is_refused_while_both_processes_render(
    limited: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error of the server, after a bounded wait; each of the two goes on."""
    monkeypatch.setattr("engine.text.template_process._TURN_SECONDS", 0.01)
    with limited.job() as first, limited.job() as second:
        with pytest.raises(TemplateUnavailable, match="waits for other renderings"), limited.job():
            pass
        assert [job.render(SPEAKERS, [MESSAGE], {}) for job in (first, second)] == ["hello\n"] * 2
    assert limited.second._process.is_running


@pytest.mark.slow
def test_a_process_that_imports_again_delays_no_conversation(limited: TemplateProcesses) -> None:
    """The other one renders meanwhile."""
    with limited.job(), limited.job() as job:
        job.prepare(SPEAKERS)
    limited.first.close()

    with limited.job() as job:
        assert job.render(SPEAKERS, [MESSAGE], {}) == "hello\n"
        assert not limited.second.acquire(0)
        assert limited.first.acquire(0)
    assert limited.first._process.is_running
