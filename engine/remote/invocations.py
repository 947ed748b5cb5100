"""The blocking methods of tokenizers and grammars: their arguments and the types of their results.

Text that a client wrote crosses as bytes, because it may have half of a surrogate pair, and JSON values cross as JSON,
because they may have integers of any size: the tokenizer itself refuses or renders them, with its own errors.
"""

from __future__ import annotations

import functools
import json
from abc import abstractmethod
from typing import Any, get_type_hints

import msgspec

from engine.chat_format.message import Tool
from engine.client import EngineClient
from engine.types.content import Upload
from engine.types.events import Logprob
from engine.types.request import EmbeddingInput, Grammar, RenderedPrompt
from engine.types.speech import SpeechFeatures


def to_bytes(text: str) -> bytes:
    """UTF-8 that keeps single surrogates."""
    return text.encode(errors="surrogatepass")


def to_text(data: bytes) -> str:
    """The text of `to_bytes`."""
    return data.decode(errors="surrogatepass")


class Method(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call of one method."""

    @abstractmethod
    def run(self, engine: EngineClient) -> Any:
        """Call the method of an engine, in a worker thread."""


class Encode(Method, frozen=True):
    """TokenizerClient.encode."""

    text: bytes
    add_special: bool

    def run(self, engine: EngineClient) -> list[int]:
        return engine.tokenizer.encode(to_text(self.text), add_special=self.add_special)


class EncodeTruncated(Method, frozen=True):
    """TokenizerClient.encode_truncated."""

    text: bytes

    def run(self, engine: EngineClient) -> list[int]:
        return engine.tokenizer.encode_truncated(to_text(self.text))


class EncodeGap(Method, frozen=True):
    """TokenizerClient.encode_gap."""

    before: bytes
    after: bytes
    files: tuple[tuple[bytes, bytes], ...]

    def run(self, engine: EngineClient) -> list[int]:
        files = [(to_text(name), to_text(text)) for name, text in self.files]
        return engine.tokenizer.encode_gap(to_text(self.before), to_text(self.after), files)


class EncodePrediction(Method, frozen=True):
    """TokenizerClient.encode_prediction."""

    text: bytes

    def run(self, engine: EngineClient) -> list[int]:
        return engine.tokenizer.encode_prediction(to_text(self.text))


class Decode(Method, frozen=True):
    """TokenizerClient.decode."""

    tokens: tuple[int, ...]

    def run(self, engine: EngineClient) -> str:
        return engine.tokenizer.decode(self.tokens)


class DescribeTokens(Method, frozen=True):
    """TokenizerClient.describe_tokens."""

    tokens: tuple[int, ...]

    def run(self, engine: EngineClient) -> list[Logprob]:
        return engine.tokenizer.describe_tokens(self.tokens)


class RenderChat(Method, frozen=True):
    """TokenizerClient.render_chat; `messages`, `tools` and `arguments` as JSON."""

    messages: str
    tools: str
    add_generation_prompt: bool
    continue_final_message: bool
    arguments: str
    breakpoints: tuple[tuple[int, int], ...]
    uploads: tuple[Upload, ...]

    def run(self, engine: EngineClient) -> RenderedPrompt:
        return engine.tokenizer.render_chat(
            json.loads(self.messages),
            tools=[Tool(**tool) for tool in json.loads(self.tools)],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            arguments=json.loads(self.arguments),
            breakpoints=self.breakpoints,
            uploads=self.uploads,
        )


class ExtractSpeechFeatures(Method, frozen=True):
    """SpeechClient.features."""

    upload: Upload

    def run(self, engine: EngineClient) -> SpeechFeatures:
        return engine.speech.features(self.upload)


class EmbeddingPrompt(Method, frozen=True):
    """EmbeddingTokenizerClient.prompt."""

    purpose: str | None

    def run(self, engine: EngineClient) -> str:
        return engine.embedding_tokenizer.prompt(self.purpose)


class EncodeForEmbedding(Method, frozen=True):
    """EmbeddingTokenizerClient.encode."""

    text: bytes
    prompt: str
    max_tokens: int | None

    def run(self, engine: EngineClient) -> EmbeddingInput:
        tokenizer = engine.embedding_tokenizer
        return tokenizer.encode(to_text(self.text), prompt=self.prompt, max_tokens=self.max_tokens)


class EncodePair(Method, frozen=True):
    """EmbeddingTokenizerClient.encode_pair."""

    query: bytes
    document: bytes
    max_tokens: int | None

    def run(self, engine: EngineClient) -> EmbeddingInput:
        query, document = to_text(self.query), to_text(self.document)
        return engine.embedding_tokenizer.encode_pair(query, document, max_tokens=self.max_tokens)


class Truncate(Method, frozen=True):
    """EmbeddingTokenizerClient.truncate."""

    tokens: tuple[int, ...]
    max_tokens: int | None

    def run(self, engine: EngineClient) -> EmbeddingInput:
        return engine.embedding_tokenizer.truncate(self.tokens, max_tokens=self.max_tokens)


class CompileGrammar(Method, frozen=True):
    """GrammarClient.compile; the compiled grammar stays in the worker."""

    source: bytes

    def run(self, engine: EngineClient) -> None:
        engine.grammars.compile(Grammar(to_text(self.source)))


class PrepareGrammars(Method, frozen=True):
    """GrammarClient.prepare."""

    def run(self, engine: EngineClient) -> bool:
        return engine.grammars.prepare()


Invocation = (
    Encode
    | EncodeTruncated
    | EncodeGap
    | EncodePrediction
    | Decode
    | DescribeTokens
    | RenderChat
    | ExtractSpeechFeatures
    | EmbeddingPrompt
    | EncodeForEmbedding
    | EncodePair
    | Truncate
    | CompileGrammar
    | PrepareGrammars
)


@functools.cache
def result_type(method: type[Method]) -> Any:
    """The type of the value that `run` returns."""
    return get_type_hints(method.run)["return"]
