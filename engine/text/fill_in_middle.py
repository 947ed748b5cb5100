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
# Tokens before the name of a repository and before each of its files.
_FILE_MARKERS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))
# Texts between other files in a vocabulary without these tokens, and the names that llama.cpp gives.
_SNIPPET, _REPOSITORY, _FILE = "\n\n--- snippet ---\n\n", "myproject\n", "filename\n"
# Tokens after a filled gap, besides the end of the text: its own end, the next file, padding.
_ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    *("<fim_pad>", "<file_sep>", "<filename>", "<fim-pad>", "▁<EOT>"),
)


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The tokens of a vocabulary that mark a gap.

    ends             tokens that end the text of the gap
    repository       token before the name of a repository
    file_separator   token before each of its files; None: the vocabulary has none
    """

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]
    repository: int | None = None
    file_separator: int | None = None

    def prompt(
        self, opening: Sequence[int], before: Sequence[int], after: Sequence[int], files: Sequence[int] = ()
    ) -> list[int]:
        """The prompt for a continuation that fills the gap between `before` and `after`.

        opening  BOS, if any
        files    other files, as `file_tokens` writes them
        """
        return [*opening, *files, self.prefix, *before, self.suffix, *after, self.middle]

    def file_tokens(
        self, files: Sequence[tuple[str, str]], encode: Callable[[str], Sequence[int]], limit: int
    ) -> list[int]:
        """Other files (name, text) of a repository before a prompt, in at most `limit` tokens: the last ones."""
        head, tail = self._frame(encode)
        chosen: list[int] = []
        for name, text in reversed(files):
            tokens = (
                encode(_SNIPPET + text)
                if self.file_separator is None
                else [self.file_separator, *encode(f"{name}\n{text}")]
            )
            if len(head) + len(tokens) + len(chosen) + len(tail) > limit:
                break
            chosen = [*tokens, *chosen]
        return [*head, *chosen, *tail] if chosen else []

    def _frame(self, encode: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
        """The tokens before all files and after them, where the file with the gap begins."""
        if self.file_separator is None or self.repository is None:
            return [], []
        return [self.repository, *encode(_REPOSITORY)], [self.file_separator, *encode(_FILE)]


def detect_fill_in_middle(token_id: Callable[[str], int | None]) -> FillInMiddle | None:
    """The markers of a vocabulary, of which `token_id` finds single tokens; None if it has none."""
    for markers in _MARKERS:
        match [token for text in markers if (token := token_id(text)) is not None]:
            case [prefix, suffix, middle]:
                ends = tuple(token for text in _ENDS if (token := token_id(text)) is not None)
                pairs = ((token_id(first), token_id(second)) for first, second in _FILE_MARKERS)
                repository, separator = next((pair for pair in pairs if None not in pair), (None, None))
                return FillInMiddle(prefix, suffix, middle, ends, repository, separator)
    return None
