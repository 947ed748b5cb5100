"""Continue's command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from node import run_program
from subject import Server

# As in docs/clients/continue.md.
CONFIG = """
name: Cellar
version: 1.0.0
schema: v1
models:
  - name: Cellar
    provider: openai
    model: {model}
    apiBase: {url}/v1
    apiKey: {key}
    roles: [chat, edit, apply]
"""


@pytest.mark.timeout(600)
def test_chat(server: Server, tmp_path: Path) -> None:
    """With its tools and its system message."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(model=server.model, url=server.url, key=server.key))
    done = run_program("cn", "-p", "Hello", "--config", str(config), home=tmp_path, CONTINUE_TELEMETRY_ENABLED="0")

    assert 0 == done.returncode, done.stdout + done.stderr
    assert done.stdout.strip()
