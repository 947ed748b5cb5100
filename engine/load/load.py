"""Loads a model: resolves its folder or file, reads the weights, calibrates the layers and checks the logits.

Only safetensors and GGUF are read, and no code of a checkpoint is ever run.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Literal

import torch

from engine.adapters.store import AdapterStore
from engine.config import BUNDLED_NAME, EngineConfig
from engine.errors import ModelUnsupported
from engine.grammar.compiler import GrammarCompiler
from engine.kernels.cpu.build.libraries import compile_ahead
from engine.load.adapters import AdapterReader, load_adapters
from engine.load.check.checking import EarlierChecks, ModelChecks, log_margins, read_earlier_checks
from engine.load.contents import content_encoder, with_ranges
from engine.load.fusion import fuse
from engine.load.layers import LayersToQuantize, QuantizedLayers, quantize_layers
from engine.load.machine.device import use_device
from engine.load.machine.resources import release_freed_memory
from engine.load.plan.memory import encoder_budget, max_fitting_context, model_sizes, plan_memory, rank_bytes
from engine.load.read.checkpoint import (
    Checkpoint,
    default_threads,
    error_line,
    fingerprint,
    is_small,
    resolve,
)
from engine.load.read.configuration import NO_ENCODER_INPUT, choose_dtype, max_context, read_config, text_alone
from engine.load.read.modalities import text_only_reason
from engine.load.read.processor_files import processor_folder
from engine.load.read.skeleton import install_hooks, install_rope, make_skeleton, unread_modalities
from engine.load.read.tokenizer_files import read_model_tokenizer, read_template
from engine.load.read.weight_bars import reported_weights
from engine.load.read.weights import read_model
from engine.load.speech import speech_info, speech_reader
from engine.media.encoder import CapturingEncoder
from engine.media.sandbox import MediaSandbox
from engine.media.speech_reader import SpeechReader
from engine.model.encoder import Encoder, has_encoder
from engine.model.layers import CachedLayer, state_bytes
from engine.model.margins import Margin, recording
from engine.model.rope import RopeSwitch
from engine.native.step_library import step_variants
from engine.quantize.plan import QuantizationPlanNames
from engine.quantize.quantize import bytes_of, estimate
from engine.run.device import DeviceRunner
from engine.run.packed import PackedRunner
from engine.run.runner import LocalRunner, ModelRunner
from engine.step.content import ContentEncoder
from engine.text.template_process import template_processes
from engine.text.tokenizer import Tokenizer
from engine.types.content import ContentKind
from engine.types.status import MemoryPlan, ModelInfo, QuantizationEstimate
from kvcache.cell_pool import CellArray

log = logging.getLogger("cellar.engine")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checked model, and everything that serving it requires.

    speech_reader    of sounds to transcribe; None: the model does not transcribe
    content_encoder  of images and sounds in prompts; None: the model reads text only
    adapters  of the settings, and later those that are loaded at run time
    adapter_reader  None: the settings permit no adapters
    on_move  of its cache, see Cache
    margins  of the decisions by tolerance at this load, the narrowest first; empty with the outcome of an earlier start
    """

    model: Any
    tokenizer: Tokenizer
    runner: ModelRunner
    info: ModelInfo
    memory: MemoryPlan
    recurrent: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype
    eos: frozenset[int]
    grammars: GrammarCompiler
    encoder: Encoder | None = None
    speech_reader: SpeechReader | None = None
    content_encoder: ContentEncoder | None = None
    on_move: Callable[[int, CellArray, CellArray, int], None] | None = None
    identity: str = ""
    adapters: AdapterStore = field(default_factory=AdapterStore)
    adapter_reader: AdapterReader | None = None
    margins: tuple[Margin, ...] = ()

    @property
    def switch(self) -> RopeSwitch | None:
        """The length at which rotary factors change; None: never within the capacity."""
        switch = self.runner.switch
        return switch if switch is not None and self.capacity > switch.original_length else None

    @property
    def layers(self) -> tuple[CachedLayer, ...]:
        """The layers that store cells, with the rotation beyond the original length if the capacity reaches it."""
        layers = self.runner.layers if self.switch is None else self.runner.long_factor_layers
        encoder = self.content_encoder
        if encoder is None:
            return layers
        return tuple(layer.with_bidirectional(encoder.is_bidirectional(layer.index)) for layer in layers)

    @property
    def capacity(self) -> int:
        """Most tokens of one sequence: its context, or all cells if they are fewer."""
        return min(self.info.context, self.memory.cells)


def load(config: EngineConfig, on_phase: Callable[[str], None], *, reserved_bytes: int = 0) -> LoadedModel:
    """Load the model, with `reserved_bytes` left free; calls `on_phase` with each phase. Raises subclasses of
    ModelError.
    """
    with recording() as margins, reported_weights():
        try:
            on_phase("resolve")
            loaded = _load_inputs(config, _open(config), on_phase, reserved_bytes)
        except torch.OutOfMemoryError as error:
            raise ModelUnsupported(
                config.model or BUNDLED_NAME,
                f"its weights and the check of its logits exceed the memory of {config.device} ({error_line(error)})",
            ) from error
    release_freed_memory()
    return replace(loaded, margins=log_margins(margins))


@dataclass(frozen=True, slots=True)
class _Source:
    """The files of the model with its configuration.

    processor  of images and sounds; None: the text alone is loaded
    """

    name: str
    checkpoint: Checkpoint
    config: Any
    processor: MediaSandbox | None = None


def _open(config: EngineConfig) -> _Source:
    """The source of the model, on the device and with the threads of the settings. Raises ModelError."""
    folder, name = resolve(config.model), config.model or BUNDLED_NAME
    _use_device(config.device)
    torch.set_num_threads(max((config.threads or default_threads(folder)) // config.tensor_parallel, 1))
    return _Source(name, *read_config(name, folder, config))


def _load_inputs(
    config: EngineConfig, source: _Source, on_phase: Callable[[str], None], reserved_bytes: int
) -> LoadedModel:
    """The model with its vision tower, or its text if it has no other input or the tower is not supported."""
    reason = text_only_reason(source.checkpoint, source.config, config)
    if reason is None:
        try:
            processor = MediaSandbox(processor_folder(source.name, source.checkpoint))
            # It is read by another process meanwhile.
            processor.start()
            # The load changes the configuration.
            whole = replace(source, config=deepcopy(source.config), processor=processor)
            return _load(config, whole, on_phase, reserved_bytes)
        except ModelUnsupported as error:
            reason = error.reason
        log.warning("%s is served as a text model: %s", source.name, reason)
        release_freed_memory()
    checkpoint, text_config = text_alone(source.checkpoint, source.config)
    text = replace(source, checkpoint=checkpoint, config=text_config)
    unread = unread_modalities(source.config) or (("image",) if checkpoint.tower_fault else ())
    loaded = _load(replace(config, no_media=True), text, on_phase, reserved_bytes)
    info = replace(loaded.info, unread_modalities=unread, text_only_reason=reason if unread else "")
    return replace(loaded, info=info)


def _load(config: EngineConfig, source: _Source, on_phase: Callable[[str], None], reserved_bytes: int) -> LoadedModel:
    """With the settings `no_media` of a text model without its tower."""
    name, checkpoint, model_config = source.name, source.checkpoint, source.config
    folder, available = checkpoint.path, rank_bytes(config, reserved_bytes)
    dtype = choose_dtype(config, model_config, small=is_small(folder))
    kv_dtype: torch.dtype = dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
    reading = _start_tokenizer(name, checkpoint, config.chat_template, model_config.get_text_config().vocab_size)
    on_phase("weights")
    earlier = _read_earlier_checks(name, config, checkpoint, dtype, kv_dtype)
    model, matrices = read_model(name, checkpoint, model_config, config, dtype, earlier.quantised)
    text_config = model.config.get_text_config()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    quantises, on_cpu = config.quantize != "none" or matrices is not None, config.device == "cpu"
    checks = ModelChecks(config, model, earlier, surveys=quantises and on_cpu, matrices=matrices)
    layers = LayersToQuantize(model, matrices, f"{earlier.digest} {dtype}", dtype, available, reading)
    plan_names = partial(_plan_names, name, model_config, dtype)
    quantised = _move_to_device(config, layers, checks, plan_names if quantises else None)
    on_phase("calibrate")
    switch, recurrent = install_rope(name, model), install_hooks(model)
    on_phase("kernels")
    budget_bytes = encoder_budget(available)
    encoder = _encoder(name, model, budget_bytes=budget_bytes)
    contents, config = _content_encoder(source, config, model, reading, budget_bytes=budget_bytes)
    checks.set_traits(text_config.vocab_size, recurrent=recurrent, encoder=encoder, contents=contents, switch=switch)
    speech = _speech_reader(name, model, folder, config)
    on_phase("self-test" if checks.earlier is None else "checked before")
    checks.find_runner(name)
    on_phase("quantize" if quantises and on_cpu else "native step")
    quantised = quantize_layers(config, layers, checks.quantization_plan()) if on_cpu else quantised
    selection, invariant = checks.select(quantised.format, context=max_context(text_config))
    compute_dtype = torch.float32 if selection.reason is None else dtype
    adapters, adapter_reader = load_adapters(config, model, selection.runner, recurrent=recurrent)
    _fuse(config, selection.runner, text_config.vocab_size, on_phase)
    sizes = model_sizes(
        config,
        text_config,
        tuple(layer.spec for layer in selection.runner.layers),
        weights_bytes=bytes_of(model) + adapters.bytes,
        dtype=compute_dtype,
        kv_dtype=kv_dtype,
        longest=max_context(text_config),
        state_bytes=state_bytes(model, text_config.vocab_size) if _has_pool(recurrent, selection.runner) else 0,
    )
    left = available - sizes.weights_bytes - (budget_bytes if encoder or contents else 0)
    memory, context, slots = plan_memory(config, sizes, left)
    largest_context = max(context, max_fitting_context(config, sizes, left))
    tokenizer = reading.result().with_context(min(context, memory.cells), largest_context)
    info = ModelInfo(
        name=name,
        folder=str(folder),
        fingerprint=earlier.digest,
        architecture=type(model).__name__,
        parameters=parameters,
        dtype=_dtype_name(compute_dtype, quantised.format or str(dtype).removeprefix("torch.")),
        vocabulary=text_config.vocab_size,
        context=context,
        slots=slots,
        max_context=largest_context,
        decoder_start_tokens=_start_tokens(model),
        device=config.device,
        tensor_parallel=config.tensor_parallel,
        batch_invariant=invariant,
        not_native_reason=selection.reason,
        kernel_variants=step_variants() if selection.reason is None else (),
        adapters=adapters.infos,
        quantization_estimate=_quantization_estimate(config, model, available, quantised.format),
        input_modalities=_modalities(contents, speech),
        speech=None if speech is None else speech_info(model),
        unread_modalities=() if contents is None else _further_modalities(model_config, contents),
        default_max_tokens=_default_max_tokens(model),
    )
    ends = _end_tokens(name, model, tokenizer)
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        runner=selection.runner,
        info=info,
        memory=memory,
        recurrent=recurrent,
        dtype=dtype,
        kv_dtype=kv_dtype,
        eos=ends,
        grammars=GrammarCompiler(tokenizer, vocabulary_size=text_config.vocab_size, end_tokens=ends),
        encoder=encoder,
        speech_reader=speech,
        content_encoder=contents,
        adapters=adapters,
        adapter_reader=adapter_reader,
    )
    return replace(loaded, identity=_identity(checkpoint, loaded, quantised.key))


def _move_to_device(
    config: EngineConfig,
    layers: LayersToQuantize,
    checks: ModelChecks,
    plan_names: Callable[[], QuantizationPlanNames] | None,
) -> QuantizedLayers:
    """Move the model from CPU memory to another device, which may have memory for the quantised weights only.

    plan_names  of the layers to quantise; None: nothing is quantised
    """
    if config.device == "cpu":
        return QuantizedLayers()
    plan = None if plan_names is None else checks.plan_by(plan_names)
    quantised = quantize_layers(config, layers, plan)
    layers.model.to(config.device)
    return quantised


def _fuse(config: EngineConfig, runner: LocalRunner, vocabulary: int, on_phase: Callable[[str], None]) -> None:
    """Compile functions of a packed model, by the settings."""
    if config.compile and isinstance(runner, PackedRunner):
        on_phase("compile")
        fuse(runner.model, vocabulary)


def _plan_names(name: str, model_config: Any, dtype: torch.dtype) -> QuantizationPlanNames:
    """The layers to quantise of a model that has not run. Raises ModelUnsupported."""
    return make_skeleton(name, deepcopy(model_config), dtype).quantization.names


def _has_pool(recurrent: bool, runner: ModelRunner) -> bool:
    """Whether recurrent states of running sequences are in a pool."""
    return recurrent and isinstance(runner, DeviceRunner)


def _quantization_estimate(
    config: EngineConfig, model: Any, available: int, format: str | None
) -> QuantizationEstimate | None:
    can_quantise = format is None and config.device == "cpu" and config.tensor_parallel == 1
    return estimate(model, available) if can_quantise else None


def _dtype_name(compute_dtype: torch.dtype, weights: str) -> str:
    """The dtype of activations for display, and the format of the weights if it is another one."""
    name = str(compute_dtype).removeprefix("torch.")
    return name if weights == name else f"{name}, {weights} weights"


def _read_earlier_checks(
    name: str, settings: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, kv_dtype: torch.dtype
) -> EarlierChecks:
    """Raises ModelUnsupported."""
    try:
        others = () if checkpoint.tower is None else checkpoint.tower.content.files
        digest = fingerprint(checkpoint.path, *others)
    except OSError as error:
        raise ModelUnsupported(name, error_line(error)) from error
    return read_earlier_checks(settings, checkpoint, digest, dtype, kv_dtype)


def _content_encoder(
    source: _Source, config: EngineConfig, model: Any, reading: Future[Tokenizer], *, budget_bytes: int
) -> tuple[CapturingEncoder | None, EngineConfig]:
    """The encoder, None for a text model; and the settings with a chunk for its bidirectional ranges."""
    if source.processor is None:
        return None, config
    encoder = content_encoder(source.name, model, source.processor, reading.result(), budget_bytes=budget_bytes)
    return encoder, with_ranges(config, encoder)


def _further_modalities(config: Any, contents: CapturingEncoder) -> tuple[str, ...]:
    return tuple(name for name in unread_modalities(config) if name not in contents.kinds)


def _encoder(name: str, model: Any, *, budget_bytes: int) -> Encoder | None:
    if not has_encoder(model.config):
        return None
    try:
        return Encoder(model, budget_bytes=budget_bytes)
    except Exception as error:
        raise ModelUnsupported(name, f"its encoder cannot run ({type(error).__name__}: {error})") from error


def _speech_reader(name: str, model: Any, folder: Path, config: EngineConfig) -> SpeechReader | None:
    """The reader of sounds. Raises ModelUnsupported for a model whose encoder could read nothing else."""
    reader = speech_reader(model, folder)
    if model.config.is_encoder_decoder and reader is None and not config.media:
        raise ModelUnsupported(name, NO_ENCODER_INPUT)
    return reader


def _modalities(
    contents: CapturingEncoder | None, speech: SpeechReader | None
) -> tuple[Literal["text"] | ContentKind, ...]:
    kinds: tuple[ContentKind, ...] = () if contents is None else tuple(contents.kinds)
    return ("text", *kinds) if speech is None else ("text", *kinds, "audio")


def _identity(checkpoint: Checkpoint, loaded: LoadedModel, int4_key: str) -> str:
    """A digest of the dependencies of cells and states besides tokens: a disk cache of another identity is not read."""
    info, specs = loaded.info, [astuple(layer.spec) for layer in loaded.layers]
    parts: tuple[object, ...] = (info.fingerprint, checkpoint.configuration, info.dtype, loaded.kv_dtype, specs)
    if int4_key:
        parts = (*parts, int4_key)
    if loaded.runner.switch is not None:
        # Earlier versions rotated all sequences by the long factors.
        parts = (*parts, astuple(loaded.runner.switch))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _use_device(device: str) -> None:
    """The device of the model; the kernels of the CPU are compiled while the model is read."""
    use_device(device)
    if device == "cpu":
        compile_ahead()


def _start_tokenizer(name: str, checkpoint: Checkpoint, file: str | None, vocabulary: int) -> Future[Tokenizer]:
    """Read the tokenizer in another thread: large ones take seconds. The process that renders its chat template imports
    transformers meanwhile.

    file  of a chat template in place of the model's own
    """
    template = read_template(name, file)
    template_processes().start()
    pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    reading = pool.submit(read_model_tokenizer, name, checkpoint, template, vocabulary=vocabulary)
    pool.shutdown(wait=False)
    return reading


def _end_tokens(name: str, model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a completion, by the model's generation configuration. Raises ModelUnsupported."""
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None) or getattr(model.config, "eos_token_id", None)
    if ends is None:
        return tokenizer.eos_tokens
    try:
        return frozenset(index(end) for end in (ends if isinstance(ends, list | tuple) else (ends,)))
    except TypeError as error:
        raise ModelUnsupported(
            name, f"its eos_token_id is neither a token nor a list of tokens: {ends!r:.100}"
        ) from error


def _default_max_tokens(model: Any) -> int | None:
    """The length of an answer that is not limited otherwise, by the model's generation configuration."""
    limit = getattr(getattr(model, "generation_config", None), "max_new_tokens", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _start_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that a decoder's prompt begins with: the start token, and the forced first token."""
    if not model.config.is_encoder_decoder:
        return ()
    sources, names = (model.generation_config, model.config), ("decoder_start_token_id", "forced_bos_token_id")
    tokens = [next((t for source in sources if (t := getattr(source, name, None)) is not None), None) for name in names]
    return tuple(token for token in tokens if isinstance(token, int))
