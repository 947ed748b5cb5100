"""Prepares a loaded multimodal model, its processor and its tokenizer for images and sounds in prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from engine.errors import InvalidContent, ModelUnsupported, Overloaded
from engine.load.read.checkpoint import error_line
from engine.load.read.skeleton import has_tower
from engine.load.read.text_part import RUN_ERRORS
from engine.media.capture import ContentsUnsupported
from engine.media.encoder import CapturingEncoder, ContentSample
from engine.media.samples import sample_shapes, sample_upload
from engine.media.sandbox import MediaSandbox, SandboxUnavailable
from engine.step.content import ContentEncoder
from engine.text.template_process import TemplateTooCostly, TemplateUnavailable
from engine.text.tokenizer import Tokenizer
from engine.types.content import Content, ContentKind, Upload


def content_encoder(
    name: str, model: Any, processor: MediaSandbox, tokenizer: Tokenizer, *, budget_bytes: int
) -> CapturingEncoder:
    """The encoder of the kinds of content that the processor and the chat template have; the tokenizer renders these
    kinds then. Raises ModelUnsupported.
    """
    try:
        kinds = _kinds(processor, tokenizer, model.config)
        samples = [_sample(processor, tokenizer, sample_upload(kind)) for kind in kinds]
        encoder = CapturingEncoder(model, samples, budget_bytes=budget_bytes)
        if encoder.bidirectional and "image" in encoder.kinds:
            encoder.measure_ranges(_sample(processor, tokenizer, upload) for upload in sample_shapes())
        return encoder
    except ContentsUnsupported as error:
        raise ModelUnsupported(name, error.reason) from error
    except SandboxUnavailable as error:
        raise ModelUnsupported(name, f"its processor cannot be read: {error}") from error
    except (InvalidContent, Overloaded) as error:
        raise ModelUnsupported(name, f"its processor fails: {error}") from error
    except (TemplateTooCostly, TemplateUnavailable) as error:
        raise ModelUnsupported(name, f"its chat template {error}") from error
    except RUN_ERRORS as error:
        raise ModelUnsupported(name, f"its vision or audio tower does not run ({error_line(error)})") from error


def with_ranges(config: EngineConfig, encoder: ContentEncoder | None) -> EngineConfig:
    """The settings with a chunk for the longest range of the encoder: a step computes such a range whole."""
    return config if encoder is None else replace(config, chunk=max(config.chunk, encoder.longest_range))


def _kinds(processor: MediaSandbox, tokenizer: Tokenizer, config: Any) -> Iterable[ContentKind]:
    refused = processor.describe().refused
    if not processor.markers:
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in refused.items())
        raise ContentsUnsupported(f"its processor reads no image and no sound ({reasons})")
    # The processor of a family may read more than one of its models: the large ones of Gemma 4 have no audio tower.
    markers = {kind: marker for kind, marker in processor.markers.items() if has_tower(config, kind)}
    if not markers:
        raise ContentsUnsupported(f"it has no tower for its processor, which reads {' and '.join(processor.markers)}")
    kinds = tokenizer.use_content_processor(processor, markers)
    if not kinds:
        raise ContentsUnsupported("its chat template shows no image and no sound")
    return sorted(kinds, key=list(processor.markers).index)


def _sample(processor: MediaSandbox, tokenizer: Tokenizer, upload: Upload) -> ContentSample:
    processed = processor.process(upload)
    tokens = tuple(tokenizer.encode(processed.replacement, add_special=False))
    return ContentSample(Content(upload.kind, 0, len(tokens), processed.digest, processed.arrays), tokens)
