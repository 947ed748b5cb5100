"""Runs a model's encoder: from media to the keys and values of the model's cross-attention layers.

The configuration determines the inputs: tokens, a spectrogram, or tiles of images. Media are encoded one at a time, so
an entry depends on its media only.
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
from engine.step.encoder_mask import EncoderMask
from engine.types.array import Array
from engine.types.request import Media, media_digest
from kvcache.encoder_cache import EncoderEntry

# Free lengths of the sample media that measure and check a model.
_SAMPLE_LENGTHS = {"tokens": 8, "images": 1}


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One input of an encoder.

    shape        without the batch dimension; a word names a free length, equal wherever the word occurs
    value_range  the smallest and the largest value; None: any
    max_length   limit of a free length; None: the memory is the limit
    """

    dtype: str
    shape: tuple[int | str, ...]
    value_range: tuple[int, int] | None = None
    max_length: int | None = None

    def check(self, name: str, array: Array, lengths: dict[str, int]) -> None:
        """Raises InvalidRequest unless the array has this dtype, shape and range; collects free `lengths`."""
        if array.dtype != self.dtype:
            raise InvalidRequest("media", f"{name} is {array.dtype}, and must be {self.dtype}")
        if not self._fits(array.shape, lengths):
            raise InvalidRequest("media", f"{name} has the shape {array.shape}, and must have {self.shape}")
        if len(array.data) != prod(array.shape) * np.dtype(self.dtype).itemsize:
            raise InvalidRequest("media", f"{name} has {len(array.data)} bytes, which does not match its shape")
        if self.value_range is not None:
            values, (least, largest) = to_numpy(array), self.value_range
            if values.min() < least or values.max() > largest:
                raise InvalidRequest("media", f"the values of {name} must lie in [{least}, {largest}]")

    def _fits(self, shape: tuple[int, ...], lengths: dict[str, int]) -> bool:
        if len(shape) != len(self.shape) or min(shape) < 1:
            return False
        pairs = zip(shape, self.shape, strict=True)
        if any(lengths.setdefault(dim, size) != size if isinstance(dim, str) else dim != size for size, dim in pairs):
            return False
        return self.max_length is None or shape[0] <= self.max_length

    def sample(self, generator: np.random.Generator) -> Array:
        """A random array of this dtype, shape and range."""
        shape = tuple(_SAMPLE_LENGTHS[length] if isinstance(length, str) else length for length in self.shape)
        if self.value_range is not None:
            return Array(
                self.dtype, shape, generator.integers(*self.value_range, shape, self.dtype, endpoint=True).tobytes()
            )
        return Array(self.dtype, shape, generator.standard_normal(shape).astype(self.dtype).tobytes())


class Encoder:
    """The encoder of a loaded model. `check` may be called on any thread, the rest on the engine's.

    model         the whole model
    required      whether every request needs media
    budget_bytes  memory of all entries
    image_token   placeholder of an image in a prompt; never sampled, so it may lie beyond the vocabulary
    """

    def __init__(self, model: Any, *, budget_bytes: int) -> None:
        """Runs the encoder once to measure the size of its entries. Raises whatever the model raises."""
        self.model = model
        self._device, self._dtype = next(model.parameters()).device, next(model.parameters()).dtype
        self.required = bool(model.config.is_encoder_decoder)
        self.budget_bytes = budget_bytes
        self._inputs = _encoder_inputs(model.config)
        self._main_input = next(iter(self._inputs))
        self.image_token: int | None = getattr(model.config, "image_token_index", None)
        self._start_token = getattr(model.config, "decoder_start_token_id", None) or 0
        # With one cache for both kinds of layers, the layers that have keys without media are the decoder's own.
        self._decoder_layers = frozenset[int]() if self.required else frozenset(self._run({}))
        sample = self.sample()
        self._bytes_per_element = self.encode(sample).bytes / _element_count(sample, self._main_input)

    def check(self, media: Media | None, prompt: Sequence[int]) -> None:
        """Raises InvalidRequest for media of the wrong form or beyond the memory budget; computes nothing."""
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
        """Estimated size of the entry of some media, proportional to the elements of the main input."""
        return round(self._bytes_per_element * _element_count(media, self._main_input))

    def encode(self, media: Media) -> EncoderEntry:
        """Run the encoder and the key and value projections of the cross-attention layers."""
        layers = self._run(self._tensors(media))
        return EncoderEntry(
            media.digest, {layer: pair for layer, pair in layers.items() if layer not in self._decoder_layers}
        )

    def mask(self, entry: EncoderEntry, media: Media, prompt: Sequence[int]) -> EncoderMask:
        """The encoder mask of a prompt: a token attends to the images before it, or to all other media."""
        tiles = dict(media.arrays).get("aspect_ratio_mask")
        if tiles is None or self.image_token is None:
            return EncoderMask(entry)
        valid = torch.from_numpy(to_numpy(tiles).copy()).bool()
        images = _visible_images(prompt, self.image_token, len(valid))
        return EncoderMask(entry, (images[:, :, None] & valid).flatten(1))

    def sample(self) -> Media:
        """Random media, the same at every call."""
        generator = np.random.default_rng(0)
        return Media.of({name: field.sample(generator) for name, field in self._inputs.items()})

    def sample_prompt(self, prompt: Sequence[int]) -> list[int]:
        """A prompt for the sample media, with its image token, if there is one, as the third token."""
        return (
            list(prompt) if self.required or self.image_token is None else [*prompt[:2], self.image_token, *prompt[3:]]
        )

    def reference_inputs(self, media: Media, prompt: Sequence[int]) -> dict[str, Tensor]:
        """Inputs of the unmodified model for media and a prompt, without cells."""
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
        return {
            name: tensor.to(self._dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }


def has_encoder(config: Any) -> bool:
    """Whether a model of this configuration has cross attention to an encoder."""
    return bool(config.is_encoder_decoder or getattr(config.get_text_config(), "cross_attention_layers", None))


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """The values of a validated array."""
    return np.frombuffer(array.data, dtype=np.dtype(array.dtype).newbyteorder("<")).reshape(array.shape)


def _element_count(media: Media, name: str) -> int:
    return prod(dict(media.arrays)[name].shape)


def _encoder_inputs(config: Any) -> dict[str, EncoderInput]:
    """The inputs of a model's encoder; the main input, which determines the cost, is the first."""
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
        # The encoder's convolutions halve the number of frames.
        return {"input_features": EncoderInput("float32", (bins, 2 * config.max_source_positions))}
    max_length = getattr(config, "max_position_embeddings", None)
    return {"input_ids": EncoderInput("int64", ("tokens",), (0, config.vocab_size - 1), max_length)}


def _visible_images(prompt: Sequence[int], image_token: int, images: int) -> Tensor:
    """Which images each token attends to: [tokens, images].

    An image is visible from its token until the next image token that does not follow immediately (transformers'
    get_cross_attention_token_mask).
    """
    visible = torch.zeros(len(prompt), images, dtype=torch.bool)
    current: list[int] = []
    image, latest = 0, -2
    for position, token in enumerate(prompt):
        if token == image_token:
            current = [*current, image] if latest == position - 1 else [image]
            image, latest = image + 1, position
        visible[position, current] = True
    return visible
