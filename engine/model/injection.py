"""Rows of contents at the input of a decoder, in place of the embeddings of their tokens.

The model runs as for text. A hook on its decoder overwrites the rows and adds the further arguments that the decoder
has for contents (deepstack). It acts through a context variable: on the thread of the step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.step.content import EmbeddedRows, TensorTree

_embedded: ContextVar[Sequence[EmbeddedRows]] = ContextVar("engine.model.injection.embedded", default=())


@contextmanager
def inject(model: Any, embedded: Sequence[EmbeddedRows]) -> Iterator[None]:
    """Inside the block, forwards of the model over a packed batch have these rows."""
    if not embedded:
        yield
        return
    token = _embedded.set(embedded)
    handle = model.get_decoder().register_forward_pre_hook(partial(_replace_inputs, model), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        _embedded.reset(token)


def embeddable(model: Any, tokens: Tensor) -> Tensor:
    """The tokens, with 0 for placeholders beyond the vocabulary."""
    return torch.where(tokens < model.config.get_text_config().vocab_size, tokens, 0)


def _replace_inputs(
    model: Any, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    embedded = _embedded.get()
    if not embedded:
        return None
    # Some decoders get their tokens as the first argument.
    tokens, further = args[:1] or (kwargs.get("input_ids"),), args[1:]
    inputs = kwargs.get("inputs_embeds")
    inputs = model.get_input_embeddings()(*tokens) if inputs is None else inputs.clone()
    for rows in embedded:
        inputs[0, rows.batch_start : rows.batch_stop] = rows.entry.rows[rows.entry_rows].to(inputs)
    arguments = {**_token_arguments(embedded, inputs.shape[1]), **feature_arguments(embedded)}
    named = {**kwargs, "inputs_embeds": inputs, **arguments}
    return ((None, *further), named) if args else ((), {**named, "input_ids": None})


def _token_arguments(embedded: Sequence[EmbeddedRows], batch_tokens: int) -> dict[str, TensorTree]:
    """Arguments [1, batch tokens, ...]: zeros for tokens outside of contents."""

    def pack(holders: Sequence[EmbeddedRows], *leaves: Tensor) -> Tensor:
        packed = leaves[0].new_zeros(1, batch_tokens, *leaves[0].shape[1:])
        for rows, leaf in zip(holders, leaves, strict=True):
            packed[0, rows.batch_start : rows.batch_stop] = leaf[rows.entry_rows]
        return packed

    return _packed(embedded, lambda rows: rows.entry.token_arguments, pack)


def feature_arguments(embedded: Sequence[EmbeddedRows]) -> dict[str, TensorTree]:
    """Arguments [features, ...] of all features in the batch, in its order."""

    def pack(holders: Sequence[EmbeddedRows], *leaves: Tensor) -> Tensor:
        return torch.cat([leaf[_feature_rows(rows)] for rows, leaf in zip(holders, leaves, strict=True)])

    return _packed(embedded, lambda rows: rows.entry.feature_arguments, pack)


def _packed(
    embedded: Sequence[EmbeddedRows],
    arguments_of: Callable[[EmbeddedRows], Mapping[str, TensorTree]],
    pack: Callable[..., Tensor],
) -> dict[str, TensorTree]:
    """Each argument of any entry, packed from the entries that have it."""
    packed = {}
    for name in dict.fromkeys(name for rows in embedded for name in arguments_of(rows)):
        holders = [rows for rows in embedded if name in arguments_of(rows)]
        packed[name] = _map(partial(pack, holders), *(arguments_of(rows)[name] for rows in holders))
    return packed


def _feature_rows(rows: EmbeddedRows) -> slice:
    """The features among the rows, as rows of a feature argument."""
    features, selected = rows.entry.features, rows.entry_rows
    first = int(features[: selected.start].sum())
    return slice(first, first + int(features[selected].sum()))


def _map(function: Callable[..., Tensor], *trees: TensorTree) -> TensorTree:
    """The tree of the results for the tensors at the same place in trees of one structure."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: _map(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_map(function, *branches) for branches in zip(*trees, strict=True))
    return function(*trees) if isinstance(first, Tensor) else first
