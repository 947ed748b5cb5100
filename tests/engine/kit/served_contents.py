"""Multimodal models as the engine serves them, and their text by `generate`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.load.load import LoadedModel
from engine.load.read.skeleton import install_hooks
from engine.media.encoder import CapturingEncoder, ContentSample
from engine.model import hooks
from engine.model.layers import find_cached_layers
from engine.native.detection import find_decoder
from engine.native.runner import NativeRunner
from engine.native.step_library import step_library
from engine.run.packed import PackedRunner
from engine.run.runner import FirstSupporting, ModelRunner
from engine.step.content import ContentEntry, PromptLayout
from engine.step.input import StepFeatures, StepInput
from engine.step.output import StepOutput
from engine.types.content import Content
from engine.types.request import Request
from tests.engine.kit.contents import FAMILIES, VOCABULARY, Family, Prompt, prompt_of, sample, tiny_model
from tests.engine.kit.play import ask

COUNT, CONTEXT = 8, 160


class CountingEncoder(CapturingEncoder):
    """Counts the contents that it encodes, by digest; fails for those in `broken`."""

    def __init__(self, model: Any, samples: Sequence[ContentSample], *, budget_bytes: int) -> None:
        self.encoded: list[bytes] = []
        self.broken: set[bytes] = set()
        super().__init__(model, samples, budget_bytes=budget_bytes)
        self.encoded.clear()

    def encode(self, content: Content, tokens: Sequence[int]) -> ContentEntry:
        self.encoded.append(content.digest)
        if content.digest in self.broken:
            raise RuntimeError("a broken tower")
        return super().encode(content, tokens)


class EmbeddingRows:
    """An encoder of token ranges as contents: their rows are the embeddings of their tokens."""

    def __init__(self, model: Any, *, budget_bytes: int = 2**30) -> None:
        self.budget_bytes, self.longest_range = budget_bytes, 0
        self.modules: Collection[torch.nn.Module] = ()
        self._embeddings = model.get_input_embeddings()

    def entry_bytes(self, content: Content) -> int:
        return (content.stop - content.start) * self._embeddings.weight[0].nbytes

    def encode(self, content: Content, tokens: Sequence[int]) -> ContentEntry:
        with torch.inference_mode():
            return ContentEntry(content.digest, self._embeddings(torch.tensor(tokens)))

    def layout(self, tokens: Sequence[int], contents: Sequence[Content]) -> PromptLayout:
        return PromptLayout(bidirectional=tuple((content.start, content.stop) for content in contents))

    def range_length(self, tokens: Sequence[int], contents: Sequence[Content]) -> int:
        return max(content.stop - content.start for content in contents)

    def is_bidirectional(self, layer: int) -> bool:
        return True


class RecordingRunner(ModelRunner):
    """Keeps the inputs of all steps of a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.steps = runner, list[StepInput]()
        self.layers, self.long_factor_layers = runner.layers, runner.long_factor_layers
        self.switch, self.sampler = runner.switch, runner.sampler

    def supports(self, features: StepFeatures) -> str | None:
        return self._runner.supports(features)

    def run(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        return self._runner.run(step)


@dataclass
class ContentModel:
    """A multimodal model.

    loaded  with a packed runner
    """

    family: Family
    loaded: LoadedModel
    encoder: CountingEncoder
    images: list[ContentSample]
    _reference: Any

    def prompt(self, *parts: int | ContentSample) -> Prompt:
        return prompt_of(self.family, self._reference, *parts)

    def expected(self, prompt: Prompt, count: int = COUNT) -> list[int]:
        """The tokens of `generate`."""
        if hasattr(self._reference.base_model, "rope_deltas"):
            self._reference.base_model.rope_deltas = None
        settings = {"do_sample": False, "max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            output = self._reference.generate(**prompt.inputs, **settings)
        tokens: list[int] = output[0, len(prompt.tokens) :].tolist()
        return tokens


def content_model(base: LoadedModel, name: str, dtype: torch.dtype = torch.float64) -> ContentModel:
    """The tiny model of a family; tokenizer and settings are those of a loaded model."""
    family = FAMILIES[name]
    model = tiny_model(family, dtype)
    images = [sample(family, model, seed) for seed in range(3)]
    encoder = CountingEncoder(model, images[:1], budget_bytes=2**20)
    recurrent = install_hooks(model)
    hooks.set_attention(model, hooks.ATTENTION_NAME)
    layers = find_cached_layers(model, vocabulary=280)
    loaded = replace(
        base,
        model=model,
        runner=PackedRunner(model, layers),
        info=replace(base.info, vocabulary=VOCABULARY),
        content_encoder=encoder,
        recurrent=recurrent,
        eos=frozenset(),
    )
    return ContentModel(family, loaded, encoder, images, tiny_model(family, dtype))


def with_native_step(model: ContentModel) -> LoadedModel:
    """The model in float32, with a native step in front of its packed runner."""
    packed = model.loaded.runner
    assert isinstance(packed, PackedRunner)
    decoder = find_decoder(model.loaded.model, packed.layers, vocabulary=280, context=CONTEXT)
    native = NativeRunner(packed, decoder, step_library(), rounds_to_bfloat16=False)
    return replace(model.loaded, runner=FirstSupporting([native, packed]))


def content_request(name: str, prompt: Prompt, count: int = COUNT, **settings: Any) -> Request:
    """A greedy request."""
    return ask(name, prompt.tokens, count, contents=prompt.contents, ignore_eos=True, **settings)


def token_contents(tokens: Sequence[int], *ranges: tuple[int, int]) -> tuple[Content, ...]:
    """Ranges of tokens that attend to each other, as contents of `with_token_contents`."""
    return tuple(
        Content("image", start, stop, hashlib.sha256(repr(tokens[start:stop]).encode()).digest(), ())
        for start, stop in ranges
    )


def with_token_contents(loaded: LoadedModel) -> LoadedModel:
    """A model of text that takes ranges of its tokens as contents, in which tokens attend to each other."""
    return replace(loaded, content_encoder=EmbeddingRows(loaded.model))
