"""Tiny random models that transcribe, in folders for the loader, and sounds for them."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

RATE = 16_000
# A window of one second: 100 frames, 50 positions of the encoder.
POSITIONS, BINS = 50, 4
END, START, LANGUAGES, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = (
    256,
    257,
    258,
    261,
    262,
    263,
    264,
    265,
)
FIRST = NO_TIMESTAMPS + 1
VOCABULARY = FIRST + POSITIONS + 1
CODES = ("en", "de", "fr")
SPECIAL = (
    "endoftext",
    "startoftranscript",
    *CODES,
    "translate",
    "transcribe",
    "startofprev",
    "nospeech",
    "notimestamps",
)


def save_speech_model(folder: Path, *, seed: int = 0, multilingual: bool = True, max_tokens: int = 64) -> Path:
    """Write a tiny Whisper with tokenizer and feature extractor; weights are wide enough for varied texts."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=BINS,
        max_source_positions=POSITIONS,
        max_target_positions=max_tokens,
        decoder_start_token_id=START,
        eos_token_id=END,
        bos_token_id=END,
        pad_token_id=END,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[-1] ** -0.5)
    settings = model.generation_config = GenerationConfig()
    settings.eos_token_id = settings.pad_token_id = settings.bos_token_id = END
    settings.decoder_start_token_id, settings.max_length = START, max_tokens
    settings.no_timestamps_token_id, settings.prev_sot_token_id = NO_TIMESTAMPS, PREVIOUS
    settings.suppress_tokens = [7, 8, START, PREVIOUS, NO_SPEECH]
    settings.begin_suppress_tokens, settings.max_initial_timestamp_index = [32, END], 25
    settings.is_multilingual, settings.return_timestamps = multilingual, False
    if multilingual:
        settings.lang_to_id = {f"<|{code}|>": LANGUAGES + index for index, code in enumerate(CODES)}
        settings.task_to_id = {"translate": TRANSLATE, "transcribe": TRANSCRIBE}
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=BINS, chunk_length=1).save_pretrained(folder)
    return folder


def sound(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """Samples of chirps and noise: 16-bit values, so that a WAV file has exactly these."""
    generator, time = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    envelope = 0.5 + 0.5 * np.sin(2 * np.pi * generator.uniform(0.3, 3) * time)
    tone = np.sin(2 * np.pi * generator.uniform(200, 3000) * time * (1 + 0.2 * time))
    samples = 0.4 * envelope * tone + 0.05 * generator.standard_normal(len(time))
    return (np.round(samples.clip(-1, 1) * 32767).astype(np.int16) / 32768).astype(np.float32)


def wav(samples: NDArray[np.float32]) -> bytes:
    """A WAV file of samples of `sound`."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(np.round(samples * 32768).astype("<i2").tobytes())
    return file.getvalue()


def _tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, the special tokens, and the timestamps."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    # Whisper's timestamps are added tokens, but not special ones.
    tokenizer.add_tokens([AddedToken(f"<|{index * 0.02:.2f}|>", special=False) for index in range(POSITIONS + 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    assert len(fast) == VOCABULARY
    return fast
