"""What drafts beside the lookup: a smaller model, refused where it speaks another language, or the model's own head."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.draft.controller import DepthController
from engine.draft.depth import FixedDepth
from engine.draft.forced import ForcedDrafter
from engine.draft.head import HeadDrafter
from engine.draft.heads import Heads, has_heads, load_heads
from engine.draft.library import Library
from engine.draft.lookup import LookupDrafter
from engine.draft.model import ModelDrafter
from engine.draft.speculation import Speculation
from engine.errors import DraftTooLarge, ModelError, ModelMissing, ModelUnsupported, PlanTooLarge
from engine.load.checkpoint import resolve
from engine.load.load import LoadedModel, load, read_max_context
from engine.load.memory import available_bytes, max_batch_tokens
from engine.load.offload import offload_config
from kvcache.cache import Cache
from kvcache.spec import group_layers

log = logging.getLogger("cellar.engine")

# What finished requests said, to be looked up: 4 bytes a token, and half of them are looked through at once in 20 us.
_LIBRARY_TOKENS = 2**17


def load_draft(
    config: EngineConfig, target: LoadedModel, on_phase: Callable[[str], None]
) -> LoadedModel | Heads | None:
    """What drafts for `target` beside the lookup: a model, or its own head; None: neither. Raises ModelError kinds.

    The bundled model brings its own. A draft is a guess at tokens by their numbers, so both must have one tokenizer.
    """
    if config.drafter in ("none", "lookup"):
        return None
    name = config.draft_model or _companion(config, Path(target.info.folder))
    if config.drafter == "mtp" or (config.drafter == "auto" and name is None):
        return _head(config, target, on_phase)
    if name is None and config.drafter == "model":
        raise ModelMissing("draft", "this installation came without it; name one with --draft-model")
    if name is None:
        return None
    context, slots = min(target.capacity, read_max_context(name, resolve(name))), target.info.slots
    settings = replace(
        config,
        model=name,
        quantize=config.draft_quantize or config.quantize,
        # The draft model itself has no drafter, and none of its settings.
        drafter="none",
        draft_model=None,
        draft_quantize=None,
        context=context,
        slots=slots,
        cells=min(context * slots, target.memory.cells),
        threads=torch.get_num_threads(),
    )
    # The model's cache is planned but not there yet.
    promised = target.memory.cache_bytes + target.memory.workspace_bytes
    try:
        draft = load(settings, lambda phase: on_phase(f"draft: {phase}"), reserved_bytes=promised)
    except PlanTooLarge as error:
        raise DraftTooLarge(name, error) from error
    if draft.encoder is not None:
        raise ModelUnsupported(name, "it looks at media; a draft model reads tokens alone")
    _check_language(name, draft, target)
    return draft


def _head(config: EngineConfig, target: LoadedModel, on_phase: Callable[[str], None]) -> Heads | None:
    """The model's own head; where nobody asked for it, there may be none, and it may be of no use."""
    if not has_heads(target):
        if config.drafter == "mtp":
            raise ModelUnsupported(target.info.name, "its files have no head that guesses; choose another --drafter")
        return None
    on_phase("draft: weights")
    try:
        heads = load_heads(target)
        _check_room(config, target, heads)
        return heads
    except ModelError as error:
        if config.drafter == "mtp":
            raise
        log.warning("the model's own head drafts nothing: %s", error)
        return None


def _check_room(config: EngineConfig, target: LoadedModel, heads: Heads) -> None:
    """Raises DraftTooLarge where the cells of a head, as many as the model has, do not fit beside the model."""
    groups = group_layers([plan.spec.limited_to(target.capacity) for plan in heads.runner.layers])
    needed = target.memory.cells * sum(group.cell_bytes(target.kv_dtype) for group in groups)
    left = available_bytes() - target.memory.cache_bytes - target.memory.workspace_bytes
    if needed > left:
        plan = PlanTooLarge(needed, max(left, 0), f"lower --context ({target.info.context}) or --slots")
        raise DraftTooLarge(target.info.name, plan)


def _companion(config: EngineConfig, folder: Path) -> str | None:
    """The draft that lies beside the bundled model."""
    beside = folder.parent / "draft"
    return str(beside) if config.model is None and (beside / "config.json").is_file() else None


def _check_language(name: str, draft: LoadedModel, target: LoadedModel) -> None:
    """Raises ModelUnsupported at the first token that means something else to the draft than to the target."""
    own, others = draft.tokenizer.pieces(), target.tokenizer.pieces()
    for number in sorted(own.keys() & others.keys()):
        if own[number] != others[number]:
            meanings = f"token {number} is {own[number]!r} to it and {others[number]!r} to {target.info.name}"
            raise ModelUnsupported(name, f"a draft model must share the tokenizer of the model: {meanings}")


def make_speculation(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | Heads | None, clock: Callable[[], float]
) -> Speculation:
    """The drafters that the settings ask for, over caches of their own."""
    quick = LookupDrafter(Library(_LIBRARY_TOKENS)) if config.drafter in ("auto", "lookup") else None
    forced = None if config.drafter == "none" else ForcedDrafter()
    # What a grammar forces is nearly always what the model emits.
    priors = {ForcedDrafter.kind: 0.95}
    depth = DepthController(priors) if config.draft_tokens is None else FixedDepth(config.draft_tokens)
    if isinstance(draft, Heads):
        head = _head_drafter(config, target, draft)
        return Speculation(quick, head, depth, clock, forced=forced, reader=head)
    slow = None if draft is None else _drafter(config, target, draft)
    return Speculation(quick, slow, depth, clock, forced=forced)


def _head_drafter(config: EngineConfig, target: LoadedModel, heads: Heads) -> HeadDrafter:
    cache = Cache(
        [plan.spec for plan in heads.runner.layers],
        slots=target.info.slots,
        capacity=target.capacity,
        cells=target.memory.cells,
        max_batch_tokens=max_batch_tokens(config, target.info.slots),
        offload=offload_config(config, f"{target.identity}-mtp"),
        dtype=target.kv_dtype,
        device=config.device,
    )
    return HeadDrafter(cache, heads.runner, heads.states, chunk=config.chunk)


def _drafter(config: EngineConfig, target: LoadedModel, draft: LoadedModel) -> ModelDrafter:
    cache = Cache(
        [plan.spec for plan in draft.layers],
        slots=draft.info.slots,
        capacity=draft.capacity,
        cells=draft.memory.cells,
        max_batch_tokens=max_batch_tokens(config, draft.info.slots),
        state_bytes=draft.memory.available_bytes // 16 if draft.recurrent else None,
        offload=offload_config(config, draft.identity),
        dtype=draft.kv_dtype,
        device=config.device,
    )
    return ModelDrafter(
        cache, draft.runner, vocabulary=target.info.vocabulary, chunk=config.chunk, known=draft.info.vocabulary
    )
