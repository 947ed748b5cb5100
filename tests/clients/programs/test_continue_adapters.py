"""The package with the HTTP clients of Continue's editors."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from node import MODULES
from subject import Server

HEAD = """
import { constructLlmApi } from '@continuedev/openai-adapters'
import assert from 'node:assert'
const { CELLAR_URL, CELLAR_KEY, model = 'cellar' } = process.env
const api = constructLlmApi({ provider: 'openai', apiBase: `${CELLAR_URL}/v1/`, apiKey: CELLAR_KEY })
const signal = new AbortController().signal
const messages = [{ role: 'user', content: [{ type: 'text', text: 'Hello' }, { type: 'text', text: '' }] }]
const parameters = { type: 'object', properties: { name: { type: 'string', maxLength: 8 } }, required: ['name'] }
const tools = [{ type: 'function', function: { name: 'say_hello', description: 'Say hello', parameters } }]
const choice = { type: 'function', function: { name: 'say_hello' } }
"""
CHAT = """
const whole = await api.chatCompletionNonStream({ model, messages, stream: false, max_tokens: 8 }, signal)
assert(whole.choices[0].message.content.length > 0)
assert((await api.list()).some((each) => each.id === model))
"""
STREAM = """
let text = '', usage
for await (const part of api.chatCompletionStream({ model, messages, stream: true, max_tokens: 8 }, signal)) {
  text += part.choices[0]?.delta.content ?? ''
  usage = part.usage ?? usage
}
assert(text.length > 0 && usage.prompt_tokens > 0)
"""
TOOLS = """
let name, text = ''
const asked = { model, messages, tools, tool_choice: choice, stream: true }
for await (const part of api.chatCompletionStream(asked, signal)) {
  const call = part.choices[0]?.delta.tool_calls?.[0]
  name = call?.function.name ?? name
  text += call?.function.arguments ?? ''
}
assert(name === 'say_hello' && typeof JSON.parse(text).name === 'string')
const calls = [{ id: 'call_1', type: 'function', function: { name, arguments: text } }]
const result = { role: 'tool', tool_call_id: 'call_1', content: 'done' }
const history = [...messages, { role: 'assistant', tool_calls: calls }, result]
const body = { model, messages: history, tools, stream: false, max_tokens: 8 }
const next = await api.chatCompletionNonStream(body, signal)
assert(next.choices.length === 1)
"""
COMPLETION = """
const whole = await api.completionNonStream({ model, prompt: 'A slot is', stream: false, max_tokens: 8 }, signal)
let text = ''
const asked = { model, prompt: 'A slot is', stream: true, max_tokens: 8 }
for await (const part of api.completionStream(asked, signal)) {
  text += part.choices[0]?.text ?? ''
}
assert(whole.choices[0].text.length > 0 && text.length > 0)
"""
EMBEDDINGS = """
const { data } = await api.embed({ model, input: ['a slot', 'a cell'] })
assert(data.length === 2 && data.every((each) => each.embedding.every((value) => typeof value === 'number')))
"""
RERANK = """
const documents = ['A slot is a place in the cache.', 'Whales are mammals.']
const { data, results } = await api.rerank({ model, query: 'What is a slot?', documents })
assert((data ?? results).length === 2 && (data ?? results).every((each) => typeof each.relevance_score === 'number'))
"""


def run(server: Server, folder: Path, code: str) -> None:
    """Run a module that ends with 0."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    (folder / "client.mjs").write_text(HEAD + code)
    (folder / "node_modules").symlink_to(MODULES)
    environment = {**os.environ, "CELLAR_URL": server.url, "CELLAR_KEY": server.key, "model": server.model}
    done = subprocess.run(
        ["node", "client.mjs"], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )

    assert 0 == done.returncode, done.stderr


def test_chat(server: Server, tmp_path: Path) -> None:
    """And the list of models."""
    run(server, tmp_path, CHAT)


def test_stream(server: Server, tmp_path: Path) -> None:
    """With its usage."""
    run(server, tmp_path, STREAM)


def test_streamed_tools(server: Server, tmp_path: Path) -> None:
    """A call, and the answer to its result."""
    run(server, tmp_path, TOOLS)


def test_completion(server: Server, tmp_path: Path) -> None:
    """Streamed or not, as for autocompletion."""
    run(server, tmp_path, COMPLETION)


def test_embeddings(server: Server, tmp_path: Path) -> None:
    """For its index of the code."""
    run(server, tmp_path, EMBEDDINGS)


def test_rerank(server: Server, tmp_path: Path) -> None:
    """For its search in the code."""
    run(server, tmp_path, RERANK)
