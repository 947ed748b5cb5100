"""The MTP layer of a model (multi-token prediction), and its runners: in torch modules, and in one native call.

A checkpoint keeps it next to the model's layers, and transformers has the module (MtpModel) with the model's decoder
layer, embedding and output layer. Its input is a pair: the model's last hidden state of a token, and the next token.
Of several MTP layers the first one is used for all positions. Pinned to transformers 5.23, like model/hooks.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import ModelUnsupported
from engine.load.check.selection import loaded_library, logit_tolerance
from engine.load.load import LoadedModel
from engine.load.read.mtp_layer import has_mtp_layer, read_mtp_layer
from engine.model import hooks
from engine.model.layers import CachedLayer, find_cached_layers
from engine.model.margins import within
from engine.native.decoder import UnsupportedArchitecture
from engine.native.detection import find_decoder
from engine.native.float32_mode import Float32Mode
from engine.native.pairs import NativePairRunner, PairOutput
from engine.native.runner import NativeRunner
from engine.native.weight_layout import move_weights
from engine.run.packed import PackedRunner
from engine.run.runner import runners_of
from engine.step.input import FINAL_NORM, StepFeatures
from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.spec import Span

log = logging.getLogger("cellar.engine")

# Lengths of the spans, by slot, in the steps that compare the native step with the modules.
_CHECK_STEPS = ({0: 9}, {0: 1, 1: 6}, {0: 1, 1: 1})


class _LayerOutput(NamedTuple):
    """Logits [1, logit rows, vocabulary], and hidden states [1, tokens, width]."""

    logits: Tensor
    states: Tensor


class MtpLayer(nn.Module):
    """One layer of transformers' module, with the signature of a model."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers, self.config = layers, layers.config

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        logits_to_keep: Tensor,
        states: Tensor | None = None,
    ) -> _LayerOutput:
        """Outputs for tokens [1, tokens] with the hidden state [1, tokens, width] of the token before each.

        position_ids  of pairs: rotary embeddings depend on their differences only
        states        None: those of `calibration_states`
        """
        states = self.calibration_states(input_ids.shape[1])[None] if states is None else states
        output = self.layers.forward_layer(0, states, position_ids, past_key_values, input_ids=input_ids)
        return _LayerOutput(self.layers._project_to_logits(output[:, logits_to_keep]), output)

    def calibration_states(self, tokens: int) -> Tensor:
        """Arbitrary hidden states [tokens, width], which are the same for any number of tokens."""
        weight, width = self.layers.layers[0].hnorm.weight, self.config.hidden_size
        return torch.arange(tokens * width, device=weight.device).sin().view(tokens, width).to(weight.dtype)

    def get_decoder(self) -> nn.Module:
        """The module with the list of layers, as of a model."""
        decoder: nn.Module = self.layers
        return decoder

    def get_input_embeddings(self) -> nn.Module:
        """The model's embedding."""
        embedding: nn.Module = self.layers.embed_tokens
        return embedding

    def get_output_embeddings(self) -> nn.Module:
        """The model's output layer."""
        head: nn.Module = self.layers.shared_head
        return head


class MtpRunner(PackedRunner):
    """The MTP layer in torch modules, over its own cache. Belongs to the engine thread."""

    def __init__(self, layer: MtpLayer, layers: Sequence[CachedLayer], target: PackedRunner) -> None:
        """Attention is computed, and tokens are sampled, as `target`, the model's runner, does it."""
        super().__init__(layer, layers, target.mla, target.attend)
        self.sampler = target.sampler
        self._layer = layer

    def run_pairs(
        self, forward: Forward, tokens: Sequence[int], states: Tensor, logit_rows: Sequence[int]
    ) -> PairOutput:
        """Outputs for the tokens of all spans, with the hidden states [tokens, width] of the tokens before them."""
        positions = self._tensor([position for span in forward.spans for position in range(span.start, span.stop)])
        batch = {"input_ids": self._tensor(tokens)[None], "position_ids": positions[None]}
        rows = self._tensor(logit_rows)
        # The native step returns float32 whatever the dtype of the weights.
        states = states.to(self._layer.layers.layers[0].hnorm.weight.dtype)
        with torch.inference_mode(), hooks.use_backend(self._backend(forward, ())):
            output: _LayerOutput = self._layer(
                **batch, past_key_values=hooks.CacheFacade(positions), logits_to_keep=rows, states=states[None]
            )
        return PairOutput(output.logits[0], output.states[0, rows])


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A loaded MTP layer."""

    runner: MtpRunner | NativePairRunner
    weights_bytes: int


def has_mtp(target: LoadedModel) -> bool:
    """Whether the model's checkpoint has MTP layers, at one of the published keys."""
    return has_mtp_layer(Path(target.info.folder), target.model.config.get_text_config())


def load_mtp(target: LoadedModel) -> MtpHead:
    """The first MTP layer of a model. Raises ModelUnsupported."""
    runners = runners_of(target.runner)
    packed = next((runner for runner in runners if isinstance(runner, PackedRunner)), None)
    if packed is None:
        raise ModelUnsupported(target.info.name, "it runs one sequence at a time, but its MTP layer needs batches")
    reason = target.runner.supports(StepFeatures(hidden_layers=(FINAL_NORM,)))
    if reason is not None:
        raise ModelUnsupported(target.info.name, f"{reason}, and its MTP layer reads them")
    if target.encoder is not None:
        raise ModelUnsupported(target.info.name, "its MTP layer has tokens as input, not the output of an encoder")
    try:
        layers = _load_layers(target)
        layer = MtpLayer(layers)
        plans = find_cached_layers(layer, vocabulary=target.info.vocabulary)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelUnsupported(
            target.info.name, f"its MTP layer cannot be used ({type(error).__name__}: {reason})"
        ) from error
    weights = sum(parameter.numel() * parameter.element_size() for parameter in layers.layers.parameters())
    modules = MtpRunner(layer, plans, packed)
    native = _native_runner(layer, modules, target) if isinstance(runners[0], NativeRunner) else None
    return MtpHead(native or modules, weights)


def _load_layers(target: LoadedModel) -> Any:
    layers = read_mtp_layer(Path(target.info.folder), target.model)
    layers.set_attn_implementation(hooks.ATTENTION_NAME)
    if target.dtype == torch.float64:
        layers.set_experts_implementation("eager")
    layers = layers.to(device=target.model.device, dtype=target.dtype).eval().requires_grad_(False)
    hooks.install_latent(layers)
    return layers


def _native_runner(layer: MtpLayer, modules: MtpRunner, target: LoadedModel) -> NativePairRunner | None:
    """The native runner of the layer if it agrees with the modules; None: it does not, for a logged reason."""
    vocabulary = target.info.vocabulary
    try:
        with Float32Mode(layer):
            decoder = find_decoder(
                layer,
                modules.layers,
                vocabulary=vocabulary,
                context=target.info.context,
                pair_states=layer.calibration_states,
            )
        # The other weights are the model's, and its native step reads them where they are.
        move_weights(layer.layers.layers)
        make = partial(NativePairRunner, modules, decoder, loaded_library())
        # Described outside of the mode, in which all weights appear as float32.
        runner, unrounded = make(), make(rounds_to_bfloat16=False)
        with Float32Mode(layer):
            error = _difference(modules, unrounded, layer, vocabulary)
    except UnsupportedArchitecture as reason:
        log.info("the MTP layer runs in torch operations, not in one native call: %s", reason.reason)
        return None
    if within("the native MTP layer changes no logits", error, logit_tolerance(decoder)):
        return runner
    log.warning("the MTP layer runs in torch operations, because the native step changes its logits by %.2g", error)
    return None


def _difference(modules: MtpRunner, native: NativePairRunner, layer: MtpLayer, vocabulary: int) -> float:
    """The largest difference of logits and hidden states in batches of the check, relative to the largest number."""
    outputs = [_check_outputs(runner, layer, vocabulary) for runner in (modules, native)]
    return max(
        float((expected - actual).abs().max() / expected.abs().max().clamp_min(1.0))
        for expected, actual in zip(*outputs, strict=True)
    )


def _check_outputs(runner: MtpRunner | NativePairRunner, layer: MtpLayer, vocabulary: int) -> PairOutput:
    """The outputs of all steps of the check."""
    cache = Cache([plan.spec for plan in runner.layers], slots=2, capacity=16, cells=32, dtype=torch.float32)
    generator, outputs = torch.Generator().manual_seed(0), []
    for lengths in _CHECK_STEPS:
        spans = [Span(slot, cache.cached_length(slot), length) for slot, length in lengths.items()]
        count = sum(lengths.values())
        tokens = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
        with cache.forward(spans) as forward:
            outputs.append(runner.run_pairs(forward, tokens, layer.calibration_states(count), range(count)))
    return PairOutput(*map(torch.cat, zip(*outputs, strict=True)))
