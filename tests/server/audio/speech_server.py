"""A server with a tiny model that transcribes, and what transformers makes of the same sounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, WhisperForConditionalGeneration

from engine.engine import Engine
from engine.media.speech import SpeechProcessor
from server.configuration.settings import Settings
from tests.server.fakes import serve_in_thread


@contextmanager
def speech_server(folder: Path, **settings: Any) -> Iterator[str]:
    """The address of a server."""
    options = Settings(model=str(folder), served_names=("speech",), slots=4, drafter="none", **settings)
    with serve_in_thread(Engine(options.engine_config()), options) as port:
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as waiting:
            while (answer := waiting.get(f"{address}/ready")).status_code != 200:
                assert "engine_dead" not in answer.text, answer.text
        yield address


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


@dataclass
class Reference:
    """transformers on a checkpoint."""

    folder: Path
    dtype: torch.dtype = torch.float32

    @cached_property
    def model(self) -> Any:
        return WhisperForConditionalGeneration.from_pretrained(self.folder, dtype=self.dtype).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def processor(self) -> SpeechProcessor:
        return SpeechProcessor.read(self.folder)

    def segments(self, samples: NDArray[np.float32], **options: Any) -> list[tuple[float, float, str]]:
        """Start, end and text of the segments with text, by sequential long-form generation at temperature 0."""
        features = torch.from_numpy(self.processor.features(samples))[None].to(self.dtype)
        mask = torch.ones(1, features.shape[-1], dtype=torch.long)
        with torch.inference_mode():
            result = self.model.generate(
                features, attention_mask=mask, return_timestamps=True, return_segments=True, do_sample=False, **options
            )
        segments = []
        for segment in result["segments"][0]:
            if text := self.text(segment["tokens"].tolist()):
                segments.append((round(float(segment["start"]), 3), round(float(segment["end"]), 3), text))
        return segments

    def text(self, tokens: list[int]) -> str:
        """The text of tokens without timestamps."""
        first = self.model.generation_config.no_timestamps_token_id
        kept = [token for token in tokens if token < first]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))
