"""Contents of a prompt (images, sounds) at the input of the decoder, and the interface of their encoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from engine.types.content import Content

# A tensor, or lists and dictionaries of tensors: an argument of a decoder.
TensorTree: TypeAlias = Any


def leaves(tree: TensorTree) -> Iterator[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for branch in tree.values():
            yield from leaves(branch)
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from leaves(branch)


@dataclass(frozen=True, slots=True)
class ContentEntry:
    """The input of the decoder for the tokens of one content.

    digest             the key in the encoder cache
    rows               [tokens, width] in place of the embeddings
    token_arguments    further arguments of the decoder by name, in tensors [tokens, ...]
    feature_arguments  the same in tensors [features, ...], with a row for each token of `features` alone
    features           [tokens] bool: tokens with rows in `feature_arguments` (deepstack); empty without such arguments
    """

    digest: bytes
    rows: Tensor
    token_arguments: Mapping[str, TensorTree] = field(default_factory=dict)
    feature_arguments: Mapping[str, TensorTree] = field(default_factory=dict)
    features: Tensor = torch.empty(0, dtype=torch.bool)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        arguments = (*self.token_arguments.values(), *self.feature_arguments.values())
        return self.rows.nbytes + sum(leaf.nbytes for argument in arguments for leaf in leaves(argument))


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Batch tokens [batch_start, batch_stop), whose inputs are the rows of an entry from `first` on."""

    entry: ContentEntry
    first: int
    batch_start: int
    batch_stop: int

    @property
    def entry_rows(self) -> slice:
        """Of the entry."""
        return slice(self.first, self.first + self.batch_stop - self.batch_start)


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """Positions and attention of a prompt with contents, as `generate` of transformers has them.

    positions      [axes, tokens] int64 on the CPU, of the prompt; of four axes the first is that of the tokens in the
                   text, which has no meaning here. None: token indices
    offset         added to the index of a generated token: its position on all axes
    bidirectional  ascending token ranges [start, stop) that attend to each other, in the layers whose
                   `LayerSpec.bidirectional` is true
    """

    positions: Tensor | None = None
    offset: int = 0
    bidirectional: tuple[tuple[int, int], ...] = ()


# Of a prompt without contents.
TEXT_LAYOUT = PromptLayout()


class ContentEncoder(Protocol):
    """The part of a multimodal model before its decoder. Belongs to the engine thread.

    modules        of the part, between which an encoding may pause
    budget_bytes   of all entries in memory
    longest_range  most tokens of one content that attend to each other, of contents of several shapes at load
    """

    modules: Collection[nn.Module]
    budget_bytes: int
    longest_range: int

    def entry_bytes(self, content: Content) -> int:
        """Maximum bytes of the entry of a content."""
        ...

    def encode(self, content: Content, tokens: Sequence[int]) -> ContentEntry:
        """The entry of a content with the tokens of its range in the prompt. It depends on nothing else."""
        ...

    def layout(self, tokens: Sequence[int], contents: Sequence[Content]) -> PromptLayout:
        """The layout of a prompt; it needs no entry."""
        ...

    def range_length(self, tokens: Sequence[int], contents: Sequence[Content]) -> int:
        """The most tokens of a prompt that attend to each other; callable on any thread."""
        ...

    def is_bidirectional(self, layer: int) -> bool:
        """Whether the bidirectional ranges of layouts hold for a layer of the decoder (`LayerSpec.bidirectional`)."""
        ...
