"""Claude Code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from node import run_program
from subject import Server


@pytest.mark.timeout(600)
def test_chat(server: Server, tmp_path: Path) -> None:
    """It asks for models by its own names. The second prompt finds the first one in the cache."""
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    usages = []
    for prompt in ("Hello", "What is a slot?"):
        arguments = ("-p", prompt, "--output-format", "json", "--max-turns", "1")
        done = run_program("claude", *arguments, home=tmp_path, **variables)
        result = json.loads(done.stdout)
        assert (0, False) == (done.returncode, result["is_error"]), done.stdout + done.stderr
        usages.append(result["usage"])

    assert usages[1]["cache_read_input_tokens"] > 0.9 * usages[1]["input_tokens"]
