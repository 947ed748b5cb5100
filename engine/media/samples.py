"""A random image as the processor of a checkpoint prepares it: the load measures and checks a model with it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoProcessor

from engine.media.capture import ContentsUnsupported
from engine.media.encoder import ContentSample
from engine.types.array import Array
from engine.types.content import Content
from engine.types.request import media_digest

# Files of which a folder has at least one if its model can read images or audio.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Height and width of the image: tall enough for a second tile of small processors.
_SIZE = (96, 64)
_TEXT_ARRAYS = ("input_ids", "attention_mask", "labels")
_PROCESSOR_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, IndexError),
    *(RuntimeError, NotImplementedError),
)


def image_sample(folder: Path) -> ContentSample:
    """Raises ContentsUnsupported for a processor that cannot be constructed, or that fails."""
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False, backend="pil")
        return _image_sample(processor)
    except _PROCESSOR_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise ContentsUnsupported(f"its image processor does not run ({type(error).__name__}: {reason})") from error


def _image_sample(processor: Any) -> ContentSample:
    # Of Gemma 3, `image_token` is the placeholder, of which a prompt has one for each row of features.
    marker = getattr(processor, "boi_token", None) or processor.image_token
    pixels = np.random.default_rng(0).integers(0, 256, (*_SIZE, 3), dtype=np.uint8)
    output = processor(text=[marker], images=[pixels], return_tensors="np", text_kwargs={"add_special_tokens": False})
    tokens = tuple(int(token) for token in output["input_ids"][0])
    arrays = tuple((name, _array(values)) for name, values in output.items() if name not in _TEXT_ARRAYS)
    digest = hashlib.sha256(media_digest(arrays)).digest()
    return ContentSample(Content("image", 0, len(tokens), digest, arrays), tokens)


def _array(values: Any) -> Array:
    array = np.ascontiguousarray(values)
    return Array(str(array.dtype), array.shape, array.tobytes())
