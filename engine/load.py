"""From a name to a model that is known to give right results here: resolve, load, calibrate, check.

Only safetensors are read, and no code of a checkpoint is ever run.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from engine import hooks, recurrence
from engine.config import BUNDLED_NAME, EngineConfig
from engine.encoding import Encoder, has_encoder
from engine.errors import ModelUnsupported
from engine.folder import BROKEN, fingerprint, is_small, no_weights, one_line, resolve, threads_for, weight_files
from engine.gathering import GatheringRunner
from engine.grammars import Grammars
from engine.kernels import choice, linear, reference
from engine.kernels.packing import Bits
from engine.kernels.products import TiledProduct
from engine.memory import Sizes, available_bytes, most_context, plan_memory
from engine.native.choosing import fastest
from engine.native.runner import NativeRunner
from engine.plan import LayerPlan
from engine.quantize.store import Store
from engine.quantize.surgery import bits_for, bytes_of, quantize
from engine.quantize.survey import Survey
from engine.runner import Runner
from engine.selftest import Facts, find_runner, is_batch_invariant
from engine.status import MemoryPlan, ModelInfo
from engine.tokenizer import Tokenizer

log = logging.getLogger("cellar.engine")

# Of a weight in MXFP4: 32 of them share a scale of 8 bits.
_MXFP4_BITS = 4.25


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is known to answer rightly over our cells, and all that serving it needs to know."""

    model: Any
    tokenizer: Tokenizer
    runner: Runner | GatheringRunner
    info: ModelInfo
    memory: MemoryPlan
    recurrent: bool
    dtype: torch.dtype
    stored: torch.dtype
    eos: frozenset[int]
    grammars: Grammars
    encoder: Encoder | None = None
    identity: str = ""

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """What the model stores, for the cache."""
        return self.runner.layers

    @property
    def capacity(self) -> int:
        """Tokens that one sequence may hold: its context, or all cells if these are fewer."""
        return min(self.info.context, self.memory.cells)


def load(config: EngineConfig, on_phase: Callable[[str], None], *, promised_bytes: int = 0) -> Loaded:
    """Load the model, leaving `promised_bytes` to others; `on_phase` hears of each step. Raises ModelError kinds."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    on_phase("resolve")
    folder, name = resolve(config.model), config.model or BUNDLED_NAME
    available = max(available_bytes() - promised_bytes, 0)
    torch.set_num_threads(config.threads or threads_for(folder))
    on_phase("weights")
    model, dtype = _read(name, folder, config)
    text, parameters = model.config.get_text_config(), sum(one.numel() for one in model.parameters())
    if config.context is not None and config.context > longest_context(text):
        raise ModelUnsupported(name, f"it knows contexts of up to {longest_context(text)} tokens; lower --context")
    on_phase("calibrate")
    _freeze_rotation(model, config.context or longest_context(text))
    survey = None if config.quantize == "none" or config.device != "cpu" else Survey(model)
    recurrent = _install(model)
    on_phase("kernels")
    stored: torch.dtype = dtype if config.kv_dtype == "auto" else getattr(torch, config.kv_dtype)
    encoder = _encoder(name, model, budget_bytes=available // 8)
    facts = _facts(config, text.vocab_size, recurrent=recurrent, dtype=dtype, stored=stored, encoder=encoder)
    on_phase("self-test")
    runner = find_runner(name, model, facts)
    weights = fingerprint(folder)
    on_phase("quantize" if survey is not None else "native step")
    bits = None if survey is None else _quantize(config, model, survey, f"{weights} {dtype}", available)
    runner = _fastest(config, model, runner, facts)
    computed = torch.float32 if isinstance(runner, NativeRunner) else dtype
    sizes = _sizes(model, runner.layers, computed, stored)
    reserved = sizes.weights_bytes + (0 if encoder is None else encoder.budget_bytes)
    memory, context, slots = plan_memory(config, sizes, available - reserved)
    longest, held = max(context, most_context(config, sizes, available - reserved)), min(context, memory.cells)
    tokenizer = _read_tokenizer(name, folder, vocabulary=text.vocab_size, context=held, longest=longest)
    info = ModelInfo(
        name=name,
        folder=str(folder),
        fingerprint=weights,
        architecture=type(model).__name__,
        parameters=parameters,
        dtype=_format(computed, dtype, bits),
        vocabulary=text.vocab_size,
        context=context,
        slots=slots,
        longest=longest,
        start=_start_tokens(model),
        device=config.device,
        batch_invariant=_is_batch_invariant(config, model, runner, facts, bits),
    )
    ends, identity = _end_tokens(model, tokenizer), _identity(folder, info, stored, runner.layers)
    grammars = Grammars(tokenizer, size=text.vocab_size, ends=ends)
    return Loaded(model, tokenizer, runner, info, memory, recurrent, dtype, stored, ends, grammars, encoder, identity)


def _quantize(config: EngineConfig, model: Any, survey: Survey, identity: str, available: int) -> Bits | None:
    """Quantise what the survey has found, as far as the settings want it; how many bits a weight got."""
    found = survey.close()
    bits = bits_for(config.quantize, found, available)
    if bits is None:
        return None
    prepare = linear.prepare if config.kernels == "torch" else choice.multiplies()
    try:
        quantize(model, found, Store(identity, bits), prepare)
    except ValueError as error:
        raise ModelUnsupported(config.model or BUNDLED_NAME, f"its weights cannot be quantised: {error}") from error
    _leave_file(model)
    return bits


def _leave_file(model: Any) -> None:
    """Copy what is left of the weights: one small tensor that still lies in a mapped file keeps all of it mapped."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _format(computed: torch.dtype, dtype: torch.dtype, bits: Bits | None) -> str:
    """The number formats, as people read them: in what it computes, and what of other formats its weights have."""
    names = [str(one).removeprefix("torch.") for one in (computed, dtype)]
    weights = names[1] if bits is None else f"int{bits}"
    return names[0] if weights == names[0] else f"{names[0]}, {weights} weights"


def _dtype(settings: EngineConfig, folder: Path, config: Any) -> torch.dtype:
    """The number format of weights, and to compute in.

    "auto" is bfloat16 for checkpoints in it where the processor multiplies it (measured 1.3-3 times faster than float32
    on AVX512-BF16, slower without), and float32 else: for small models too, where exactness costs nothing.
    Weights and cells have it then; where the native step runs the model, it computes in float32 (`_fastest`).
    """
    if settings.dtype != "auto":
        chosen: torch.dtype = getattr(torch, settings.dtype)
        return chosen
    stored = getattr(config.get_text_config(), "dtype", None)
    native = settings.device != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if stored == torch.bfloat16 and native and not is_small(folder) else torch.float32


def _read(name: str, folder: Path, settings: EngineConfig) -> tuple[Any, torch.dtype]:
    if not weight_files(folder):
        raise ModelUnsupported(name, no_weights(folder))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        dtype = _dtype(settings, folder, config)
        _widen(name, folder, config, dtype)
        model, report = _kind(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except BROKEN as error:
        raise ModelUnsupported(name, one_line(error)) from error
    if report["missing_keys"] or report["mismatched_keys"]:
        missing = sorted(report["missing_keys"]) or sorted(str(key) for key in report["mismatched_keys"])
        raise ModelUnsupported(name, f"its files lack weights, {len(missing)} in all, such as {missing[0]}")
    if dtype == torch.float64:
        # The default, a grouped matrix product, knows no float64.
        model.set_experts_implementation("eager")
    return model.to(settings.device).eval().requires_grad_(False), dtype


def _widen(name: str, folder: Path, config: Any, dtype: torch.dtype) -> None:
    """Have weights in MXFP4 read as those of a type: nothing here multiplies them as they are."""
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") != "mxfp4":
        return
    stored["dequantize"] = True
    size = sum(file.stat().st_size for file in weight_files(folder)) * torch.finfo(dtype).bits / _MXFP4_BITS
    log.warning(
        "%s has weights in MXFP4: they are read as %s, which takes about %.1f GiB until --quantize makes them smaller",
        name,
        str(dtype).removeprefix("torch."),
        size / 2**30,
    )


def _kind(config: Any) -> Any:
    """transformers' own choice of a class: one with the encoder where the configuration has one."""
    kinds = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
    known = [kind for kind in kinds if has_encoder(config) and type(config) in kind._model_mapping]
    return known[0] if known else AutoModelForCausalLM


def _encoder(name: str, model: Any, *, budget_bytes: int) -> Encoder | None:
    if not has_encoder(model.config):
        return None
    try:
        return Encoder(model, budget_bytes=budget_bytes)
    except Exception as error:
        raise ModelUnsupported(name, f"its encoder cannot run ({type(error).__name__}: {error})") from error


def _identity(folder: Path, info: ModelInfo, stored: torch.dtype, layers: tuple[LayerPlan, ...]) -> str:
    """A digest of what cells and states depend on besides tokens: what the shelf has of another model is not read."""
    settings = (folder / "config.json").read_bytes()
    parts = (info.fingerprint, settings, info.dtype, stored, [plan.spec for plan in layers])
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read_tokenizer(name: str, folder: Path, *, vocabulary: int, context: int, longest: int) -> Tokenizer:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return Tokenizer(tokenizer, vocabulary=vocabulary, context=context, longest=longest)
    except BROKEN as error:
        raise ModelUnsupported(name, f"its tokenizer cannot be read: {one_line(error)}") from error


def _freeze_rotation(model: Any, context: int) -> None:
    """Fix rotations that transformers chooses anew in each forward by its longest position.

    In a packed batch one long sequence would change the others (measured 3.7 on logits of 5), and a sequence would
    disagree with its own past. They are fixed as for a full context.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            frequency, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, module.inv_freq.device, seq_len=context)
            module.inv_freq.copy_(frequency)
            module.attention_scaling = scaling
            module.rope_type = "frozen"


def _install(model: Any) -> bool:
    """Put every hook in its place; whether some layers keep a state."""
    hooks.install_latent(model)
    hooks.install_bias(model)
    return recurrence.install(model)


def _facts(
    config: EngineConfig,
    vocabulary: int,
    *,
    recurrent: bool,
    dtype: torch.dtype,
    stored: torch.dtype,
    encoder: Encoder | None,
) -> Facts:
    attend = reference.attend
    if config.kernels != "torch" and config.device == "cpu":
        attend = choice.fastest(dtype, stored)
    return Facts(
        vocabulary=vocabulary,
        recurrent=recurrent,
        dtype=dtype,
        stored=stored,
        mla=config.mla,
        attend=attend,
        encoder=encoder,
    )


def _fastest(
    config: EngineConfig, model: Any, runner: Runner | GatheringRunner, facts: Facts
) -> Runner | GatheringRunner:
    # The native step computes in float32 whatever the weights are: not where another format is asked for by name.
    asked = config.dtype not in ("auto", "float32")
    if config.kernels == "torch" or config.device != "cpu" or asked:
        return runner
    return fastest(model, runner, facts, context=config.context or longest_context(model.config.get_text_config()))


def _is_batch_invariant(
    config: EngineConfig, model: Any, runner: Runner | GatheringRunner, facts: Facts, bits: Bits | None
) -> bool:
    """See ModelInfo. Quantised models are made so, for they amplify rounding; the outcome is checked."""
    if bits is None or facts.dtype == torch.float64:
        return isinstance(runner, NativeRunner)
    runner.make_invariant(TiledProduct() if config.kernels == "torch" else choice.row_invariant())
    invariant = is_batch_invariant(runner, model, facts)
    if not invariant:
        log.warning(
            "%s, quantised, rounds differently in another batch: neighbours, chunks and prefix hits may change a text",
            config.model or BUNDLED_NAME,
        )
    return invariant


def known_context(name: str, folder: Path) -> int:
    """The context that the model in a folder was trained for, without loading it. Raises ModelUnsupported."""
    try:
        return longest_context(AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config())
    except BROKEN as error:
        raise ModelUnsupported(name, one_line(error)) from error


def longest_context(text: Any) -> int:
    """The context that a model was trained for, as its text settings say it."""
    names = ("max_position_embeddings", "max_target_positions")
    return int(next((known for name in names if (known := getattr(text, name, None))), 8192))


def _sizes(model: Any, layers: tuple[LayerPlan, ...], dtype: torch.dtype, stored: torch.dtype) -> Sizes:
    text = model.config.get_text_config()
    element = torch.finfo(dtype).bits // 8
    # A row of a step holds its activations of one layer at a time, about 16 widths with the MLP's, and its logits.
    row = 16 * int(text.hidden_size) * element + 8 * int(text.vocab_size)
    specs = tuple(plan.spec for plan in layers)
    weights = bytes_of(model)
    return Sizes(weights_bytes=weights, layers=specs, stored=stored, row_bytes=row, longest=longest_context(text))


def _end_tokens(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer, as the model's generation settings name them."""
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None) or getattr(model.config, "eos_token_id", None)
    if ends is None:
        return tokenizer.ends
    return frozenset(ends) if isinstance(ends, list | tuple) else frozenset((int(ends),))


def _start_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that a decoder's prompt begins with: what starts it, and what it is forced to say first."""
    if not model.config.is_encoder_decoder:
        return ()
    sources, names = (model.generation_config, model.config), ("decoder_start_token_id", "forced_bos_token_id")
    known = [next((at for one in sources if (at := getattr(one, name, None)) is not None), None) for name in names]
    return tuple(token for token in known if isinstance(token, int))
