"""Summaries of vocabularies."""

from __future__ import annotations

from engine.text.vocabulary import VocabularySummary, summarize


def test_summary_of_a_vocabulary() -> None:
    """Letters have any number of # characters before them; ids have gaps."""
    pieces = {"<0xFF>": 9, "b": 4, "##a": 2, "#": 1, "ab": 3, "1": 5, "ä": 6, "世界": 40, "#bc": 7, "Z": 8}

    assert VocabularySummary(41, 6, has_byte_tokens=True, letters=(2, 4, 8)) == summarize(pieces)


def test_summary_without_byte_tokens() -> None:
    assert VocabularySummary(1, 2, has_byte_tokens=False, letters=()) == summarize({"ä": 0})


def test_surrogates_are_pieces_of_some_vocabularies() -> None:
    """Canine has a token for each code point."""
    assert 3 == summarize({"a": 0, "\ud800": 1}).max_token_bytes
