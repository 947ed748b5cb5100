"""Steps that follow each other in one native call: sequences read rows, then each says one token after the other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import pointer
from dataclasses import dataclass

from engine.kernels.cpu.attention import address
from engine.native.decoder import DecoderSpec
from engine.native.step_library import DRAW_SPEC, DraftLoopFields, StepFields
from engine.sample.sampler import SamplingContext


@dataclass(frozen=True, slots=True)
class DraftLoopInput:
    """What one sequence reads and says in a chain.

    tokens  to read first. Its span has a row for each, and one for each token that is said but the last
    count   tokens to say; 0: it only reads
    draw    how the first of them is drawn; `chains` holds of it
    """

    tokens: Sequence[int]
    count: int
    draw: SamplingContext

    @property
    def batch_tokens(self) -> int:
        """Those of its span."""
        return len(self.tokens) + max(self.count - 1, 0)


def is_native_draw(draw: SamplingContext) -> bool:
    """Whether a chain can draw so: nothing shapes the logits, and of the filters only the usual ones are asked for."""
    return not draw.modifies_logits and (draw.greedy or has_native_filters(draw))


def has_native_filters(draw: SamplingContext) -> bool:
    """Whether of the filters only those are asked for that the library knows."""
    params = draw.params
    return params.typical_p == 1.0 and params.top_n_sigma == 0.0 and params.xtc is None


def describe_draft_loop(
    decoder: DecoderSpec, step: StepFields, links: array[int], tokens: array[int], choices: int, said: array[int]
) -> DraftLoopFields:
    """The fields of a chain; all that they name must outlive them.

    step   of all rows
    links  a draw_spec_table
    said   [links, largest count], to be written
    """
    count = len(links) * links.itemsize // DRAW_SPEC.size
    return DraftLoopFields(
        step=pointer(step),
        links=address(links),
        links_count=count,
        tokens=address(tokens),
        logits_scale=decoder.output_head.scale,
        softcap=decoder.output_head.softcap,
        choices=min(choices, step.embedding.count, step.head.outputs),
        deepest=len(said) // count,
        said=address(said),
    )


def draw_spec_table(links: Sequence[DraftLoopInput]) -> array[int]:
    """Links as chain.h has them."""
    table = array("q", bytes(DRAW_SPEC.size * len(links)))
    for at, link in enumerate(links):
        write_draw_spec(table, at, link.draw, len(link.tokens), link.count)
    return table


def write_draw_spec(table: array[int], at: int, draw: SamplingContext, length: int, count: int) -> None:
    """One link of a table: how to draw, the tokens that are read first, and those that are said."""
    params, temperature = draw.params, 0.0 if draw.greedy else draw.params.temperature
    seed, place = draw.seed & 2**64 - 1, draw.position
    shape = (temperature, params.top_k, params.top_p, params.min_p)
    DRAW_SPEC.pack_into(table, at * DRAW_SPEC.size, length, count, seed, place, *shape)
