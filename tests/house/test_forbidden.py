"""What never may be: found in the syntax tree, not by searching text."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import Source, sources

everything = pytest.mark.parametrize("source", sources(), ids=lambda source: source.label)

# Where every exception may be caught, and why.
BORDERS = {
    "engine/engine.py": "the thread's own end",
    "engine/core.py": "a step that breaks fails its own sequences",
    "engine/chat_format/lark.py": "a grammar that llguidance cannot read is refused in words",
    "engine/embedder/loading.py": "an embedding model that cannot run is refused in words",
    "engine/embedder/turns.py": "a batch that breaks fails its own jobs",
    "engine/load/load.py": "a model that cannot run packed is refused in words",
    "engine/load/selftest.py": "a model that fails its self-test is refused in words",
    "engine/draft/heads.py": "a head that cannot be read or run packed is refused in words",
    "server/http/limits.py": "the HTTP border, before the first byte",
    "server/http/stream_encoder.py": "the HTTP border, behind the first byte",
    "server/responses/run.py": "the HTTP border of a task that outlives its request",
}
# Where async code may stand in the engine: the rest runs on its thread.
LOOP_SIDE = {"engine/engine.py", "engine/output/stream.py"}
FAMILIES = ("llama", "qwen", "gemma", "mistral", "phi", "olmo", "gpt", "neox", "cohere", "mamba", "deepseek", "granite")
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "subprocess"}
# The files that start another program.
STARTS = {
    "engine/grammar/sandbox.py": "itself, to try what may end a process",
    "engine/kernels/cpu/build.py": "the system's compiler, on our own source",
    "bench/launch.py": "the server that is measured, named by who measures it",
}
# The files that count processors: what the machine has is not what a process may use.
COUNTS = {"engine/load/resources.py", "bench/machine.py"}
EMPTY_NAMES = ("util", "helper", "manager", "misc", "common_")


def nodes(source: Source, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of some kinds."""
    return (node for node in ast.walk(source.tree) if isinstance(node, kinds))


def found(nodes_: Iterator[ast.AST]) -> list[str]:
    """Where something is, for the message."""
    return [f"line {node.lineno}: {ast.unparse(node)[:80]}" for node in nodes_]


def calls(source: Source) -> Iterator[ast.Call]:
    """All calls."""
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))


def called(call: ast.Call) -> str:
    """The name that is called, without what stands before its last dot."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


@everything
def test_nothing_runs_code_from_data(source: Source) -> None:
    """No eval, no exec, no pickle, no subprocess, no shell."""
    bare = (call for call in calls(source) if isinstance(call.func, ast.Name) and call.func.id in UNSAFE_CALLS)
    shell = (call for call in calls(source) if any(keyword.arg == "shell" for keyword in call.keywords))
    unsafe = UNSAFE_MODULES - ({"subprocess"} if source.label in STARTS else set())
    modules = (
        node
        for node in nodes(source, ast.Import, ast.ImportFrom)
        if {getattr(node, "module", None), *(alias.name for alias in node.names)} & unsafe
    )

    assert [] == found(bare) + found(shell) + found(modules)


@everything
def test_tensors_are_never_read_from_pickles(source: Source) -> None:
    """torch.load is not called at all, and no checkpoint's code is trusted."""
    loads = (call for call in calls(source) if ast.unparse(call.func) == "torch.load")
    trusted = (
        call
        for call in calls(source)
        for keyword in call.keywords
        if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
    )

    assert [] == found(loads) + found(trusted)


@everything
def test_every_exception_is_caught_at_the_borders_only(source: Source) -> None:
    """`except Exception` stands where BORDERS says, and a bare `except` nowhere."""
    handlers = [node for node in ast.walk(source.tree) if isinstance(node, ast.ExceptHandler)]
    broad = [node for node in handlers if node.type is None or "BaseException" in ast.unparse(node.type)]
    wide = [node for node in handlers if node.type is not None and ast.unparse(node.type) == "Exception"]

    assert [] == found(iter(broad))
    assert source.label in BORDERS or [] == found(iter(wide))


@everything
def test_a_file_is_its_noun(source: Source) -> None:
    """No utils, helpers or managers."""
    assert not any(name in source.path.stem for name in EMPTY_NAMES)


@everything
def test_no_decision_hangs_on_a_models_name(source: Source) -> None:
    """What a model can do is found by watching it; its name stands in no condition."""
    conditions = (node.test for node in ast.walk(source.tree) if isinstance(node, ast.If | ast.IfExp | ast.While))
    texts = (
        node
        for test in conditions
        for node in ast.walk(test)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )

    assert [] == found(node for node in texts if any(family in node.value.lower() for family in FAMILIES))


@everything
def test_nothing_is_global(source: Source) -> None:
    """No `global`: a mutable thing has one owner."""
    assert [] == found(nodes(source, ast.Global))


@pytest.mark.parametrize("source", sources("engine", "kvcache"), ids=lambda source: source.label)
def test_the_engine_thread_never_awaits(source: Source) -> None:
    """Async code stands on the loop's side of the border only, and nothing sleeps."""
    asynchronous = nodes(source, ast.Await, ast.AsyncFunctionDef, ast.AsyncWith, ast.AsyncFor)

    assert source.label in LOOP_SIDE or [] == found(asynchronous)
    assert [] == found(call for call in calls(source) if ast.unparse(call.func) == "time.sleep")


@pytest.mark.parametrize("source", sources("engine", "kvcache"), ids=lambda source: source.label)
def test_the_lower_packages_do_not_print(source: Source) -> None:
    """They raise errors and, at the borders, log."""
    assert [] == found(call for call in calls(source) if called(call) == "print")


@pytest.mark.parametrize("source", sources("kvcache"), ids=lambda source: source.label)
def test_the_cache_does_not_log(source: Source) -> None:
    """Where something is wrong, it raises."""
    assert "logging" not in source.text


@everything
def test_nothing_is_put_off(source: Source) -> None:
    """No TODO, FIXME or XXX in a comment or docstring."""
    assert not [word for word in ("TODO", "FIXME", "XXX") if word in source.text]


@everything
def test_processors_are_counted_in_one_place(source: Source) -> None:
    """Affinity and the quotas of containers count (`engine.load.resources.processors`), not what the machine has."""
    counted = (call for call in calls(source) if called(call) in ("cpu_count", "sched_getaffinity"))

    assert source.label in COUNTS or [] == found(counted)
