"""Rules of the architecture that neither ruff nor import-linter can express; one test a rule, over all files."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.house.source import ROOT, sources

# Files that may catch every exception, and the reason.
BOUNDARIES = {
    "engine/engine.py": "end of the engine thread",
    "engine/loop.py": "a command or statistics that fail end no thread",
    "engine/core.py": "a failing step fails its own sequences",
    "engine/output/stream.py": "a delta that cannot be delivered ends its own stream",
    "engine/schedule/replay.py": "tokens of an earlier stream that fail fail their own sequence",
    "engine/schedule/scheduler.py": "a context shift that fails fails its own sequence",
    "engine/schedule/slots.py": "tokens that the prefix cache cannot add or load are computed",
    "engine/chat_format/lark_writer.py": "an invalid grammar is refused with a message",
    "engine/embedder/loading.py": "an embedding model that cannot run is refused with a message",
    "engine/embedder/scheduler.py": "a failing batch fails its own jobs",
    "engine/load/load.py": "a model that cannot run on packed batches is refused with a message",
    "engine/load/check/selftest.py": "a model that fails its self-test is refused with a message",
    "engine/quantize/calibration.py": "a model that cannot run on a text alone is quantised without a calibration",
    "engine/load/fusion.py": "a function that cannot be compiled stays as it is",
    "engine/load/read/tokenizer_files.py": "a tokenizer that cannot be read is refused with a message",
    "engine/media/processor.py": "an image that a processor fails on is refused",
    "engine/media/sandbox.py": "a model whose processor cannot be built reads text only",
    "engine/media/slices.py": "an encoding that fails in its thread fails the requests that need it",
    "engine/text/template_process.py": "a template that fails refuses its conversation",
    "engine/draft/mtp_head.py": "an MTP head that cannot be loaded is refused with a message",
    "engine/remote/worker.py": "a command of a front end that fails is refused with an error",
    "server/http/middleware.py": "HTTP boundary, before the first byte of a response",
    "server/http/direct_writer.py": "an encoding error is raised again in the task of its request",
    "server/http/stream_encoder.py": "HTTP boundary, after the first byte of a response",
    "server/replicas/cluster.py": "a Ray that does not start is reported with its message",
    "server/responses/task.py": "HTTP boundary of a background response",
}
# Files of the engine with coroutines: they run on the event loop, everything else on the engine thread.
EVENT_LOOP = {
    "engine/adapters/catalog.py",
    "engine/client.py",
    "engine/engine.py",
    "engine/output/stream.py",
    "engine/remote/connection.py",
    "engine/open_streams.py",
    "engine/remote/engine.py",
    "engine/remote/link.py",
    "engine/remote/planning.py",
    "engine/remote/worker.py",
}
FAMILIES = ("llama", "qwen", "gemma", "mistral", "phi", "olmo", "gpt", "neox", "cohere", "mamba", "deepseek", "granite")
# Their files name the architecture of a model: it is part of the format.
FILE_FORMATS = ("engine/convert/", "engine/gguf/")
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EMPTY_NAMES = ("util", "helper", "manager", "misc", "common_")


def test_imports_follow_the_layers() -> None:
    """The contracts of import-linter in pyproject.toml hold."""
    # In a process of its own: it configures logging, which would disable the loggers of other tests.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_package_files_import_no_module_of_the_project() -> None:
    """An __init__.py re-exports nothing."""
    files = [source for source in sources() if source.path.name == "__init__.py"]

    assert [] == [place for source in files for place in source.places(source.nodes(ast.Import, ast.ImportFrom))]


def test_every_exception_is_caught_at_boundaries_only() -> None:
    """`except Exception` stands in the files of BOUNDARIES, each of which has one; `except BaseException` nowhere."""
    handlers = {source.label: [*source.nodes(ast.ExceptHandler)] for source in sources()}
    broad = {label: {ast.unparse(node.type) for node in nodes if node.type} for label, nodes in handlers.items()}

    assert set(BOUNDARIES) == {label for label, types in broad.items() if "Exception" in types}
    assert [] == [label for label, types in broad.items() if any("BaseException" in name for name in types)]


def test_no_checkpoint_code_is_trusted() -> None:
    """trust_remote_code is False wherever it is passed."""
    trusted = [
        place
        for source in sources()
        for place in source.places(
            node
            for node in source.nodes(ast.keyword)
            if node.arg == "trust_remote_code" and ast.unparse(node.value) != "False"
        )
    ]

    assert [] == trusted


def test_nothing_is_unpickled() -> None:
    """No module that runs code of the bytes that it reads, and no pickled objects in pipes between processes."""
    imported = [
        f"{source.label} {name}"
        for source in sources()
        for node in source.nodes(ast.Import, ast.ImportFrom)
        for name in _modules(node)
        if name.partition(".")[0] in UNPICKLERS
    ]
    piped = [
        place
        for source in sources()
        if any("multiprocessing.connection" in _modules(node) for node in source.nodes(ast.Import, ast.ImportFrom))
        for place in source.places(
            node for node in source.nodes(ast.Attribute) if node.attr in ("send", "recv", "recv_pyobj")
        )
    ]

    assert [] == imported
    assert [] == piped


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_no_condition_names_a_model_family() -> None:
    """A model's abilities are measured on its modules, not looked up by its name, except to read and write a file."""
    named = [
        f"{source.label}:{text.lineno} {text.value}"
        for source in sources()
        if not source.label.startswith(FILE_FORMATS)
        for branch in source.nodes(ast.If, ast.IfExp, ast.While)
        for text in ast.walk(branch.test)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
        if any(family in text.value.lower() for family in FAMILIES)
    ]

    assert [] == named


def test_the_engine_thread_never_awaits() -> None:
    """Coroutines stand on the event loop's side of the engine only."""
    kinds = (ast.Await, ast.AsyncFunctionDef, ast.AsyncWith, ast.AsyncFor)
    inside = [source for source in sources("engine", "kvcache") if source.label not in EVENT_LOOP]

    assert [] == [place for source in inside for place in source.places(source.nodes(*kinds))]


def test_no_file_has_an_empty_name() -> None:
    """No utils, helpers or managers."""
    assert [] == [source.label for source in sources() if any(name in source.path.stem for name in EMPTY_NAMES)]
