"""Fill-in-the-middle prompts of each family's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.errors import InvalidRequest
from engine.text.fill_in_middle import detect_fill_in_middle
from engine.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).parents[3] / "models" / "target"
FAMILIES = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
]


def tokenizer_with(*tokens: str) -> Tokenizer:
    """The bundled tokenizer with these tokens added."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return Tokenizer(tokenizer, vocabulary_size=len(tokenizer), context=64)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family[0]))
def test_the_markers_stand_around_both_texts(family: list[str]) -> None:
    """Prefix marker, text before, suffix marker, text after, middle marker."""
    tokenizer = tokenizer_with(*family)
    before, after = "def f(x):\n", "\n    return x\n"
    tokens = tokenizer.encode_gap(before, after)
    [prefix, suffix, middle, *ends] = [tokenizer.encode(text, add_special=False)[0] for text in family]
    at = tokens.index(suffix)

    assert (prefix, middle) == (tokens[0], tokens[-1])
    assert (before, after) == (tokenizer.decode(tokens[1:at]), tokenizer.decode(tokens[at + 1 : -1]))
    assert tokenizer.fill_in_middle is not None
    assert set(ends) <= set(tokenizer.fill_in_middle.ends)


def test_the_suffix_may_be_empty() -> None:
    tokens = tokenizer_with(*FAMILIES[0]).encode_gap("", "")

    assert 3 == len(tokens)


def test_other_files_stand_before_the_gap() -> None:
    """The last ones that fit into half of the remaining context, behind the tokens for files if there are some."""
    files = [("old.py", "x = 1\n" * 60), ("a.py", "y = 2\n")]
    family = [*FAMILIES[0][:3], "<|repo_name|>", "<|file_sep|>"]
    marked, plain = tokenizer_with(*family), tokenizer_with(*FAMILIES[0][:3])

    gap = "<|fim_prefix|>b<|fim_suffix|>c<|fim_middle|>"
    expected = f"<|repo_name|>myproject\n<|file_sep|>a.py\ny = 2\n<|file_sep|>filename\n{gap}"
    assert expected == marked.decode(marked.encode_gap("b", "c", files))
    assert f"\n\n--- snippet ---\n\ny = 2\n{gap}" == plain.decode(plain.encode_gap("b", "c", files))
    assert gap == plain.decode(plain.encode_gap("b", "c", files[:1]))


def test_another_vocabulary_is_refused() -> None:
    """Two of the three tokens are not enough."""
    tokenizer = tokenizer_with(*FAMILIES[0][:2])
    with pytest.raises(InvalidRequest) as refused:
        tokenizer.encode_gap("a", "b")

    assert "suffix" == refused.value.field


def test_a_token_may_have_the_id_0() -> None:
    """StarCoder's end of the text has it."""
    ids = {"<fim_prefix>": 1, "<fim_middle>": 2, "<fim_suffix>": 3, "<|endoftext|>": 0}
    found = detect_fill_in_middle(ids.get)

    assert found is not None
    assert (1, 3, 2, (0,)) == (found.prefix, found.suffix, found.middle, found.ends)
