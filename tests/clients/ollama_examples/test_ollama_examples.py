"""The examples of ollama-python's source archive, unchanged, and the calls of both clients that change models.

The archive and the npm package lie beside this environment. The server has no key, the names of the examples' models,
and a hub on this machine with the bundled model as someone/tiny.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import ollama
import pytest
from subject import Server

SOURCE = Path(sys.prefix) / "source"
PULLED = "someone/tiny"
# Each ends with status 0.
WORKING = (
    *("async-chat", "async-generate", "async-structured-outputs", "async-tools", "chat", "chat-logprobs"),
    *("chat-stream", "create", "embed", "generate", "generate-logprobs", "generate-stream", "gpt-oss-tools"),
    *("gpt-oss-tools-stream", "list", "ps", "pull", "show", "structured-outputs", "tools"),
)
# What the bundled model lacks, and what the server does not do, by the text of the error.
REFUSED = {
    "fill-in-middle": "fill-in-the-middle tokens",
    "multi-tool": "'think'",
    "thinking": "'think'",
    "thinking-levels": "'think'",
    "thinking-generate": "'think'",
}
JAVASCRIPT = """
import { Ollama } from 'ollama'
const client = new Ollama({ host: process.env.OLLAMA_HOST })
const model = 'gemma4', asked = [{ role: 'user', content: 'Hello' }], lines = []
for await (const part of await client.pull({ model: 'someone/tiny', stream: true })) lines.push(part)
const digests = lines.filter((part) => part.digest)
console.assert(digests.at(-1).completed === digests.at(-1).total && lines.at(-1).status === 'success', 'pull')
console.assert((await client.delete({ model: 'someone/tiny' })).status === 'success', 'delete')
await client.create({ model: 'js', from: model, system: 'Be brief.', parameters: { temperature: 0 } })
await client.copy({ source: 'js', destination: 'twin' })
console.assert((await client.show({ model: 'twin' })).system === 'Be brief.', 'show')
console.assert((await client.list()).models.some((each) => each.name === 'twin'), 'list')
const whole = await client.chat({ model: 'twin', messages: asked, keep_alive: '5m', options: { num_predict: 8 } })
let streamed = ''
const stream = await client.chat({ model: 'twin', messages: asked, options: { num_predict: 8 }, stream: true })
for await (const part of stream) streamed += part.message.content
console.assert(streamed === whole.message.content && whole.model === 'twin', 'chat')
const drawn = await client.generate({ model, prompt: 'Hello', raw: true, logprobs: true, options: { num_predict: 2 } })
console.assert(drawn.logprobs.length === 2, 'generate')
const vectors = await client.embed({ model, input: ['a', 'b '.repeat(20000)], truncate: true })
console.assert(vectors.embeddings.length === 2, 'embed')
console.assert((await client.ps()).models.length > 0 && (await client.version()).version, 'ps')
for (const name of ['js', 'twin']) await client.delete({ model: name })
console.log('done')
"""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the examples."""
    [archive] = SOURCE.glob("ollama-*.tar.gz")
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return next(folder.glob("ollama-*/examples"))


def run(command: list[str], server: Server, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OLLAMA_HOST": server.url}
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("name", WORKING)
def test_example(examples: Path, server: Server, name: str) -> None:
    """OLLAMA_HOST is all that it needs."""
    done = run([sys.executable, f"{name}.py"], server, examples)

    assert 0 == done.returncode, done.stderr
    assert done.stdout


@pytest.mark.parametrize("name", REFUSED)
def test_refused_example(examples: Path, server: Server, name: str) -> None:
    """The error names the reason."""
    done = run([sys.executable, f"{name}.py"], server, examples)

    assert 0 != done.returncode
    assert REFUSED[name] in done.stderr


def test_models(server: Server) -> None:
    """Pull with progress, delete, create, copy, show."""
    client = ollama.Client(host=server.url)
    lines = list(client.pull(PULLED, stream=True))
    bars = [line for line in lines if line.digest]
    deleted = client.delete(PULLED)
    with pytest.raises(ollama.ResponseError) as missing:
        client.delete(PULLED)
    client.create(model="mario", from_="gemma4", system="You are Mario.", parameters={"top_k": 3})
    client.copy("mario", "twin")
    shown = client.show("twin")
    answer = client.chat("twin", messages=[{"role": "user", "content": "Hi"}], keep_alive=0)
    listed = [model.model for model in client.list().models]
    for name in ("mario", "twin"):
        client.delete(name)

    assert bars
    assert (bars[-1].completed, "success") == (bars[-1].total, lines[-1].status)
    assert ("success", 404) == (deleted.status, missing.value.status_code)
    assert "PARAMETER top_k" in (shown.modelfile or "")
    assert {"mario", "twin"} <= {*listed}
    assert answer.message.content


def test_truncated_embedding(server: Server) -> None:
    """An input above the context is truncated, or refused."""
    client, long = ollama.Client(host=server.url), "word " * 20000

    assert 1 == len(client.embed("gemma4", input=long, keep_alive="1m").embeddings)
    with pytest.raises(ollama.ResponseError):
        client.embed("gemma4", input=long, truncate=False)


def test_javascript(server: Server, tmp_path: Path) -> None:
    """The npm package."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    (tmp_path / "client.mjs").write_text(JAVASCRIPT)
    (tmp_path / "node_modules").symlink_to(Path(sys.prefix) / "node_modules")
    done = run(["node", "client.mjs"], server, tmp_path)

    assert (0, "done\n", "") == (done.returncode, done.stdout, done.stderr)
