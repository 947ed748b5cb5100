"""Tables of cells on a device follow those of the host, with one upload for each forward."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.spec import AttentionRange, LayerSpec, Rotation, Span
from kvcache.staging import StagingBuffer
from tests.fake_device import FAKE, Recorder, fake_device
from tests.selection import quick

SLOTS, CAPACITY = 4, 48
_ROTATION = Rotation(inverse_frequency=(1.0, 0.1))
LAYERS = (
    LayerSpec(1, 4, 4, rotation=_ROTATION),
    LayerSpec(1, 4, 4, AttentionRange("window", 6), rotation=_ROTATION),
    LayerSpec(2, 4, 4, AttentionRange("chunk", 8), rotation=_ROTATION),
)


def change(cache: Cache, chance: random.Random) -> None:
    """Change some slots by another operation than a forward."""
    slot, other = chance.sample(range(SLOTS), 2)
    length = cache.cached_length(slot)
    match chance.choice(("rewind", "shift", "copy", "reuse", "clear", "nothing", "nothing")):
        case "rewind":
            cache.rewind(slot, chance.randint(0, length))
        case "shift" if length > 12:
            cache.shift(slot, 3, chance.randint(1, 6))
        case "copy":
            cache.clear(other)
            cache.copy_prefix(slot, other, chance.randint(0, length))
        case "reuse":
            cache.insert_prefix(slot, list(range(length)))
            cache.clear(other)
            cache.reuse_prefix(other, list(range(chance.randint(0, CAPACITY))))
        case "clear":
            cache.clear(slot)


def next_spans(cache: Cache, chance: random.Random) -> list[Span]:
    """Spans of some slots: a token or several."""
    lengths = [(slot, cache.cached_length(slot)) for slot in range(SLOTS) if chance.random() < 0.7]
    return [
        Span(slot, length, min(chance.choice((1, 1, 2, 9)), CAPACITY - length))
        for slot, length in lengths
        if length < CAPACITY
    ]


def check(forward: Forward, device: Recorder) -> None:
    """The cells of all spans on the device are those of the host, without another transfer."""
    device.clear()
    segments = [forward.segments(layer) for layer in range(len(LAYERS))]
    assert [] == device.transfers
    for group, own in zip(forward.groups, segments, strict=True):
        for span, segment in zip(forward.spans, own, strict=True):
            on_host = group.table(span.slot)[segment.oldest_visible :]
            cells = segment.cells
            numbers = range(cells.start, cells.stop) if isinstance(cells, slice) else cells.tolist()
            assert list(numbers) == on_host.tolist()
        new = np.concatenate([group.table(span.slot)[span.start :] for span in forward.spans])
        assert new.tolist() == forward.group_cells(group).new.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", quick([0], range(8)))
def test_tables_follow_all_operations(seed: int) -> None:
    """Cells that are released, shared, copied and moved between forwards; and forwards without an upload."""
    chance = random.Random(seed)
    with fake_device() as device, torch.inference_mode():
        cache = Cache(LAYERS, slots=SLOTS, capacity=CAPACITY, cells=120, device=FAKE)
        staging, scattered = StagingBuffer(torch.device(FAKE)), 0
        for _ in range(60):
            change(cache, chance)
            spans = next_spans(cache, chance)
            if not spans or cache.evict_for(spans):
                cache.clear(chance.randrange(SLOTS))
                continue
            with cache.forward(spans) as forward:
                if chance.random() < 0.8:
                    device.clear()
                    forward.set_device_arrays(staging.upload(forward.device_arrays()))
                    assert 1 == len(device.transfers)
                    check(forward, device)
                    scattered += sum(not isinstance(one.cells, slice) for one in forward.segments(0))
                forward.keep(spans[0].slot, chance.randint(spans[0].start, spans[0].stop))

    assert scattered > 10


def test_arrays_of_different_types_are_one_upload() -> None:
    """The buffer grows, and is used again."""
    with fake_device() as device:
        staging = StagingBuffer(torch.device(FAKE))
        for size in (1, 5, 3):
            arrays = [
                np.arange(size),
                np.linspace(0, 1, 2 * size).reshape(2, size),
                np.empty((0, 4)),
                np.arange(16, dtype=np.uint8).reshape(2, 8),
            ]
            device.clear()
            copies = staging.upload(arrays)
            assert 1 == len(device.transfers)
            for array, copied in zip(arrays, copies, strict=True):
                assert array.dtype == copied.cpu().numpy().dtype
                assert array.tolist() == copied.tolist()
        assert [] == staging.upload([])
