"""Statistics of a model's linear layers over a calibration text: inputs, and the effect of errors on the predictions.

The text runs once through the unquantised model, forwards and backwards. An error of an output changes the predicted
distribution by about half its square times the mean square of the gradient of a log-probability (the diagonal of the
Fisher information), in nats of divergence.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.quantize.plan import QuantizationPlan

log = logging.getLogger("cellar.engine")

# Sequences of the text and their length in tokens: further ones change the perplexity of int4 by less than its noise.
_SEQUENCES, _LENGTH = 4, 256
# One position in _LOGIT_STEP is predicted: logits of a large vocabulary take more memory than everything else.
_LOGIT_STEP = 8
_BUILT_IN = Path(__file__).with_name("calibration.txt")


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Statistics of one linear layer.

    inputs       [tokens, columns], each scaled to a mean square of 1: outliers of a few tokens do not dominate
    sensitivity  divergence in nats for a unit mean square error of each output, float32 [outputs]; None: not measured
    """

    inputs: Tensor
    sensitivity: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text, and the tokenizer of the model as a function."""

    text: str
    encode: Callable[[str], list[int]]

    @property
    def digest(self) -> str:
        """A digest of the text and of the way in which it is used."""
        return hashlib.sha256(repr((self.text, _SEQUENCES, _LENGTH, _LOGIT_STEP)).encode()).hexdigest()

    def sequences(self) -> Iterator[list[int]]:
        """Token sequences of the text."""
        for part in _parts(self.text):
            tokens = self.encode(part)[:_LENGTH]
            if len(tokens) > 1:
                yield tokens


def read_text(file: str | None) -> str:
    """The calibration text of a file, or the built-in one. Raises OSError, and ValueError unless it is UTF-8."""
    return (_BUILT_IN if file is None else Path(file)).read_text(encoding="utf-8")


def _parts(text: str) -> Iterator[str]:
    """Equal parts of a text; each has more characters than its tokens need, if the text is long enough."""
    size = -(-len(text) // _SEQUENCES)
    yield from (text[start : start + size] for start in range(0, len(text), max(size, 1)))


def calibrate(
    model: Any, plan: QuantizationPlan, text: CalibrationText, attention: AbstractContextManager[None]
) -> Mapping[str, LayerStatistics]:
    """Statistics by the name of a layer, and of a module with experts: those of their up projections.

    Empty if the model cannot run on the text alone, with a warning.

    attention  has the attention of the unmodified model within its block
    """
    recorder = _ProductRecorder(plan)
    generator = torch.Generator().manual_seed(0)
    try:
        with attention, recorder.hooks(model), torch.inference_mode(mode=False), torch.enable_grad():
            for tokens in text.sequences():
                logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
                probabilities = logits.detach().softmax(-1)
                # Sampled tokens make it the Fisher information; tokens of the text would add the model's error.
                sampled = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
                recorder.predictions += len(sampled)
                nn.functional.cross_entropy(logits, sampled, reduction="sum").backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        log.warning("weights are quantised without a calibration (%s: %s)", type(error).__name__, error)
        return {}
    return recorder.statistics()


@dataclass(slots=True)
class _LayerRecord:
    """Inputs of a layer, their root mean squares, and the sum of squared gradients of its outputs."""

    inputs: list[Tensor] = field(default_factory=list)
    squares: Tensor | None = None

    def add_gradients(self, sizes: Tensor, gradients: Tensor) -> None:
        """Add gradients [tokens, outputs], scaled as the inputs."""
        squares = (gradients.flatten(0, -2).float() * sizes).square().sum(0)
        self.squares = squares if self.squares is None else self.squares + squares


class _ProductRecorder:
    """Hooks on the layers and experts of a plan."""

    def __init__(self, plan: QuantizationPlan) -> None:
        self.predictions = 0
        self._plan = plan
        self._records = {layer.name: _LayerRecord() for layer in plan.layers}
        self._records |= {name: _LayerRecord() for name in plan.experts}
        # Layers with the same input share one copy.
        self._first = {layer.name: group[0].name for group in plan.groups for layer in group}

    @contextmanager
    def hooks(self, model: Any) -> Iterator[None]:
        """Record the runs of the model."""
        handles = [model.get_input_embeddings().register_forward_hook(_require_gradient)]
        if (head := model.get_output_embeddings()) is not None:
            handles.append(head.register_forward_pre_hook(_skip_positions))
        for layer in self._plan.layers:
            handles.append(layer.module.register_forward_hook(partial(self._record, layer.name)))
        for name, experts in self._plan.experts.items():
            handles.append(experts.module.register_forward_hook(partial(self._record_inputs, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def statistics(self) -> dict[str, LayerStatistics]:
        """By name; layers of a group share the tensor of their inputs."""
        inputs = {name: torch.cat(record.inputs) for name, record in self._records.items() if record.inputs}
        return {
            name: LayerStatistics(inputs[self._source(name)], self._sensitivity(record))
            for name, record in self._records.items()
            if self._source(name) in inputs
        }

    def _source(self, name: str) -> str:
        return self._first.get(name, name)

    def _sensitivity(self, record: _LayerRecord) -> Tensor | None:
        return None if record.squares is None else record.squares / (2 * max(self.predictions, 1))

    def _record(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook of a linear layer."""
        sizes = self._record_inputs(name, module, inputs, output)
        if output.requires_grad:
            output.register_hook(partial(self._records[name].add_gradients, sizes))  # type: ignore[no-untyped-call]

    def _record_inputs(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> Tensor:
        """A forward hook; the root mean squares of the inputs [tokens, 1]."""
        rows = inputs[0].detach().flatten(0, -2).float()
        sizes = rows.square().mean(-1, keepdim=True).sqrt()
        if self._source(name) == name:
            scaled = rows / sizes.clamp_min(torch.finfo(torch.float32).tiny)
            self._records[name].inputs.append(scaled.bfloat16())
        return sizes


def _require_gradient(module: nn.Module, inputs: object, output: Tensor) -> None:
    output.requires_grad_()


def _skip_positions(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Keep the last of every few positions [batch, positions, columns]."""
    rows, *others = inputs
    return (rows[:, _LOGIT_STEP - 1 :: _LOGIT_STEP], *others)
