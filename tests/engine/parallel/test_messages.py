"""Messages survive their encoding as integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.messages import Geometry, MoveKeys, RepeatForward, StopWorker, decode, encode
from engine.step.input import FINAL_NORM, HiddenRows
from kvcache.forward import ForwardCells
from kvcache.spec import Span


def repeated(hidden: HiddenRows | None) -> RepeatForward:
    """A forward with one run of cells in one group, and scattered cells in the other."""
    spans = (Span(3, 7, 2), Span(0, 0, 1, long_factors=True))
    scattered = torch.tensor([5, 4, 9, 10, 11])
    cells = (
        ForwardCells(slice(8, 11), (slice(1, 10), slice(10, 11))),
        ForwardCells(torch.tensor([2, 7, 0]), (scattered, slice(0, 1))),
    )
    return RepeatForward(spans, (11, 12, 13), (1, 2), hidden, cells)


def indices(message: RepeatForward) -> list[object]:
    """The cells of a message, comparable."""
    parts = [index for cells in message.cells for index in (cells.new, *cells.attended)]
    return [index if isinstance(index, slice) else index.tolist() for index in parts]


@pytest.mark.parametrize("hidden", [None, HiddenRows((0, 2)), HiddenRows((1,), (0, 3, FINAL_NORM))])
def test_forwards_are_decoded(hidden: HiddenRows | None) -> None:
    """A run of cells is a slice again, so that its read is a view."""
    message = repeated(hidden)
    decoded = decode(encode(message))

    assert isinstance(decoded, RepeatForward)
    assert message.spans == decoded.spans
    assert (message.tokens, message.logit_rows) == (decoded.tokens, decoded.logit_rows)
    assert hidden == decoded.hidden
    assert indices(message) == indices(decoded)


@given(old=st.lists(st.integers(0, 30)), new=st.lists(st.integers(0, 30)), distance=st.integers(-99, -1))
def test_moves_are_decoded(old: list[int], new: list[int], distance: int) -> None:
    """Whatever the order of the cells is."""
    moved = [np.array(cells, dtype=np.int64) for cells in (old, new)]
    decoded = decode(encode(MoveKeys(1, moved[0], moved[1], distance)))

    assert isinstance(decoded, MoveKeys)
    assert (1, distance) == (decoded.group, decoded.distance)
    assert [old, new] == [decoded.old.tolist(), decoded.new.tolist()]


@pytest.mark.parametrize("message", [StopWorker(), Geometry(8, 4096, 65536, 2**55)])
def test_other_messages_are_decoded(message: StopWorker | Geometry) -> None:
    assert message == decode(encode(message))


def test_all_words_are_integers() -> None:
    """They are broadcast as a tensor of int64."""
    assert encode(repeated(HiddenRows((0, 2)))) == torch.tensor(encode(repeated(HiddenRows((0, 2))))).tolist()
