"""POST /infill on a model whose vocabulary has the tokens for a gap: the bundled one, with three tokens renamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import ROOT, serving

RENAMED = {"<|im_start|>": "<|fim_prefix|>", "<|im_end|>": "<|fim_suffix|>", "<tool_call>": "<|fim_middle|>"}


@pytest.mark.slow
def test_a_gap_is_filled_by_the_model(tmp_path: Path) -> None:
    """The prompt has the text before, the text after, and the middle token last; the answer has no marker."""
    folder = tmp_path / "coder"
    shutil.copytree(ROOT / "models" / "target", folder)
    for file in folder.glob("*.json"):
        text = file.read_text(encoding="utf-8")
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        json.loads(text)
        file.write_text(text, encoding="utf-8")
    body = {"input_prefix": "def f(x):\n", "input_suffix": "\n    return x\n", "prompt": "    x", "n_predict": 4}
    with (
        (tmp_path / "errors").open("w") as errors,
        serving(["--model", str(folder), "--context", "512"], errors) as url,
    ):
        answer = httpx.post(f"{url}/infill", json={**body, "temperature": 0}, timeout=60)

    assert answer.status_code == 200, answer.text
    filled = answer.json()
    gap = "<|fim_prefix|>def f(x):\n    x<|fim_suffix|>\n    return x\n<|fim_middle|>"
    assert filled["prompt"].endswith(gap)
    assert filled["tokens_predicted"] > 0
    assert not any(marker in filled["content"] for marker in RENAMED.values())
