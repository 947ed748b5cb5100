"""Processes one image or sound for a model, with the processor of its checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import av
import numpy as np
import PIL
import transformers
from PIL import Image

from engine.errors import InvalidContent
from engine.media.decode import DecodeError, image_from, sound_from
from engine.text.contents import ProcessedContent
from engine.types.array import Array
from engine.types.content import ContentKind, Upload

_NOUNS: dict[ContentKind, str] = {"image": "image", "audio": "sound"}
# Of an image with the detail "low".
_LOW_DETAIL_SIDE = 512
# Switches of image processors that cut an image into tiles.
_TILE_SWITCHES = ("crop_to_patches", "do_image_splitting", "do_pan_and_scan")
_SAMPLE_RATE = 16_000
# Of a sound, if the feature extractor has no window.
_MAX_SECONDS = 3600.0
_MAX_REASON_CHARACTERS = 200
_SAMPLE_SIDE, _SAMPLE_SECONDS = 64, 1.0


class MediaProcessor:
    """Decodes and processes contents, each alone: its arrays depend on no other content of a prompt.

    markers       what a chat template writes for a content, by kind
    placeholders  tokens that the model replaces by features
    refused       kinds that the processor has, but cannot process here, with the reason
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._arguments = processor._merge_kwargs(
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="np"
        )
        self._identity = _identity(processor)
        self.refused: dict[ContentKind, str] = {}
        self.markers: dict[ContentKind, str] = {}
        self.placeholders = frozenset(
            token for token in (*processor.image_token_ids, *processor.audio_token_ids) if token is not None
        )
        for kind in _kinds(processor):
            reason = self._sample_fault(kind)
            if reason:
                self.refused[kind] = reason
            else:
                self.markers[kind] = self._marker(kind)

    def process(self, upload: Upload) -> ProcessedContent:
        """Decode and process a content. Raises InvalidContent, and MemoryError."""
        try:
            if upload.kind == "image":
                image = image_from(upload.data, upload.max_pixels)
                pixels = image.width * image.height
                return replace(self._process_image(image, low_detail=upload.detail == "low"), pixels=pixels)
            return self._process_sound(sound_from(upload.data, self._rate, self._max_seconds))
        except DecodeError as error:
            reason = f"the {_NOUNS[upload.kind]} {error.reason}"
            raise InvalidContent(upload.field, reason, error.problem) from error

    @property
    def _rate(self) -> int:
        return int(getattr(self._processor._audio_processor, "sampling_rate", _SAMPLE_RATE))

    @property
    def _max_seconds(self) -> float:
        """A longer sound would be cut to the window of the feature extractor."""
        window = getattr(self._processor._audio_processor, "n_samples", None)
        return window / self._rate if window else _MAX_SECONDS

    def _process_image(self, image: Image.Image, *, low_detail: bool) -> ProcessedContent:
        arguments = dict(self._arguments["images_kwargs"])
        if low_detail:
            image.thumbnail((_LOW_DETAIL_SIDE, _LOW_DETAIL_SIDE), Image.Resampling.BICUBIC)
            arguments |= {name: False for name in _TILE_SWITCHES if hasattr(self._processor.image_processor, name)}
        with np.errstate(all="ignore"):
            arrays, replacements = _checked(self._processor._process_images, [image], arguments)
        return self._content("image", arrays, replacements)

    def _process_sound(self, samples: np.ndarray[Any, np.dtype[np.float32]]) -> ProcessedContent:
        arguments = {**self._arguments["audio_kwargs"], "sampling_rate": self._rate}
        arrays, replacements = _checked(self._processor._process_audio, [samples], arguments)
        return self._content("audio", arrays, replacements)

    def _content(self, kind: ContentKind, inputs: Mapping[str, Any], replacements: list[str]) -> ProcessedContent:
        if len(replacements) != 1:
            raise DecodeError("is not replaced by placeholders", "format")
        unused = set(self._processor.unused_input_names)
        names = set(self._processor.model_input_names) - unused
        arrays = tuple((name, _array(value)) for name, value in sorted(inputs.items()) if name in names)
        return ProcessedContent(kind, replacements[0], arrays, self._digest(replacements[0], arrays))

    def _digest(self, replacement: str, arrays: tuple[tuple[str, Array], ...]) -> bytes:
        shapes = [(name, array.dtype, array.shape) for name, array in arrays]
        digest = hashlib.sha256(json.dumps([self._identity, replacement, shapes]).encode())
        for _, array in arrays:
            digest.update(array.data)
        return digest.digest()

    def _marker(self, kind: ContentKind) -> str:
        return str(self._processor.image_token if kind == "image" else self._processor.audio_token)

    def _sample_fault(self, kind: ContentKind) -> str:
        """Why contents of a kind cannot be processed, or ""."""
        try:
            if kind == "image":
                sample = self._process_image(Image.new("RGB", (_SAMPLE_SIDE, _SAMPLE_SIDE)), low_detail=False)
            else:
                sample = self._process_sound(np.zeros(int(_SAMPLE_SECONDS * self._rate), np.float32))
        except DecodeError as error:
            return error.reason
        tokenizer = self._processor.tokenizer
        tokens = tokenizer(sample.replacement, add_special_tokens=False)["input_ids"]
        if not self.placeholders.intersection(tokens):
            return "has no placeholders"
        marker = self._marker(kind)
        return "" if marker in tokenizer.get_added_vocab() else f"has a marker that is no token: {marker}"


def _checked(process: Any, contents: list[Any], arguments: dict[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The result of a processor, whose exceptions for sizes that it does not support are of many types."""
    try:
        inputs, replacements = process(contents, **arguments)
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError(f"is refused by the processor of the model: {error_line(error)}", "format") from error
    return inputs, replacements


def _kinds(processor: Any) -> list[ContentKind]:
    kinds: list[ContentKind] = []
    if getattr(processor, "image_processor", None) is not None and getattr(processor, "image_token", None):
        kinds.append("image")
    if processor._audio_processor is not None and getattr(processor, "audio_token", None):
        kinds.append("audio")
    return kinds


def error_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:_MAX_REASON_CHARACTERS]


def _array(value: Any) -> Array:
    array = np.ascontiguousarray(np.asarray(value))
    if array.dtype.hasobject:
        raise DecodeError("is refused by the processor of the model: its arrays have no common shape", "format")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Array(array.dtype.name, array.shape, little.tobytes())


def _identity(processor: Any) -> list[str]:
    """All that decides the arrays of a content, besides its bytes."""
    versions = [module.__version__ for module in (transformers, PIL, np, av)]
    parts = [getattr(processor, name, None) for name in ("image_processor", "_audio_processor")]
    settings = [part.to_json_string() for part in parts if part is not None]
    return [type(processor).__qualname__, *versions, *settings]
