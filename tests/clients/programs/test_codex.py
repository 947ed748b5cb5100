"""Codex."""

from __future__ import annotations

from pathlib import Path

import pytest
from node import run_program
from subject import Server

# As in docs/clients/codex.md.
CONFIG = """
model = "{model}"
model_provider = "cellar"
web_search = "disabled"

[model_providers.cellar]
name = "Cellar"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "CELLAR_API_KEY"
"""


@pytest.mark.timeout(600)
def test_chat(server: Server, tmp_path: Path) -> None:
    """The answer is on stdout."""
    folder = tmp_path / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(model=server.model, url=server.url))
    variables = {"CELLAR_API_KEY": server.key, "CODEX_HOME": str(folder)}
    done = run_program("codex", "exec", "--skip-git-repo-check", "Hello", home=tmp_path, **variables)

    assert 0 == done.returncode, done.stdout + done.stderr
    assert done.stdout.strip()
