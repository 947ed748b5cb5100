"""Loads the draft model or the MTP layer, and makes the drafters of the settings."""

from __future__ import annotations

import logging
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.draft.controller import DepthController
from engine.draft.depth import FixedDepth
from engine.draft.forced import ForcedDrafter
from engine.draft.lookup import LookupDrafter
from engine.draft.model import ModelDrafter
from engine.draft.mtp import MtpDrafter
from engine.draft.mtp_head import MtpHead, has_mtp, load_mtp
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.errors import DraftTooLarge, ModelError, ModelMissing, ModelUnsupported, PlanTooLarge
from engine.load.cache import draft_cache, mtp_cache
from engine.load.load import LoadedModel, load
from engine.load.machine.available_memory import available_bytes
from engine.load.read.checkpoint import bundled_draft, resolve
from engine.load.read.configuration import read_max_context
from engine.load.recording import record_steps
from kvcache.spec import group_layers

log = logging.getLogger("cellar.engine")

# Output tokens of finished requests for the lookup: 4 bytes each; half of them are searched at a time, in 20 us.
_STORED_TOKENS = 2**17
# Tokens that an MTP layer drafts: 98 % of those of English text and code in the vocabularies of Qwen3.5 and DeepSeek.
FREQUENT_TOKENS = 2**16


def load_draft(
    config: EngineConfig, target: LoadedModel, on_phase: Callable[[str], None]
) -> LoadedModel | MtpHead | None:
    """The draft model or the MTP layer for `target`; None: neither. Raises ModelError kinds.

    The bundled model includes a draft model. Draft model and model must share the tokenizer.
    """
    if config.drafter in ("none", "lookup"):
        return None
    name = config.draft_model or bundled_draft(config, Path(target.info.folder))
    if config.drafter == "mtp" or (config.drafter == "auto" and name is None):
        return _mtp(config, target, on_phase)
    if name is None and config.drafter == "model":
        raise ModelMissing("draft", "this installation came without it; name one with --draft-model")
    if name is None:
        return None
    context, slots = min(target.capacity, read_max_context(name, resolve(name))), target.info.slots
    draft_config = config.for_draft(name, context=context, slots=slots, cells=min(context * slots, target.memory.cells))
    settings = replace(draft_config, threads=torch.get_num_threads())
    # The model's cache is planned but not allocated yet.
    reserved = target.memory.cache_bytes + target.memory.workspace_bytes
    try:
        draft = load(settings, lambda phase: on_phase(f"draft: {phase}"), reserved_bytes=reserved)
    except PlanTooLarge as error:
        raise DraftTooLarge(name, error) from error
    if draft.encoder is not None:
        raise ModelUnsupported(name, "it has an encoder; a draft model has tokens as its only input")
    _check_tokenizer(name, draft, target)
    return draft


def _mtp(config: EngineConfig, target: LoadedModel, on_phase: Callable[[str], None]) -> MtpHead | None:
    """The MTP layer; with `--drafter auto` None where it is missing or cannot be used."""
    if config.tensor_parallel > 1:
        return None
    if not has_mtp(target):
        if config.drafter == "mtp":
            raise ModelUnsupported(target.info.name, "its files have no MTP layer; choose another --drafter")
        return None
    on_phase("draft: weights")
    try:
        head = load_mtp(target)
        _check_memory(config, target, head)
        return head
    except ModelError as error:
        if config.drafter == "mtp":
            raise
        log.warning("the MTP layer is not used: %s", error)
        return None


def _check_memory(config: EngineConfig, target: LoadedModel, head: MtpHead) -> None:
    """Raises DraftTooLarge if memory lacks space for the cells of the MTP layer, as many as the model has."""
    groups = group_layers([plan.spec.limited_to(target.capacity) for plan in head.runner.layers])
    needed = target.memory.cells * sum(group.cell_bytes(target.kv_dtype) for group in groups)
    left = available_bytes(config) - target.memory.cache_bytes - target.memory.workspace_bytes
    if needed > left:
        plan = PlanTooLarge(needed, max(left, 0), f"lower --context ({target.info.context}) or --slots")
        raise DraftTooLarge(target.info.name, plan)


def _check_tokenizer(name: str, draft: LoadedModel, target: LoadedModel) -> None:
    """Raises ModelUnsupported at the first token with another text in draft model and model."""
    draft_pieces, target_pieces = draft.tokenizer.pieces(), target.tokenizer.pieces()
    for number in sorted(draft_pieces.keys() & target_pieces.keys()):
        if draft_pieces[number] != target_pieces[number]:
            texts = (
                f"token {number} is {draft_pieces[number]!r} in it and {target_pieces[number]!r} in {target.info.name}"
            )
            raise ModelUnsupported(name, f"a draft model must share the tokenizer of the model: {texts}")


def make_speculation(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | MtpHead | None,
    clock: Callable[[], float],
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Speculation:
    """The drafters of the settings, each with its own cache."""
    quick = LookupDrafter(OutputStore(_STORED_TOKENS)) if config.drafter in ("auto", "lookup") else None
    forced = None if config.drafter == "none" else ForcedDrafter()
    # The model nearly always emits what a grammar forces.
    priors = {ForcedDrafter.kind: 0.95}
    depth = DepthController(priors) if config.draft_tokens == "auto" else FixedDepth(config.draft_tokens)
    if isinstance(draft, MtpHead):
        mtp = _mtp_drafter(config, target, draft)
        return Speculation(quick, mtp, depth, clock, forced=forced, reader=mtp)
    slow = None if draft is None else _model_drafter(config, target, draft, on_phase)
    return Speculation(quick, slow, depth, clock, forced=forced)


def _mtp_drafter(config: EngineConfig, target: LoadedModel, head: MtpHead) -> MtpDrafter:
    cache = mtp_cache(config, target, head.runner.layers)
    return MtpDrafter(cache, head.runner, chunk=config.chunk, vocabulary=drafted_vocabulary(target))


def drafted_vocabulary(target: LoadedModel) -> int:
    """Tokens below it are drafted: all, or the first ones of a vocabulary that is ordered by frequency.

    The output layer of a large vocabulary is most of an MTP layer's time. Byte-pair vocabularies start with characters,
    followed by their merges, the most frequent first.
    """
    tokenizer = target.tokenizer
    characters = [token for character in string.printable for token in tokenizer.encode_inside_text(character)]
    ordered = max(characters, default=FREQUENT_TOKENS) < FREQUENT_TOKENS
    return min(target.info.vocabulary, FREQUENT_TOKENS) if ordered else target.info.vocabulary


def _model_drafter(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel, on_phase: Callable[[str], None]
) -> ModelDrafter:
    cache = draft_cache(config, draft)
    vocabulary = min(target.info.vocabulary, draft.info.vocabulary)
    record_steps(config, draft, cache, lambda phase: on_phase(f"draft: {phase}"), draft_vocabulary=vocabulary)
    return ModelDrafter(
        cache,
        draft.runner,
        vocabulary=target.info.vocabulary,
        chunk=config.chunk,
        draft_vocabulary=draft.info.vocabulary,
    )
