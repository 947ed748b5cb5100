"""Tokenizers and grammars of an engine in another process. Their methods block: for worker threads, each one call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.chat_format.message import Tool
from engine.remote import invocations
from engine.remote.invocations import Invocation, to_bytes
from engine.remote.messages import TokenizerValues
from engine.types.content import Upload
from engine.types.events import Logprob
from engine.types.request import EmbeddingInput, Grammar, RenderedPrompt
from engine.types.speech import SpeechFeatures

# Calls a method in the worker, and waits for its value.
Call = Callable[[Invocation], Any]


class RemoteTokenizer:
    """A TokenizerClient; the values of the tokenizer came with the load."""

    def __init__(self, call: Call, values: TokenizerValues) -> None:
        self._call = call
        self.chat_format = values.chat_format.detect()
        self.template_names, self.has_system_role = values.template_names, values.has_system_role
        self.fill_in_middle = values.fill_in_middle
        self.has_chat_template, self.template = values.has_chat_template, values.chat_format.template

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        tokens: list[int] = self._call(invocations.Encode(to_bytes(text), add_special))
        return tokens

    def encode_truncated(self, text: str) -> list[int]:
        tokens: list[int] = self._call(invocations.EncodeTruncated(to_bytes(text)))
        return tokens

    def encode_gap(self, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        pairs = tuple((to_bytes(name), to_bytes(text)) for name, text in files)
        tokens: list[int] = self._call(invocations.EncodeGap(to_bytes(before), to_bytes(after), pairs))
        return tokens

    def encode_prediction(self, text: str) -> list[int]:
        tokens: list[int] = self._call(invocations.EncodePrediction(to_bytes(text)))
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._call(invocations.Decode(tuple(tokens)))
        return text

    def describe_tokens(self, tokens: Sequence[int]) -> list[Logprob]:
        descriptions: list[Logprob] = self._call(invocations.DescribeTokens(tuple(tokens)))
        return descriptions

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        breakpoints: Sequence[tuple[int, int]] = (),
        uploads: Sequence[Upload] = (),
    ) -> RenderedPrompt:
        prompt: RenderedPrompt = self._call(
            invocations.RenderChat(
                json.dumps(messages),
                json.dumps([asdict(tool) for tool in tools]),
                add_generation_prompt,
                continue_final_message,
                json.dumps(arguments),
                tuple(breakpoints),
                tuple(uploads),
            )
        )
        return prompt


class RemoteSpeech:
    """A SpeechClient."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def features(self, upload: Upload) -> SpeechFeatures:
        features: SpeechFeatures = self._call(invocations.ExtractSpeechFeatures(upload))
        return features


class RemoteEmbeddingTokenizer:
    """An EmbeddingTokenizerClient."""

    def __init__(self, call: Call, max_length: int) -> None:
        self._call, self.max_length = call, max_length

    def prompt(self, purpose: str | None) -> str:
        text: str = self._call(invocations.EmbeddingPrompt(purpose))
        return text

    def encode(self, text: str, *, prompt: str = "", max_tokens: int | None = None) -> EmbeddingInput:
        encoded: EmbeddingInput = self._call(invocations.EncodeForEmbedding(to_bytes(text), prompt, max_tokens))
        return encoded

    def encode_pair(self, query: str, document: str, *, max_tokens: int | None = None) -> EmbeddingInput:
        encoded: EmbeddingInput = self._call(invocations.EncodePair(to_bytes(query), to_bytes(document), max_tokens))
        return encoded

    def truncate(self, tokens: Sequence[int], *, max_tokens: int | None = None) -> EmbeddingInput:
        encoded: EmbeddingInput = self._call(invocations.Truncate(tuple(tokens), max_tokens))
        return encoded


class RemoteGrammars:
    """A GrammarClient; compiled grammars stay in the worker, which has them cached when a request names them."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def compile(self, grammar: Grammar) -> None:
        self._call(invocations.CompileGrammar(to_bytes(grammar.source)))

    def prepare(self) -> bool:
        is_missing: bool = self._call(invocations.PrepareGrammars())
        return is_missing
