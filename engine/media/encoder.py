"""Encodes images and sounds by the code of the model itself, one content at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from engine.media.capture import ContentsUnsupported, DecoderCapture
from engine.media.visibility import Bidirectional, read_bidirectional, runs
from engine.model import hooks
from engine.model.encoder import to_numpy
from engine.step.content import ContentEntry, PromptLayout, TensorTree, leaves
from engine.types.content import Content

# Arguments of the decoder that every forward has, for a text alone too.
_COMMON_ARGUMENTS = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "position_ids",
        "attention_mask",
        "past_key_values",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "logits_to_keep",
        "cache_position",
    }
)
# Inputs of models with the kind of each token: 0 for text, else that of a placeholder.
_TOKEN_KINDS = ("mm_token_type_ids", "token_type_ids")
_KIND_NUMBERS = {"image": 1, "video": 2, "audio": 3}


@dataclass(frozen=True, slots=True)
class ContentSample:
    """A content with its prompt tokens."""

    content: Content
    tokens: tuple[int, ...]


class CapturingEncoder:
    """The ContentEncoder of a model with a decoder that takes embeddings.

    samples        a content of each kind
    kinds          of contents
    bidirectional  the layers in which placeholders attend to later ones
    budget_bytes   of all entries in memory
    longest_range  most tokens of a sample that attend to each other
    modules        of the towers, between which an encoding may pause; none on a GPU, where it takes milliseconds
    """

    def __init__(self, model: Any, samples: Sequence[ContentSample], *, budget_bytes: int) -> None:
        """Encodes a content of each kind to measure entries and to read masks. Raises ContentsUnsupported, or whatever
        the model raises.
        """
        self.samples = tuple(samples)
        self.kinds = tuple(dict.fromkeys(sample.content.kind for sample in samples))
        self.budget_bytes = budget_bytes
        self._model, self._capture, self._lock = model, DecoderCapture(model), Lock()
        self._device = next(model.parameters()).device
        towers = hooks.tower_modules(model)
        self.modules: Collection[nn.Module] = towers if self._device.type == "cpu" else ()
        self._accepted = frozenset(inspect.signature(type(model).forward).parameters)
        self._offset_modules = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self._placeholders = _placeholders(model.config)
        self._text_token = next(token for token in range(2, 2**31) if token not in self._placeholders)
        # The attention of the engine has no masks.
        with hooks.use_attention(model, "eager"):
            text = self._run([self._text_token], {}, [0])
            self._text_arguments = frozenset(name for name, tree in text.items() if any(True for _ in leaves(tree)))
            masks = self._run([self._text_token] * 2, {}, [0, 0]).get("attention_mask")
            self._is_prefix_lm = read_bidirectional(masks, ()).whole_prompt
            visible = {self._read_mask(sample) for sample in samples}
        if len(visible) > 1:
            raise ContentsUnsupported("its layers attend otherwise to images than to sounds")
        self.bidirectional = next(iter(visible), Bidirectional())
        self.longest_range = 0
        self.measure_ranges(samples)
        self._token_bytes = max(
            (_token_bytes(self.encode(sample.content, sample.tokens)) for sample in samples), default=0
        )

    def measure_ranges(self, samples: Iterable[ContentSample]) -> None:
        """Raise `longest_range` to the longest range of the samples."""
        lengths = (self.range_length(sample.tokens, [sample.content]) for sample in samples)
        self.longest_range = max((self.longest_range, *lengths))

    def entry_bytes(self, content: Content) -> int:
        return (content.stop - content.start) * self._token_bytes

    def encode(self, content: Content, tokens: Sequence[int]) -> ContentEntry:
        kinds = self._kinds(content, tokens)
        arguments = self._arguments(content, tokens, kinds)
        rows = arguments["inputs_embeds"][0, 1:-1]
        if rows.shape[0] != len(tokens):
            raise ContentsUnsupported(f"it makes {rows.shape[0]} rows of {len(tokens)} tokens of a content")
        injected = {name: tree for name, tree in arguments.items() if self._is_injected(name, tree)}
        return _entry(content.digest, rows.clone(), injected, kinds)

    def layout(self, tokens: Sequence[int], contents: Sequence[Content]) -> PromptLayout:
        if not contents and not self._is_prefix_lm:
            return PromptLayout()
        kinds = self._prompt_kinds(tokens, contents)
        positions = self._positions(tokens, contents, kinds)
        offset = int(positions[-3:].max()) + 1 - len(tokens)
        is_plain = offset == 0 and bool((positions == torch.arange(len(tokens))).all())
        return PromptLayout(None if is_plain else positions, offset, self._ranges(contents, kinds))

    def range_length(self, tokens: Sequence[int], contents: Sequence[Content]) -> int:
        if not self.bidirectional:
            return 0
        ranges = self._ranges(contents, self._prompt_kinds(tokens, contents))
        return max((stop - start for start, stop in ranges), default=0)

    def is_bidirectional(self, layer: int) -> bool:
        return self.bidirectional.holds(self._model.config.get_text_config(decoder=True), layer)

    def reference_inputs(self, tokens: Sequence[int], content: Content) -> dict[str, Tensor]:
        """The inputs of the unmodified model for a prompt with one content."""
        kinds = [0] * len(tokens)
        kinds[content.start : content.stop] = self._kinds(content, tokens[content.start : content.stop])
        ids, types = (torch.tensor([numbers], device=self._device) for numbers in (tokens, kinds))
        inputs = {"attention_mask": torch.ones_like(ids), **dict.fromkeys(_TOKEN_KINDS, types)}
        accepted = {name: value for name, value in inputs.items() if name in self._accepted}
        return {"input_ids": ids, **self._arrays(content), **accepted}

    def text_only(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, with a token of text in place of placeholders."""
        return [self._text_token if token in self._placeholders else token for token in tokens]

    def _prompt_kinds(self, tokens: Sequence[int], contents: Sequence[Content]) -> list[int]:
        """The kind of each token of a prompt."""
        kinds = [0] * len(tokens)
        for content in contents:
            kinds[content.start : content.stop] = self._kinds(content, tokens[content.start : content.stop])
        return kinds

    def _ranges(self, contents: Sequence[Content], kinds: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The bidirectional ranges of a prompt, from the kinds of its tokens."""
        placeholders: list[tuple[int, int]] = []
        for content in contents:
            placeholders += runs([kind > 0 for kind in kinds[content.start : content.stop]], content.start)
        return self.bidirectional.ranges(
            len(kinds), [(start, stop) for start, stop in placeholders if stop > start + 1]
        )

    def _positions(self, tokens: Sequence[int], contents: Sequence[Content], kinds: Sequence[int]) -> Tensor:
        """[axes, tokens]"""
        ids = torch.tensor([tokens])
        inputs = {name: torch.tensor([kinds]) for name in _TOKEN_KINDS} | _joined_sizes(contents)
        with self._lock, _kept_offsets(self._offset_modules):
            arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}
            computed = self._model._prepare_position_ids_for_generation(ids, arguments)
            # Some models change them on the way to their forward (positions from 1).
            prepared = self._model.prepare_inputs_for_generation(
                ids, position_ids=computed, is_first_iteration=True, **inputs
            )
        positions: Tensor = prepared.get("position_ids", computed).cpu()
        return positions[:, 0] if positions.dim() == 3 else positions

    def _read_mask(self, sample: ContentSample) -> Bidirectional:
        kinds = self._kinds(sample.content, sample.tokens)
        masks = self._arguments(sample.content, sample.tokens, kinds).get("attention_mask")
        return read_bidirectional(masks, [(a, b) for a, b in runs([kind > 0 for kind in kinds], 1) if b > a + 1])

    def _arguments(self, content: Content, tokens: Sequence[int], kinds: Sequence[int]) -> dict[str, Any]:
        """Those of the decoder for a content between two text tokens."""
        return self._run([self._text_token, *tokens, self._text_token], self._arrays(content), [0, *kinds, 0])

    def _arrays(self, content: Content) -> dict[str, Tensor]:
        return {name: self._tensor(array) for name, array in content.arrays if name not in _TOKEN_KINDS}

    def _run(self, tokens: Sequence[int], arrays: Mapping[str, Tensor], kinds: Sequence[int]) -> dict[str, Any]:
        ids = torch.tensor([tokens], device=self._device)
        types = torch.tensor([kinds], device=self._device)
        # With positions, a model does not compute and keep those of this prompt.
        positions = torch.arange(len(tokens), device=self._device)[None]
        inputs = {"position_ids": positions, **dict.fromkeys(_TOKEN_KINDS, types)}
        accepted = {name: value for name, value in inputs.items() if name in self._accepted}
        return self._capture.run({"input_ids": ids, **arrays, **accepted})

    def _is_injected(self, name: str, tree: TensorTree) -> bool:
        is_new = name not in _COMMON_ARGUMENTS and name not in self._text_arguments
        return is_new and any(True for _ in leaves(tree))

    def _kinds(self, content: Content, tokens: Sequence[int]) -> list[int]:
        """The kind of each token of a content."""
        arrays = dict(content.arrays)
        array = next((arrays[name] for name in _TOKEN_KINDS if name in arrays), None)
        if array is not None:
            kinds: list[int] = to_numpy(array).reshape(-1).tolist()
            return kinds
        return [0 if self._is_prefix_lm else self._placeholders.get(token, 0) for token in tokens]

    def _tensor(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(to_numpy(array).copy())
        return tensor.to(self._device, self._model.dtype if tensor.is_floating_point() else tensor.dtype)


def _entry(digest: bytes, rows: Tensor, injected: Mapping[str, TensorTree], kinds: Sequence[int]) -> ContentEntry:
    """The entry of a content between two text tokens. A leaf has a row for each token, or one for each placeholder."""
    length = len(kinds) + 2
    is_token = {name: {leaf.shape[:2] == (1, length) for leaf in leaves(tree)} for name, tree in injected.items()}
    if any(len(shapes) > 1 for shapes in is_token.values()):
        raise ContentsUnsupported(f"its decoder takes {', '.join(injected)} in several layouts")
    by_token = {n: _map_leaves(lambda leaf: leaf[0, 1:-1], tree) for n, tree in injected.items() if True in is_token[n]}
    by_feature = {name: tree for name, tree in injected.items() if True not in is_token[name]}
    if not by_feature:
        return ContentEntry(digest, rows, by_token)
    features = _features(by_token, kinds)
    counts = {leaf.shape[0] for tree in by_feature.values() for leaf in leaves(tree)}
    if counts != {int(features.sum())}:
        raise ContentsUnsupported(f"its decoder takes {', '.join(by_feature)} with {counts} rows")
    return ContentEntry(digest, rows, by_token, by_feature, features)


def _features(by_token: Mapping[str, TensorTree], kinds: Sequence[int]) -> Tensor:
    """[tokens] bool: the tokens with features, by a mask among the arguments, else by their kinds."""
    masks = (leaf for tree in by_token.values() for leaf in leaves(tree) if leaf.dtype == torch.bool)
    mask = next(masks, None)
    if mask is None:
        return torch.tensor(kinds) > 0
    return mask.reshape(len(kinds), -1).any(-1).cpu()


def _map_leaves(function: Callable[[Tensor], Tensor], tree: TensorTree) -> TensorTree:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map_leaves(function, branch) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_leaves(function, branch) for branch in tree)
    return tree


def _token_bytes(entry: ContentEntry) -> int:
    """Maximum bytes of a token of an entry."""
    by_token = (entry.rows, *leaves(list(entry.token_arguments.values())))
    by_feature = leaves(list(entry.feature_arguments.values()))
    return sum(leaf[:1].nbytes for leaf in (*by_token, *by_feature))


def _placeholders(config: Any) -> dict[int, int]:
    """The kinds of placeholders by token."""
    return {
        token: number
        for kind, number in _KIND_NUMBERS.items()
        for name in (f"{kind}_token_id", f"{kind}_token_index")
        if isinstance(token := getattr(config, name, None), int)
    }


def _joined_sizes(contents: Sequence[Content]) -> dict[str, Tensor]:
    """The integer inputs of contents, which decide positions: sizes of grids and masks, one row for each content."""
    arrays: dict[str, list[Tensor]] = {}
    for content in contents:
        for name, array in content.arrays:
            values = to_numpy(array)
            if values.dtype.kind in "iub" and values.ndim > 0 and name not in _TOKEN_KINDS:
                arrays.setdefault(name, []).append(torch.from_numpy(values.copy()))
    return {name: _joined(tensors) for name, tensors in arrays.items()}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors in a batch, padded with zeros as by a processor."""
    sizes = [max(lengths) for lengths in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = [tensor.new_zeros(tensor.shape[0], *sizes) for tensor in tensors]
    for target, tensor in zip(padded, tensors, strict=True):
        target[tuple(map(slice, tensor.shape))] = tensor
    return torch.cat(padded)


@contextmanager
def _kept_offsets(modules: Sequence[Any]) -> Iterator[None]:
    """Within the block, modules may note the offset of a prompt's positions; afterwards they have their earlier one."""
    offsets = [module.rope_deltas for module in modules]
    try:
        yield
    finally:
        for module, offset in zip(modules, offsets, strict=True):
            module.rope_deltas = offset
