"""MediaSandbox without its subprocess, whose start imports transformers: for tests of what is done with contents."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import pytest

from engine.load import load
from engine.media import speech_reader
from engine.media.processor import MediaProcessor
from engine.media.read_processor import read_processor
from engine.media.sandbox import MediaDescription, MediaSandbox, SandboxUnavailable
from engine.media.speech import SpeechProcessor
from engine.text.contents import ProcessedContent
from engine.types.content import Upload


class MediaInProcess(MediaSandbox):
    """Processes contents in the thread of the caller, without limits."""

    def start(self) -> None:
        pass

    def describe(self) -> MediaDescription:
        try:
            processor = self._processor
        except Exception as error:
            raise SandboxUnavailable(str(error)) from error
        return MediaDescription(processor.markers, frozenset(processor.placeholders), processor.refused)

    def process(self, upload: Upload) -> ProcessedContent:
        return self._processor.process(upload)

    @cached_property
    def _processor(self) -> MediaProcessor | SpeechProcessor:
        folder, *_, purpose = self._arguments
        assert isinstance(folder, Path)
        return SpeechProcessor.read(folder) if purpose == "speech" else MediaProcessor(read_processor(folder))


def use_media_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models whose contents are processed in this process."""
    monkeypatch.setattr(load, "MediaSandbox", MediaInProcess)
    monkeypatch.setattr(speech_reader, "MediaSandbox", MediaInProcess)
