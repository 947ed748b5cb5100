"""Philox against its published words; Gumbel noise against its distribution."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sample.noise import MAX_NOISE, MIN_NOISE, gumbel, philox

# Known answers of Random123 1.14 for philox4x32-10: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    """Hexadecimal words as tensors."""
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def noise(seeds: torch.Tensor | int, positions: torch.Tensor | int, tokens: torch.Tensor | int) -> torch.Tensor:
    """Gumbel noise with numbers broadcast to the shape of the tensors."""
    parts = torch.broadcast_tensors(*(torch.as_tensor(part) for part in (seeds, positions, tokens)))
    return gumbel(*(part.contiguous() for part in parts))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter: str, key: str, expected: str) -> None:
    assert words(expected) == philox(words(counter), words(key))


def test_numpy_gives_the_same_words() -> None:
    parts = torch.randint(2**32, (6, 1000), generator=torch.Generator().manual_seed(2))
    a, b, c, d, e, f = parts
    expected = philox((a, b, c, d), (e, f))
    a, b, c, d, e, f = parts.numpy()

    assert [own.tolist() for own in philox((a, b, c, d), (e, f))] == [own.tolist() for own in expected]


def test_noise_lies_in_its_range() -> None:
    """The range that the filters rely on."""
    drawn = noise(1, torch.arange(1000)[:, None], torch.arange(1000))
    extremes = [-math.log(-math.log((word + 0.5) / 2**32)) for word in (0, 2**32 - 1)]

    assert torch.isfinite(drawn).all()
    assert extremes[1] - extremes[0] <= MAX_NOISE - MIN_NOISE
    assert extremes[0] <= drawn.min() < drawn.max() <= extremes[1]


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_noise_is_gumbel_along_every_axis(axis: str) -> None:
    count = 200_000
    parts = {"seed": 5, "position": 17, "token": 3} | {axis: torch.arange(count)}
    drawn = noise(parts["seed"], parts["position"], parts["token"])
    uniform = torch.exp(-torch.exp(-drawn))
    cells = torch.histc(uniform, 100, 0.0, 1.0)
    chi_square = float(((cells - count / 100) ** 2 / (count / 100)).sum())
    pairs = float(torch.corrcoef(torch.stack((uniform[:-1], uniform[1:])))[0, 1])

    assert abs(chi_square - 99) < 6 * math.sqrt(2 * 99)
    assert abs(pairs) < 6 / math.sqrt(count)


def test_every_bit_of_seed_and_position_changes_the_noise() -> None:
    tokens = torch.arange(64)
    signed = [1 << bit for bit in range(63)] + [-(2**63)]
    by_seed = {tuple(noise(seed, 0, tokens).tolist()) for seed in (0, *signed)}
    by_position = {tuple(noise(0, 1 << bit, tokens).tolist()) for bit in range(40)}

    assert 65 == len(by_seed)
    assert 40 == len(by_position)


def test_noise_does_not_depend_on_its_shape() -> None:
    batch = noise(torch.arange(5)[:, None], torch.arange(7, 12)[:, None], torch.arange(300))

    assert [noise(seed, 7 + seed, token).item() for seed in range(5) for token in (0, 299)] == [
        batch[seed, token].item() for seed in range(5) for token in (0, 299)
    ]
