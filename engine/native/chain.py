"""Steps that follow each other in one native call: sequences read rows, then each says one token after the other."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int64, pointer
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.native.decoder import Decoder
from engine.native.library import ChainFields, ChoicesFields, LinkFields, StepFields
from engine.sampling import Draw


@dataclass(frozen=True, slots=True)
class Link:
    """What one sequence reads and says in a chain.

    tokens  to read first. Its span has a row for each, and one for each token that is said but the last
    count   tokens to say; 0: it only reads
    draw    how the first of them is drawn; `chains` holds of it
    """

    tokens: Sequence[int]
    count: int
    draw: Draw

    @property
    def rows(self) -> int:
        """Those of its span."""
        return len(self.tokens) + max(self.count - 1, 0)


def chains(draw: Draw) -> bool:
    """Whether a chain can draw so: nothing shapes the logits, and of the filters only the usual ones are asked for."""
    params = draw.params
    usual = params.typical_p == 1.0 and params.top_n_sigma == 0.0 and params.xtc is None
    return not draw.shaped and (draw.cold or usual)


def describe_chain(
    decoder: Decoder, step: StepFields, links: Sequence[Link], choices: int, said: Array[c_int64]
) -> ChainFields:
    """The fields of a chain.

    step  of all rows, which must outlive them
    said  [links, largest count], to be written
    """
    tokens = [token for link in links for token in link.tokens]
    return ChainFields(
        step=pointer(step),
        links=(LinkFields * len(links))(*[_fields(link.draw, len(link.tokens), link.count) for link in links]),
        links_count=len(links),
        tokens=(c_int64 * len(tokens))(*tokens),
        logits_scale=decoder.ending.scale,
        softcap=decoder.ending.softcap,
        choices=min(choices, step.embedding.count, step.head.outputs),
        deepest=len(said) // len(links),
        said=said,
    )


def describe_choices(draws: Sequence[Draw], logits: Tensor, said: Array[c_int64]) -> ChoicesFields:
    """The fields of choices.

    logits  [draws, vocabulary] float32 without gaps, which must outlive them
    said    [draws], to be written
    """
    rows, outputs = logits.shape
    links = (LinkFields * rows)(*map(_fields, draws))
    return ChoicesFields(links, rows, logits.data_ptr(), outputs, said, torch.get_num_threads())


def _fields(draw: Draw, length: int = 0, count: int = 0) -> LinkFields:
    params, temperature = draw.params, 0.0 if draw.cold else draw.params.temperature
    return LinkFields(length, count, draw.seed, draw.position, temperature, params.top_k, params.top_p, params.min_p)
