"""Addresses of models on the hub."""

from __future__ import annotations

import pytest

from engine.types.model_name import plain_name


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf.co/a/b", "a/b"),
        ("hf.co/a/b:Q4_K_M", "a/b:Q4_K_M"),
        ("https://huggingface.co/a/b/", "a/b"),
        ("https://huggingface.co/a/b/tree/main?library=x#files", "a/b"),
        ("http://www.hf.co/a/b/blob/main/config.json", "a/b"),
        ("https://huggingface.co/a/b/resolve/main/x/y-Q8_0.gguf?download=true", "a/b:x/y-Q8_0.gguf"),
    ],
)
def test_an_address_names_a_model(address: str, name: str) -> None:
    assert name == plain_name(address)


@pytest.mark.parametrize(
    "text", ["a/b", "a/b:Q4_K_M", "/hf.co/a/b", "hf.co/a", "https://huggingface.co/a/b/tree/v2", "x.hf.co/a/b", ""]
)
def test_other_names_stay(text: str) -> None:
    """An address of another revision too: a name has none."""
    assert text == plain_name(text)
