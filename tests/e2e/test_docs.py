"""The commands of README and docs: each is run by a test here, or has a reason in NOT_RUN."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.responses import JSONResponse, Response

from server.cli import make_app
from tests.e2e.serving import ROOT, read_address, serving
from tests.engine.embedder.folders import lay_out, save_embedder
from tests.engine.load.test_hub import Hub

ADDRESS = "http://127.0.0.1:8000"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BUNDLED = ROOT / "models" / "target"
_block = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_port = re.compile(r" --port \d+")
# Packages of these clients are in environments of their own (make test-clients).
ELSEWHERE = ("langchain", "llama_index")
# Commands that no test here runs, by their first words, and why.
NOT_RUN = {
    "make ": "installs packages, runs these tests, or is `cellar serve`",
    "pip install": "installs packages",
    "pipx install": "installs packages",
    "uv tool install": "installs packages",
    "apt-get install": "installs packages",
    "docker ": "needs a Docker engine; tests/container builds and runs the image",
    "docker/build-without-docker.sh": "tests/container runs it",
    ".venv/bin/python docker/run-without-docker.py": "tests/container runs it",
    "CELLAR_MODEL=Qwen/Qwen3-0.6B docker compose": "needs a Docker engine",
    "CELLAR_MODEL=Qwen/Qwen3-8B docker compose": "needs a Docker engine and a GPU",
    "cellar serve Qwen/Qwen3-8B --device cuda": "needs a GPU; tests/gpu_server.py serves one",
    "kubectl ": "needs a cluster; tests/deploy checks the manifests",
    "python -m sglang_router": "benchmarks/fleet/routers.py runs it",
    "vllm-router": "benchmarks/fleet/routers.py runs it",
    "cellar serve smollm2": "a download; tests/engine/load/test_package_index.py serves another file by a short name",
    "cellar ray": "tests/ray runs it",
    "cellar route": "tests/benchmarks/test_kills.py runs it",
    "cellar chat": "needs a terminal; tests/server/terminal drives it",
    "cellar bench ./my-model": "takes minutes; tests/bench runs all of it",
    "ANTHROPIC_BASE_URL=": "a program of npm; make test-clients runs it",
    "cn ": "a program of npm; make test-clients runs it",
    "OPENAI_API_KEY=none lm_eval": "needs a data set; make test-clients runs the harness",
    "OPENAI_API_BASE_URL=": "takes gigabytes to install",
    "export ": "variables of other programs",
}
# First words of lines that are no commands: log lines, traces, and files of keys and variables.
NO_COMMANDS = (
    *("chat cellar-tiny ", "queue ", "prefill ", "decode ", "req_", "wines:", "9c51e8aa"),
    *("CELLAR_MODEL=Qwen/Qwen3-0.6B", "CELLAR_API_KEY_FILE="),
)


def blocks(language: str) -> list[tuple[str, str]]:
    """Page and text of each block of code."""
    return [
        (page.relative_to(ROOT).as_posix(), text)
        for page in PAGES
        for kind, text in _block.findall(page.read_text())
        if kind == language
    ]


def lines(text: str) -> list[str]:
    """The commands of a block, each on one line, with `cellar` as if it were installed."""
    found = (line.strip().replace(".venv/bin/cellar", "cellar") for line in text.replace("\\\n", " ").splitlines())
    return [line for line in found if line]


def is_run(line: str) -> bool:
    return not line.startswith((*NOT_RUN, *NO_COMMANDS))


REQUESTS = [(page, text) for page, text in blocks("") if text.startswith("curl ")]
PROGRAMS = [(page, text) for page, text in blocks("python") if not any(name in text for name in ELSEWHERE)]
SCRIPTS = [
    (page, [line for line in lines(text) if is_run(line)]) for page, text in blocks("") if not text.startswith("curl ")
]
SERVERS = [(page, line) for page, script in SCRIPTS for line in script if line.startswith("cellar serve")]
# The other commands of a block run one after the other.
OTHERS = [
    (page, "\n".join(others))
    for page, script in SCRIPTS
    if (others := [line for line in script if not line.startswith("cellar serve")])
]
COMMANDS = [
    (page, command)
    for page, text in blocks("")
    for line in lines(text)
    if (command := re.sub(r"^.* \| (?=cellar )", "", line.split(" > ")[0].removesuffix(" &"))).startswith("cellar ")
]
FILES = [(page, text) for page, text in blocks("toml") if page in ("docs/options.md", "docs/cli.md")]


class DocumentedHub(Hub):
    """A hub with the repositories of the pages: all of them have the bundled model, but one with an encoder.

    files  of repositories with safetensors, with GGUF files, and of the encoder
    """

    def __init__(self, files: Path, gguf: Path, encoder: Path) -> None:
        super().__init__(files)
        self._gguf, self._encoder = gguf, encoder

    def folder(self, name: str) -> Path:
        """The files of a repository."""
        if name.startswith("all-MiniLM"):
            return self._encoder
        return self._gguf if name.endswith("-GGUF") else self.files

    async def revision(self, owner: str, name: str, revision: str) -> Response:
        """The list of files."""
        siblings = [{"rfilename": path, "size": size} for path, size in self.sizes(name).items()]
        return JSONResponse({"_id": "1", "id": f"{owner}/{name}", "sha": "a" * 40, "siblings": siblings})

    async def tree(self, owner: str, name: str, revision: str) -> Response:
        """The list of files again."""
        entries = self.sizes(name).items()
        return JSONResponse([{"type": "file", "path": path, "size": size, "oid": "b" * 40} for path, size in entries])

    def sizes(self, name: str) -> dict[str, int]:
        """The bytes of each file of a repository."""
        folder = self.folder(name)
        files = (file for file in folder.rglob("*") if file.is_file())
        return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}

    async def file(self, owner: str, name: str, revision: str, file: str) -> Response:
        """One file."""
        return await Hub(self.folder(name)).file(owner, name, revision, file)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tempfile.TemporaryFile("w") as errors, serving(["--store", "memory", "--threads", "1"], errors) as address:
        yield address


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables for the command `cellar`, a hub on this machine, a free port, and empty folders of the user."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "bin").mkdir()
    script = folder / "bin" / "cellar"
    program = "import sys; sys.argv[0] = 'cellar'; from server.cli import main; main()"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}" "$@"\n')
    script.chmod(0o755)
    files = shutil.copytree(BUNDLED, folder / "files")
    # Some pages ask for a longer context than that of the bundled model, and GGUF has no name for its pre-tokenizer.
    splits = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _change(files / "config.json", max_position_embeddings=65536)
    _change(files / "tokenizer.json", pre_tokenizer=splits)
    encoder = save_embedder("bert", folder / "encoder")
    lay_out(encoder, {"pooling_mode_mean_tokens": True}, "Normalize")
    variables = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "HOME": str(folder / "home"),
        "HF_HOME": str(folder / "hub"),
        "CELLAR_THREADS": "1",
    }
    (folder / "gguf").mkdir()
    convert = ["cellar", "convert", str(files), str(folder / "gguf" / "model-Q4_K_M.gguf"), "--type", "q4_k_m"]
    subprocess.run(convert, env=variables, check=True, capture_output=True)
    listener = socket.create_server(("127.0.0.1", 0))
    hub = DocumentedHub(files, folder / "gguf", encoder)
    server = uvicorn.Server(uvicorn.Config(hub.app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield {**variables, "HF_ENDPOINT": f"http://127.0.0.1:{listener.getsockname()[1]}"}
    server.should_exit = True
    thread.join()


def _change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path, environment: dict[str, str]) -> Path:
    """A folder with the files that commands read."""
    made = Path(environment["HF_HOME"]).parent
    (tmp_path / "my-model").symlink_to(made / "files")
    [gguf] = (made / "gguf").iterdir()
    (tmp_path / "model-q4_k_m.gguf").symlink_to(gguf)
    (tmp_path / "notes.txt").write_text("Cellar is a server.\nA slot is a place in its cache.\n")
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    (tmp_path / "recipe.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    (tmp_path / "keys.txt").write_text("secret\n")
    (tmp_path / "keys.txt").chmod(0o600)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), REQUESTS)
def test_requests_are_answered(url: str, page: str, text: str) -> None:
    """The shell runs them as they are, but for the port."""
    sent = text.replace(ADDRESS, url)
    assert url in sent
    done = subprocess.run(["bash", "-ec", sent], capture_output=True, text=True, timeout=60, check=True)

    answer = done.stdout.removeprefix("data: ").splitlines()[0]
    assert {"choices", "message"} & json.loads(answer).keys(), answer


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), PROGRAMS)
def test_programs_run(url: str, tmp_path: Path, page: str, text: str) -> None:
    """In a folder with the file that one of them reads."""
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    (tmp_path / "requests.jsonl").write_text(json.dumps({**request, "body": body}) + "\n")
    sent = text.replace(ADDRESS, url)
    command = [sys.executable, "-c", sent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)

    assert 0 == done.returncode, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), SERVERS)
def test_servers_start(environment: dict[str, str], folder: Path, page: str, line: str) -> None:
    """They answer, and end with 0 after SIGTERM; only the address and the port are others."""
    command = _port.sub("", line.removesuffix("&").replace("0.0.0.0", "127.0.0.1")) + " --port 0 --store none"
    words = ["bash", "-c", f"exec {command}"]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            address = read_address(server)
            headers = {"Authorization": "Bearer secret"}
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answer = httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers, trust_env=False)
        finally:
            server.terminate()
            code = server.wait(30)

    assert (200, 0) == (answer.status_code, code), (folder / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "script"), OTHERS)
def test_other_commands_run(url: str, environment: dict[str, str], folder: Path, page: str, script: str) -> None:
    """One after the other; a model is removed without a question. `cellar doctor` may find a problem here."""
    script = re.sub(r"^cellar doctor$", r"\g<0> || [ $? = 1 ]", script.replace(ADDRESS, url), flags=re.MULTILINE)
    script = re.sub(r"^cellar models remove .*$", r"\g<0> --yes", script, flags=re.MULTILINE)
    # Commands that write a file need a folder without it.
    for target in re.findall(r"^cellar convert \S+ (\S+)", script, flags=re.MULTILINE):
        (folder / target).unlink(missing_ok=True)
    command = ["bash", "-eo", "pipefail", "-c", script]
    variables = {**environment, "CELLAR_PORT": "0"}
    with (folder / "output").open("w+") as output:
        done = subprocess.run(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=280
        )
    shown = (folder / "output").read_text()

    assert 0 == done.returncode, shown
    assert shown.strip() or (folder / "summary.txt").read_text().strip()


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_options_exist(page: str, command: str) -> None:
    """The command line accepts them; nothing is run."""
    words = shlex.split(command)[1:]

    make_app().parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize(("page", "text"), FILES)
def test_configuration_files_are_valid(tmp_path: Path, page: str, text: str) -> None:
    """Their keys are options."""
    file = tmp_path / "cellar.toml"
    file.write_text(text)

    make_app().parse_args(["serve", "--config", str(file)], exit_on_error=False, print_error=False)


def test_there_are_commands() -> None:
    """The patterns above find them, and each reason is that of a command."""
    assert len(REQUESTS) >= 6
    assert len(PROGRAMS) >= 2
    assert len(COMMANDS) >= 25
    assert len(SERVERS) >= 12
    assert len(OTHERS) >= 7
    found = [line for _, text in blocks("") for line in lines(text)]
    for start in (*NOT_RUN, *NO_COMMANDS):
        assert any(line.startswith(start) for line in found), start
