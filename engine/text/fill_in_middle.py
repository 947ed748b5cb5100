"""Fill-in-the-middle: a prompt of the text before and after a gap, for models with tokens that mark both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Tokens before the prefix, before the suffix, and after the suffix, where the model continues.
_MARKERS = (
    # Qwen2.5-Coder, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, Granite Code
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek-Coder: its second token stands for the gap.
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # CodeLlama
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
# Tokens behind a filled gap, besides the end of the text: its own end, the next file, padding.
_ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    *("<fim_pad>", "<file_sep>", "<filename>", "<fim-pad>", "▁<EOT>"),
)


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The tokens of a vocabulary that mark a gap.

    ends  tokens that end the text of the gap
    """

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    def prompt(self, opening: Sequence[int], before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt whose continuation fills the gap between `before` and `after`; `opening`: BOS, if any."""
        return [*opening, self.prefix, *before, self.suffix, *after, self.middle]


def detect_fill_in_middle(token_id: Callable[[str], int | None]) -> FillInMiddle | None:
    """The markers of a vocabulary, of which `token_id` finds single tokens; None if it has none."""
    for markers in _MARKERS:
        match [found for text in markers if (found := token_id(text)) is not None]:
            case [prefix, suffix, middle]:
                ends = tuple(token for text in _ENDS if (token := token_id(text)) is not None)
                return FillInMiddle(prefix, suffix, middle, ends)
    return None
