"""Start a server for each environment, run its tests against it, and write docs/compatibility.md from what came out.

The page is written only where all environments are named: it would lose the rows of the others.

python -m tests.clients current=.venv/clients-current older=.venv/clients-older evaluation=.venv/clients-evaluation \
    fuzz=.venv/clients-fuzz images=.venv/clients-images openresponses=.venv/clients-openresponses \
    ollama_examples=.venv/clients-ollama_examples programs=.venv/clients-programs open_webui=.venv/clients-open_webui
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.serving import serving
from tests.engine.kit.content_models import save_content_model
from tests.engine.load.test_hub import Hub

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BUNDLED = ROOT / "models" / "target"
PAGE = ROOT / "docs" / "compatibility.md"
KEY = "clients-key"
MODEL = "cellar"
# What each file tests, by the name of its package.
PACKAGES = {
    "test_agents": "openai-agents",
    "test_anthropic": "anthropic",
    "test_claude_code": "@anthropic-ai/claude-code",
    "test_codex": "@openai/codex",
    "test_continue": "@continuedev/cli",
    "test_continue_adapters": "@continuedev/openai-adapters",
    "test_instructor": "instructor",
    "test_langchain": "langchain-openai",
    "test_litellm": "litellm",
    "test_llama_index": "llama-index-llms-openai-like",
    "test_lm_eval": "lm-eval",
    "test_ollama": "ollama",
    "test_ollama_examples": "ollama",
    "test_open_webui": "open-webui",
    "test_openai": "openai",
    "test_openresponses": "openresponses-types",
    "test_pydantic_ai": "pydantic-ai-slim",
    "test_schemathesis": "schemathesis",
}
# All environments: each has a folder of tests.
ENVIRONMENTS = frozenset(path.name for path in HERE.iterdir() if path.with_suffix(".txt").exists() and path.is_dir())
# What else a server is started with, by the name of an environment: ten thousand answers had better be short.
FLAGS = {"fuzz": ("--context", "256")}
# Agents: they ask for models by names of their own, and their prompts have tens of thousands of tokens.
PROGRAMS = "programs"
PROGRAMS_CONTEXT = 262144
# The bundled model reads no images.
IMAGES = "images"
IMAGES_FAMILY = "qwen2_vl"
# Names of the models in Ollama's examples, which have no key.
OLLAMA_EXAMPLES = "ollama_examples"
OLLAMA_MODELS = (
    *(MODEL, "gemma4", "llama3.2", "llama3.1", "llama3.1:8b", "qwen3", "deepseek-r1", "codellama:7b-code"),
    "gpt-oss:20b",
)
HEAD = """# Clients

Other people's clients against a server with the bundled model, those of images with a tiny Qwen2-VL.
`make test-clients` runs them and writes this page; each number is passed tests / tests.

| client | version | {features} |
| --- | --- |{lines}
"""


def main(environments: Mapping[str, Path]) -> int:
    """Run all; the number of tests that failed."""
    rows: dict[tuple[str, str], dict[str, list[bool]]] = {}
    for name, folder in environments.items():
        with _server_of(name) as url:
            for file, features in _results(url, name, folder).items():
                package = PACKAGES[file]
                rows.setdefault((package, _version(folder, package)), {}).update(features)
    if ENVIRONMENTS <= environments.keys():
        PAGE.write_text(_page(rows))
    else:
        print(f"{PAGE.name} is as it was: it needs {', '.join(sorted(ENVIRONMENTS - environments.keys()))} too")
    return sum(not passed for features in rows.values() for some in features.values() for passed in some)


@contextmanager
def _server_of(name: str) -> Iterator[str]:
    """The address of the server for an environment."""
    if name != OLLAMA_EXAMPLES:
        flags = ("--api-key", KEY, "--served-model-name", MODEL, *FLAGS.get(name, ()))
        with tempfile.TemporaryDirectory() as folder:
            if name == PROGRAMS:
                model = _long_context_model(Path(folder) / "model")
                context = ("--context", f"{PROGRAMS_CONTEXT}", "--slots", "2")
                flags = (*flags, "--served-model-name", "*", "--lenient", *context, "--model", str(model))
            if name == IMAGES:
                save_content_model(IMAGES_FAMILY, Path(folder))
                flags = (*flags, "--model", folder)
            with _server(flags, {}) as url:
                yield url
        return
    names = [word for each in OLLAMA_MODELS for word in ("--served-model-name", each)]
    with _hub() as hub, tempfile.TemporaryDirectory() as cache, _server(names, _hub_variables(hub, cache)) as url:
        yield url


def _long_context_model(folder: Path) -> Path:
    """A random model of one small layer: a prompt of a hundred thousand tokens takes seconds."""
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = AutoConfig.from_pretrained(BUNDLED, max_position_embeddings=PROGRAMS_CONTEXT, **shape, **heads)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in BUNDLED.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def _hub_variables(hub: str, cache: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub, "HF_HOME": cache}


@contextmanager
def _server(flags: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = ["--store", "memory", "--disk-cache", "none", *flags]
        with log.open("w") as errors, serving(flags, errors, variables) as url:
            yield url


@contextmanager
def _hub() -> Iterator[str]:
    """The address of a hub with the bundled model."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Hub(BUNDLED).app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def _results(url: str, name: str, folder: Path) -> dict[str, dict[str, list[bool]]]:
    """By file and by feature, whether each test passed."""
    environment = {
        **os.environ,
        "CELLAR_CLIENTS_URL": url,
        "CELLAR_CLIENTS_KEY": KEY,
        "CELLAR_CLIENTS_MODEL": MODEL,
        "CELLAR_CLIENTS_FOLDER": str(BUNDLED),
        "PYTHONPATH": str(HERE),
    }
    with tempfile.TemporaryDirectory() as report:
        path = Path(report) / "report.xml"
        config = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE), f"--junitxml={path}"]
        command = [str(folder / "bin" / "python"), "-m", "pytest", *config, str(HERE / name)]
        if subprocess.run(command, env=environment, cwd=HERE, check=False).returncode not in (0, 1):
            raise RuntimeError(f"the tests of {name} could not be run")
        found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
        for case in xml.parse(path).iter("testcase"):
            file = case.attrib["classname"].rpartition(".")[2]
            feature = case.attrib["name"].partition("[")[0].removeprefix("test_").replace("_", " ")
            found[file][feature].append(all(child.tag not in ("failure", "error") for child in case))
        return found


def _version(folder: Path, package: str) -> str:
    of_npm = folder / "node_modules" / package / "package.json"
    if of_npm.exists():
        return str(json.loads(of_npm.read_text())["version"])
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [str(folder / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _page(rows: Mapping[tuple[str, str], Mapping[str, list[bool]]]) -> str:
    features = list(dict.fromkeys(feature for row in rows.values() for feature in row))
    lines = [
        f"| {package} | {version} | " + " | ".join(_cell(row.get(feature, [])) for feature in features) + " |"
        for (package, version), row in sorted(rows.items())
    ]
    return HEAD.format(features=" | ".join(features), lines=" --- |" * len(features)) + "\n".join(lines) + "\n"


def _cell(passed: list[bool]) -> str:
    return f"{sum(passed)}/{len(passed)}" if passed else ""


if __name__ == "__main__":
    sys.exit(
        main({name: Path(folder).absolute() for name, _, folder in (word.partition("=") for word in sys.argv[1:])})
    )
