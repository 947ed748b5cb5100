"""One conversation of 300 tokens with a tiny model of each kind of memory, and its logits in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from engine.load.check.selftest import ModelTraits, find_runner
from engine.model import hooks, recurrence
from engine.run.runner import ModelRunner
from engine.step.encoder_mask import EncoderMask
from engine.step.input import StepInput
from kvcache.attention_group import HOLE
from kvcache.cache import Cache
from kvcache.node import Node
from kvcache.offload import OffloadConfig
from kvcache.spec import AttentionRange, Span
from tests.engine.kit import encoders, tiny
from tests.engine.kit.models import load_model
from tests.kvcache.reference import oldest

LENGTH = 300
# Tokens after the position of a resume that are compared.
COMPARED_AFTER = 3
# Ends of messages.
MESSAGE_ENDS = (60, 150, 231)
CHUNK = 48
SLOTS = 3
TOLERANCE = 1e-9
AMPLE = 4096

# By kind of memory: a family with it, and settings beside tiny.settings.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "window": ("mistral", {}),
    "window and full": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "chunk": ("llama4_text", {}),
    "chunk and full": ("llama4_text", {"num_hidden_layers": 4}),
    "latent": ("deepseek_v3", {}),
    "recurrent": ("mamba", {}),
    "recurrent in chunks": ("mamba2", {}),
    "hybrid": ("qwen3_next", {}),
    "hybrid with mamba": ("jamba", {}),
    "shared cells": ("gemma3n_text", {}),
    "shared cells of two widths": ("gemma4_text", {}),
}
KINDS = (*FAMILIES, "encoder")


class Exact(TorchFunctionMode):
    """Computes in float64 what transformers computes in float32 for every dtype: scans, routers.

    Their rounding depends on the batch and would hide errors of its size.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace float32 by float64 in the arguments of a function."""
        function = torch.Tensor.double if function is torch.Tensor.float else function
        named = {name: _exact(value) for name, value in (kwargs or {}).items()}
        return function(*[_exact(value) for value in args], **named)


def _exact(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def ends() -> list[int]:
    """The ends of the forwards that compute the conversation: after each chunk and each message."""
    found, at = [], 0
    while at < LENGTH:
        at = min(at + CHUNK, LENGTH, *(mark for mark in MESSAGE_ENDS if mark > at))
        found.append(at)
    return found


def text(vocabulary: int, seed: int) -> tuple[int, ...]:
    """A conversation, and some tokens after it."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocabulary, (LENGTH + COMPARED_AFTER,), generator=generator).tolist())


@dataclass(slots=True)
class Conversation:
    """A model and its cells, the tokens, and the logits after each token in one forward over all of them."""

    runner: ModelRunner
    recurrent: bool
    vocabulary: int = tiny.VOCABULARY
    encoder_mask: EncoderMask | None = None
    tokens: tuple[int, ...] = field(init=False)
    logits: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Compute the expected logits."""
        self.tokens = text(self.vocabulary, 1)
        self.logits = self.feed(self.cache(), 0, len(self.tokens))

    @property
    def attention_ranges(self) -> list[AttentionRange]:
        """The attention ranges of the layers."""
        return [plan.spec.attention_range.limited_to(LENGTH + COMPARED_AFTER) for plan in self.runner.layers]

    def cache(
        self,
        *,
        cells: int = AMPLE,
        rows: int | None = None,
        states: int | None = None,
        offload: OffloadConfig | None = None,
    ) -> Cache:
        """An empty cache with an offload tier and a budget of recurrent states, None: unlimited."""
        return Cache(
            [plan.spec for plan in self.runner.layers],
            slots=SLOTS,
            capacity=LENGTH + COMPARED_AFTER,
            cells=cells,
            max_batch_tokens=rows,
            state_bytes=self._budget(states) if self.recurrent else None,
            offload=offload,
            dtype=torch.float64,
        )

    def feed(self, cache: Cache, slot: int, stop: int, tokens: Sequence[int] = ()) -> Tensor:
        """Compute the missing tokens up to `stop` in a slot, with the logits of each."""
        start, tokens = cache.cached_length(slot), tokens or self.tokens
        span = Span(slot, start, stop - start)
        assert 0 == cache.evict_for([span])
        with Exact(), cache.forward([span]) as forward:
            return self.runner.run(
                StepInput(forward, tokens[start:stop], list(range(stop - start)), encoder_masks=[self.encoder_mask])
            ).logits

    def play(
        self, cache: Cache, slot: int = 0, tokens: Sequence[int] = (), *, insert: bool = True, upto: int = LENGTH
    ) -> None:
        """Compute a conversation as the engine does: in chunks, which are cached, with checkpoints."""
        tokens = tokens or self.tokens
        for stop in ends():
            if stop <= upto:
                self.feed(cache, slot, stop, tokens)
                if insert:
                    cache.insert_prefix(slot, tokens[:stop], checkpoint=stop in MESSAGE_ENDS)

    def matches(self, cache: Cache, slot: int, position: int) -> bool:
        """Whether the logits from the cached length to a little after `position` equal the expected ones."""
        start, stop = cache.cached_length(slot), position + COMPARED_AFTER
        return bool((self.feed(cache, slot, stop) - self.logits[start:stop]).abs().max() <= TOLERANCE)

    def computed(self, position: int, start: int = 0) -> int:
        """The largest length to resume at with all computed cells and states."""
        missing = {reach: set(range(oldest(reach, start))) for reach in self.attention_ranges}
        return self._deepest(position, {0, *ends()}, missing)

    def trimmed(self, position: int, kept: Sequence[int]) -> int:
        """The largest length to resume at after the tree is trimmed to some positions."""
        every = set(range(max(kept)))
        missing = {
            reach: every - {at for stop in kept for at in range(oldest(reach, stop), stop)}
            for reach in self.attention_ranges
        }
        return self._deepest(position, {0, *kept}, missing)

    def resident_length(self, cache: Cache, position: int) -> int:
        """The largest length to resume at with the cells of the tree."""
        nodes = list(_resident(cache, self.tokens))
        missing = {
            group.spec.attention_range: {
                node.start + at for node in nodes for at in np.flatnonzero(node.references[own] == HOLE)
            }
            for own, group in enumerate(cache.groups)
        }
        states = {node.start + at for node in nodes for at in node.references[-1].states} if self.recurrent else set()
        return self._deepest(min(position, nodes[-1].stop if nodes else 0), {0, *states}, missing)

    def _budget(self, states: int | None) -> int:
        """The bytes of a number of recurrent states; None: unlimited."""
        if states is None:
            return 2**40
        cache = self.cache()
        self.feed(cache, 0, 1)
        assert cache.recurrent_states is not None, "only asked of recurrent models"
        return states * cache.recurrent_states.acquire(0, 0, 1).bytes

    def _deepest(self, position: int, states: set[int], missing: dict[AttentionRange, set[int]]) -> int:
        def fits(at: int) -> bool:
            seen = all(holes.isdisjoint(range(oldest(reach, at), at)) for reach, holes in missing.items())
            return seen and (at in states or not self.recurrent)

        return next(at for at in range(position, -1, -1) if fits(at))


def _resident(cache: Cache, tokens: Sequence[int]) -> Iterator[Node]:
    """The nodes of a conversation with cells in the prefix cache."""
    node, depth = cache._tree._radix.roots.get(b""), 0
    while node is not None and depth < len(tokens):
        node = node.children.get(tokens[depth])
        if node is None or not node.resident or node.tokens.tolist() != list(tokens[depth : node.stop]):
            return
        yield node
        depth = node.stop


def build(kind: str, folder: Path) -> Conversation:
    """A conversation with a model of a kind; the folder is for files of the model."""
    return _with_encoder(folder) if kind == "encoder" else _decoder(*FAMILIES[kind])


def _decoder(family: str, own: dict[str, Any]) -> Conversation:
    # Tiny layers are slower with a second thread.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**tiny.settings(family), **own})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    # The default, a grouped matrix product, does not support float64.
    model.set_experts_implementation("eager")
    recurrent = recurrence.install(model)
    hooks.install_latent(model)
    facts = ModelTraits(vocabulary=tiny.VOCABULARY, recurrent=recurrent, dtype=torch.float64)
    with Exact():
        return Conversation(find_runner(family, model, facts), recurrent)


def _with_encoder(folder: Path) -> Conversation:
    """Bart: its tokens attend to an encoder entry, and its positions are learned."""
    kind, own, settings = encoders.KINDS["bart"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            encoders.KINDS, "bart", (kind, own, {**settings, "max_position_embeddings": LENGTH + COMPARED_AFTER})
        )
        loaded = load_model(encoders.save_encoder_model("bart", folder), context=LENGTH + COMPARED_AFTER)
    assert loaded.encoder is not None
    media = encoders.media("bart", 1)
    encoder_mask = loaded.encoder.mask(loaded.encoder.encode(media), media, text(loaded.info.vocabulary, 1))
    return Conversation(loaded.runner, False, loaded.info.vocabulary, encoder_mask)
