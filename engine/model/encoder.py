"""Runs a model's encoder: from media to the keys and values that the model's cross layers look at.

What the encoder takes follows from the configuration: tokens, a spectrogram or the tiles of images. Media are encoded
one at a time, so that an entry depends on nothing but its media, whoever else asks (law 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.model import hooks
from engine.model.encoder_mask import EncoderMask
from engine.types.request import Array, Media, media_digest
from kvcache.encoder_cache import EncoderEntry

# How long what has no fixed length is in the sample that a model is measured and checked with.
_SAMPLE_LENGTHS = {"tokens": 8, "images": 1}


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One input of an encoder.

    shape   without the batch dimension; a word stands for a length that is free, but the same wherever it is named
    value_range  the least and the largest allowed; None: any
    max_length    how long a free length may be; None: as long as there is memory
    """

    dtype: str
    shape: tuple[int | str, ...]
    value_range: tuple[int, int] | None = None
    max_length: int | None = None

    def check(self, name: str, array: Array, lengths: dict[str, int]) -> None:
        """Raises InvalidRequest for an array that is not of this kind; `lengths` collects what free lengths are."""
        if array.dtype != self.dtype:
            raise InvalidRequest("media", f"{name} is {array.dtype}, and must be {self.dtype}")
        if not self._fits(array.shape, lengths):
            raise InvalidRequest("media", f"{name} has the shape {array.shape}, and must have {self.shape}")
        if len(array.data) != prod(array.shape) * np.dtype(self.dtype).itemsize:
            raise InvalidRequest("media", f"{name} has {len(array.data)} bytes, which is not what its shape says")
        if self.value_range is not None:
            numbers, (least, largest) = to_numpy(array), self.value_range
            if numbers.min() < least or numbers.max() > largest:
                raise InvalidRequest("media", f"the numbers of {name} lie in [{least}, {largest}]")

    def _fits(self, shape: tuple[int, ...], lengths: dict[str, int]) -> bool:
        if len(shape) != len(self.shape) or min(shape) < 1:
            return False
        pairs = zip(shape, self.shape, strict=True)
        if any(lengths.setdefault(own, size) != size if isinstance(own, str) else own != size for size, own in pairs):
            return False
        return self.max_length is None or shape[0] <= self.max_length

    def sample(self, generator: np.random.Generator) -> Array:
        """Random numbers of this kind."""
        shape = tuple(_SAMPLE_LENGTHS[length] if isinstance(length, str) else length for length in self.shape)
        if self.value_range is not None:
            return Array(
                self.dtype, shape, generator.integers(*self.value_range, shape, self.dtype, endpoint=True).tobytes()
            )
        return Array(self.dtype, shape, generator.standard_normal(shape).astype(self.dtype).tobytes())


class Encoder:
    """The encoder of a loaded model. `check` may be called on any thread, the rest on the engine's.

    model         that it is a part of
    required        whether the model can say nothing without media
    budget_bytes  what all entries together may take
    image_token   stands in a prompt for an image; it may lie behind the vocabulary, for it is never said
    """

    def __init__(self, model: Any, *, budget_bytes: int) -> None:
        """Runs the encoder once, to learn what its entries weigh. Raises whatever the model raises."""
        self.model = model
        self._device, self._dtype = next(model.parameters()).device, next(model.parameters()).dtype
        self.required = bool(model.config.is_encoder_decoder)
        self.budget_bytes = budget_bytes
        self._inputs = _encoder_inputs(model.config)
        self._main_input = next(iter(self._inputs))
        self.image_token: int | None = getattr(model.config, "image_token_index", None)
        self._start_token = getattr(model.config, "decoder_start_token_id", None) or 0
        # One cache for both kinds of layers holds the decoder's own keys too: those that are there without media.
        self._decoder_layers = frozenset[int]() if self.required else frozenset(self._run({}))
        sample = self.sample()
        self._bytes_per_element = self.encode(sample).bytes / _element_count(sample, self._main_input)

    def check(self, media: Media | None, prompt: Sequence[int]) -> None:
        """Raises InvalidRequest for media that the encoder cannot take or the memory cannot hold; computes nothing."""
        images = sum(token == self.image_token for token in prompt)
        if media is None:
            if self.required or images:
                raise InvalidRequest("media", f"the model needs media for this: {', '.join(self._inputs)}")
            return
        arrays = dict(media.arrays)
        if sorted(name for name, _ in media.arrays) != sorted(self._inputs):
            raise InvalidRequest(
                "media", f"the model's encoder takes {', '.join(self._inputs)}, not {', '.join(arrays)}"
            )
        lengths: dict[str, int] = {}
        for name, field in self._inputs.items():
            field.check(name, arrays[name], lengths)
        if media.digest != media_digest(media.arrays):
            raise InvalidRequest("media", "the digest is not that of the content")
        if lengths.get("images", images) != images:
            raise InvalidRequest("media", f"the prompt has {images} image tokens for {lengths['images']} images")
        size = self.entry_bytes(media)
        if size > self.budget_bytes:
            raise InvalidRequest(
                "media", f"encoded it takes {size} bytes, and all encoded media may take {self.budget_bytes}"
            )

    def entry_bytes(self, media: Media) -> int:
        """What the entry of some media will take: as much for a number of the main input as in the sample."""
        return round(self._bytes_per_element * _element_count(media, self._main_input))

    def encode(self, media: Media) -> EncoderEntry:
        """Run the encoder and the projections of the cross layers."""
        made = self._run(self._tensors(media))
        return EncoderEntry(
            media.digest, {layer: pair for layer, pair in made.items() if layer not in self._decoder_layers}
        )

    def mask(self, entry: EncoderEntry, media: Media, prompt: Sequence[int]) -> EncoderMask:
        """What a prompt's rows see of an entry: images are seen from their token on, other things from the start."""
        tiles = dict(media.arrays).get("aspect_ratio_mask")
        if tiles is None or self.image_token is None:
            return EncoderMask(entry)
        there = torch.from_numpy(to_numpy(tiles).copy()).bool()
        shown = _visible_images(prompt, self.image_token, len(there))
        return EncoderMask(entry, (shown[:, :, None] & there).flatten(1))

    def sample(self) -> Media:
        """Random media, the same every time."""
        chance = np.random.default_rng(0)
        return Media.of({name: field.sample(chance) for name, field in self._inputs.items()})

    def sample_prompt(self, prompt: Sequence[int]) -> list[int]:
        """A prompt that shows the sample, from its third token on where the place matters."""
        return (
            list(prompt) if self.required or self.image_token is None else [*prompt[:2], self.image_token, *prompt[3:]]
        )

    def reference_inputs(self, media: Media, prompt: Sequence[int]) -> dict[str, Tensor]:
        """What the model takes to read media and a prompt by itself, without cells."""
        tokens = torch.tensor([prompt], device=self._device)
        if self.required:
            return {**self._tensors(media), "decoder_input_ids": tokens}
        parts = self.mask(EncoderEntry(media.digest, {}), media, prompt).parts
        inputs = {**self._tensors(media), "input_ids": tokens}
        if parts is not None:
            images = dict(media.arrays)["aspect_ratio_mask"].shape
            inputs["cross_attention_mask"] = parts.view(1, len(prompt), *images).long().to(self._device)
        return inputs

    def _run(self, media: Mapping[str, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        with torch.inference_mode():
            return hooks.encode(self.model, media, self._start_token)

    def _tensors(self, media: Media) -> dict[str, Tensor]:
        tensors = {
            name: torch.from_numpy(to_numpy(array).copy())[None].to(self._device) for name, array in media.arrays
        }
        return {name: one.to(self._dtype) if one.is_floating_point() else one for name, one in tensors.items()}


def has_encoder(config: Any) -> bool:
    """Whether a model of this configuration looks at what an encoder makes."""
    return bool(config.is_encoder_decoder or getattr(config.get_text_config(), "cross_attention_layers", None))


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """The numbers of an array that was checked."""
    return np.frombuffer(array.data, dtype=np.dtype(array.dtype).newbyteorder("<")).reshape(array.shape)


def _element_count(media: Media, name: str) -> int:
    return prod(dict(media.arrays)[name].shape)


def _encoder_inputs(config: Any) -> dict[str, EncoderInput]:
    """The inputs of a model's encoder, the one that its work grows with first."""
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        size, tiles = vision.image_size, vision.max_num_tiles
        height, width = (size, size) if isinstance(size, int) else size
        return {
            "pixel_values": EncoderInput("float32", ("images", tiles, vision.num_channels, height, width)),
            "aspect_ratio_ids": EncoderInput("int64", ("images",), (1, vision.max_aspect_ratio_id)),
            "aspect_ratio_mask": EncoderInput("int64", ("images", tiles), (0, 1)),
        }
    bins = getattr(config, "num_mel_bins", None)
    if bins is not None:
        # The encoder's convolutions halve the frames.
        return {"input_features": EncoderInput("float32", (bins, 2 * config.max_source_positions))}
    most = getattr(config, "max_position_embeddings", None)
    return {"input_ids": EncoderInput("int64", ("tokens",), (0, config.vocab_size - 1), most)}


def _visible_images(prompt: Sequence[int], image_token: int, images: int) -> Tensor:
    """Which images each row sees: [rows, images].

    An image is seen from its token on until the next one that does not follow at once (transformers'
    get_cross_attention_token_mask).
    """
    shown = torch.zeros(len(prompt), images, dtype=torch.bool)
    seen: list[int] = []
    image, latest = 0, -2
    for row, token in enumerate(prompt):
        if token == image_token:
            seen = [*seen, image] if latest == row - 1 else [image]
            image, latest = image + 1, row
        shown[row, seen] = True
    return shown
