"""The merges of byte-pair models: read from a file, or derived from the scores of SentencePiece.

SentencePiece merges the pair of neighbours with the highest score of the merged token, the leftmost one of equal
scores. A byte-pair model merges the pair with the lowest rank, the leftmost one of equal pairs. So the pairs of all
tokens, ordered by the score of the token, have the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.gguf.container import GgufError

Merge = tuple[str, str]

# Sum of the squared lengths of all tokens, to which the time for their splits is proportional: real vocabularies have
# up to 10^8.
_MAX_SPLIT_COST = 2**30
# Characters of all derived merges, to which their memory is proportional: tokens that are prefixes of each other have a
# merge at each character. The merges of real vocabularies have up to 10^7.
_MAX_MERGE_CHARACTERS = 2**25


def parse_merges(lines: Sequence[str], ids: Mapping[str, int], key: str) -> list[Merge]:
    """The merges of a file, each a pair with one space between. Raises GgufError for a pair that makes no token."""
    merges = dict[Merge, None]()
    for number, line in enumerate(lines):
        # A space at the start is part of the left token.
        space = line.find(" ", 1)
        left, right = line[:space], line[space + 1 :]
        if space < 0 or not right:
            raise GgufError(f"its metadata {key} has at {number} no pair of tokens: {line!r}")
        if left in ids and right in ids and left + right in ids:
            # Of equal pairs the first one counts.
            merges.setdefault((left, right))
        elif len(lines) > 1:
            # As a list cannot be empty, files without merges have one that makes no token.
            raise GgufError(f"its metadata {key} has at {number} a pair that makes no token: {line!r}")
    return list(merges)


def derive_merges(tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[int]) -> list[Merge]:
    """The merges that SentencePiece makes, the first ones first.

    mergeable  ids of the tokens that merges may produce

    Long tokens precede short ones of the same score: a run of one character then grows from its start, as from the
    leftmost pair. Raises GgufError for tokens too long to be split, or with too many splits.
    """
    if sum(len(tokens[token]) ** 2 for token in mergeable) > _MAX_SPLIT_COST:
        raise GgufError(f"its vocabulary has a token of {max(map(len, tokens))} characters")
    known = {tokens[token] for token in mergeable}
    parts = known | set("".join(known)) & set(tokens)
    ordered = sorted(mergeable, key=lambda token: (-scores[token], -len(tokens[token])))
    merges, characters = list[Merge](), 0
    for text in map(tokens.__getitem__, ordered):
        splits = [split for split in range(len(text) - 1, 0, -1) if text[:split] in parts and text[split:] in parts]
        characters += len(splits) * len(text)
        if characters > _MAX_MERGE_CHARACTERS:
            raise GgufError("its vocabulary has too many tokens that are parts of each other")
        merges += [(text[:split], text[split:]) for split in splits]
    return merges
