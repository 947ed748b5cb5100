"""Whether and how a loaded model transcribes speech, by its generation configuration and feature extractor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from engine.media.speech_reader import SpeechReader
from engine.types.request import TimestampRule
from engine.types.speech import SpeechInfo, SpeechLanguage

log = logging.getLogger("cellar.engine")

# Durations of Whisper's output, as in transformers' `generate`.
_FRAME_SECONDS = 0.01
_FRAMES_PER_TIMESTAMP = 2
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)


def speech_reader(model: Any, folder: Path) -> SpeechReader | None:
    """The started reader of sounds for a model that turns spectrograms into text with timestamps; None: it does not."""
    settings, config = getattr(model, "generation_config", None), model.config
    has_timestamps = getattr(settings, "no_timestamps_token_id", None) is not None
    if not (has_timestamps and config.is_encoder_decoder and hasattr(config, "num_mel_bins")):
        return None
    reason, rate = _extractor(config, folder)
    if reason:
        log.warning("sounds are not transcribed: %s", reason)
        return None
    reader = SpeechReader(folder, sampling_rate=rate)
    reader.start()
    return reader


def _extractor(config: Any, folder: Path) -> tuple[str, int]:
    """Why the feature extractor of a model cannot be used, or "", and its samples a second."""
    try:
        extractor = AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        frames, bins = extractor.nb_max_frames, extractor.feature_size
        rate = int(extractor.sampling_rate)
    except _READ_ERRORS as error:
        return f"the feature extractor cannot be read ({type(error).__name__})", 0
    if (bins, frames) != (config.num_mel_bins, 2 * config.max_source_positions):
        return f"the feature extractor makes {bins} x {frames} features", 0
    return "", rate


def speech_info(model: Any) -> SpeechInfo:
    """The tokens of a model that transcribes."""
    settings, config = model.generation_config, model.config
    first = settings.no_timestamps_token_id + 1
    languages = getattr(settings, "lang_to_id", None) or {}
    rule = TimestampRule(
        first=first,
        end_token=_first(settings.eos_token_id),
        suppressed=tuple(settings.suppress_tokens or ()),
        suppressed_first=tuple(settings.begin_suppress_tokens or ()),
        max_initial=getattr(settings, "max_initial_timestamp_index", None),
    )
    return SpeechInfo(
        start_token=settings.decoder_start_token_id,
        previous_token=getattr(settings, "prev_sot_token_id", None),
        no_speech_token=settings.no_timestamps_token_id - 1,
        languages=tuple(_language(token.strip("<|>"), number) for token, number in languages.items()),
        tasks=tuple((getattr(settings, "task_to_id", None) or {}).items()) if languages else (),
        rule=rule,
        window_frames=2 * config.max_source_positions,
        frame_seconds=_FRAME_SECONDS,
        frames_per_timestamp=_FRAMES_PER_TIMESTAMP,
        max_tokens=config.max_target_positions,
    )


def _language(code: str, token: int) -> SpeechLanguage:
    return SpeechLanguage(code, LANGUAGES.get(code, code), token)


def _first(tokens: int | list[int]) -> int:
    return tokens if isinstance(tokens, int) else tokens[0]
