"""The checks of a model at load; the stored outcome of an earlier start replaces them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import BUNDLED_NAME, EngineConfig
from engine.errors import ModelUnsupported
from engine.gguf.matrices import FileMatrices
from engine.kernels import dispatch, reference
from engine.kernels.attention_input import AttentionFunction
from engine.kernels.products import RowInvariantProduct, TiledProduct
from engine.load.check.outcomes import Outcome, OutcomeFile
from engine.load.check.selection import RunnerSelection, select
from engine.load.check.selftest import ModelTraits, batch_dependence, find_runner, restore_runner
from engine.load.read.checkpoint import Checkpoint, is_small
from engine.load.read.skeleton import tower_modules
from engine.media.encoder import CapturingEncoder
from engine.model.encoder import Encoder
from engine.model.margins import Margin, Margins
from engine.model.rope import RopeSwitch
from engine.quantize.plan import LayerSurvey, QuantizationPlan, QuantizationPlanNames, plan_from_names
from engine.run.device import DeviceRunner
from engine.run.packed import PackedRunner
from engine.run.runner import LocalRunner

log = logging.getLogger("cellar.engine")


@dataclass(frozen=True, slots=True)
class EarlierChecks:
    """The outcome of an earlier start, which is read before the weights.

    digest   of the weights
    file     None: the model is checked at every start
    outcome  None: there is no earlier start
    attend   the preferred attention kernel
    """

    digest: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    attend: AttentionFunction
    file: OutcomeFile | None
    outcome: Outcome | None

    @property
    def quantised(self) -> QuantizationPlanNames | None:
        """The layers to quantise."""
        return None if self.outcome is None else self.outcome.quantised


def read_earlier_checks(
    config: EngineConfig, checkpoint: Checkpoint, digest: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> EarlierChecks:
    """The outcome for the weights with a digest, the dtype of the model, and that of cached keys and values."""
    attend = _attention_kernel(config, dtype, kv_dtype)
    file = _outcome_file(config, checkpoint, (digest, dtype, kv_dtype), attend)
    return EarlierChecks(digest, dtype, kv_dtype, attend, file, None if file is None else file.read())


class ModelChecks:
    """The checks of one model; its methods are called in order.

    earlier  the outcome of an earlier start; None: everything is checked
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Any,
        checks: EarlierChecks,
        *,
        surveys: bool,
        matrices: FileMatrices | None = None,
    ) -> None:
        """Without an earlier outcome, start the survey of layers to quantise.

        surveys   whether layers are quantised or repacked after the checks, which find them
        matrices  those of the model's GGUF file if layers keep its formats
        """
        self._deferred = None if matrices is None else matrices.deferred
        self._config, self._model = config, model
        self._dtype, self._kv_dtype, self._attend = checks.dtype, checks.kv_dtype, checks.attend
        self._file, self.earlier = checks.file, checks.outcome
        self._plan: QuantizationPlan | None = None
        if self.earlier is not None and self.earlier.quantised is not None:
            self._plan = plan_from_names(model, self.earlier.quantised)
            self.earlier = None if self._plan is None else self.earlier
        surveys = surveys and self.earlier is None
        self._survey = LayerSurvey(model, skipped=tower_modules(model)) if surveys else None

    def set_traits(
        self,
        vocabulary: int,
        *,
        recurrent: bool,
        encoder: Encoder | None,
        contents: CapturingEncoder | None = None,
        switch: RopeSwitch | None = None,
    ) -> None:
        """Set the remaining traits of the model, see ModelTraits."""
        self._traits = ModelTraits(
            vocabulary=vocabulary,
            recurrent=recurrent,
            dtype=self._dtype,
            kv_dtype=self._kv_dtype,
            mla=self._config.mla,
            attend=self._attend,
            encoder=encoder,
            contents=contents,
            switch=switch,
            records=self._config.records_steps,
        )

    def find_runner(self, name: str) -> None:
        """Find the torch runner of the model. Raises ModelUnsupported."""
        self._torch_runner: LocalRunner
        if self.earlier is None:
            self._torch_runner = self._find_runner(name)
        else:
            layers, has_hidden_states = self.earlier.layers, self.earlier.has_hidden_states
            self._torch_runner = restore_runner(self._model, self._traits, layers, has_hidden_states=has_hidden_states)

    def _find_runner(self, name: str) -> LocalRunner:
        try:
            return find_runner(name, self._model, self._traits)
        except ModelUnsupported:
            if self._deferred is None:
                raise
        # The model may read weights outside of calls.
        self._deferred.close()
        return find_runner(name, self._model, self._traits)

    def plan_by(self, names: Callable[[], QuantizationPlanNames]) -> QuantizationPlan | None:
        """The layers to quantise before the checks, by the earlier outcome or by `names`."""
        self._plan = self._plan or plan_from_names(self._model, names())
        return self._plan

    def quantization_plan(self) -> QuantizationPlan | None:
        """The layers to quantise; None: the settings exclude quantisation."""
        if self._survey is not None:
            self._plan = self._survey.close()
        return self._plan

    def select(self, format: str | None, *, context: int) -> tuple[RunnerSelection, bool]:
        """The fastest runner, and whether it is batch invariant; stores the outcome of all checks.

        format   name of the format of quantised weights; None: weights are not quantised
        context  positions of the model
        """
        passed = self.earlier if self.earlier is not None and self.earlier.format == format else None
        selection = self._select(context, checked=passed is not None and passed.native)
        invariant = self._is_batch_invariant(selection, format, passed)
        self._save(format, selection, batch_invariant=invariant)
        return selection, invariant

    def _select(self, context: int, *, checked: bool) -> RunnerSelection:
        config, runner = self._config, self._torch_runner
        # The native step computes in float32 whatever the dtype of the weights is, so it excludes other dtypes set
        # explicitly.
        if config.dtype not in ("auto", "float32"):
            return RunnerSelection(runner, f"--dtype {config.dtype} is computed by torch")
        if config.tensor_parallel > 1:
            graphs = ", without CUDA graphs" if isinstance(runner, DeviceRunner) else ""
            return RunnerSelection(runner, f"--tensor-parallel {config.tensor_parallel} is computed by torch{graphs}")
        if config.kernels == "torch" or config.device != "cpu":
            return RunnerSelection(runner, "C++ kernels are not used")
        return select(self._model, runner, self._traits, context=context, checked=checked)

    def _is_batch_invariant(self, selection: RunnerSelection, format: str | None, passed: Outcome | None) -> bool:
        """See ModelInfo. Models that quantise rows are made batch invariant too, as they amplify rounding; the result
        is checked. Raises ModelUnsupported.
        """
        runner, native, is_required = selection.runner, selection.reason is None, self._config.batch_invariant
        is_wanted = is_required or self._config.has_adapters
        quantises_rows = format is not None and self._config.device == "cpu"
        if self._dtype == torch.float64 or not (quantises_rows or (is_wanted and not native)):
            return native
        runner.make_invariant(self._row_invariant())
        if passed is not None and passed.batch_invariant and passed.native == native:
            return True
        reason = batch_dependence(runner, self._model, self._traits)
        if reason is None:
            return True
        name = self._config.model or BUNDLED_NAME
        if is_required:
            raise ModelUnsupported(name, f"{reason}; leave out --batch-invariant")
        log.warning(
            "%s is not batch invariant as loaded: batches, chunks and prefix hits may change a completion (%s)",
            name,
            reason,
        )
        return False

    def _row_invariant(self) -> RowInvariantProduct:
        if self._config.device != "cpu":
            return dispatch.device_row_invariant(self._config.device)
        return TiledProduct() if self._config.kernels == "torch" else dispatch.best_row_invariant()

    def _save(self, format: str | None, selection: RunnerSelection, *, batch_invariant: bool) -> None:
        runner, file = self._torch_runner, self._file
        if file is None:
            return
        # The reason for a slower runner may be the machine rather than the model, so it is checked at every start.
        if not isinstance(runner, PackedRunner) or runner.attend is not self._attend:
            file.discard()
            return
        outcome = Outcome(
            layers=runner.layers,
            has_hidden_states=runner.has_hidden_states,
            quantised=None if self._plan is None else self._plan.names,
            format=format,
            native=selection.reason is None,
            batch_invariant=batch_invariant,
        )
        if outcome != self.earlier:
            file.write(outcome)


def log_margins(margins: Margins) -> tuple[Margin, ...]:
    """Log the margins of the decisions at load, and return them, the narrowest first."""
    for margin in margins.narrowest:
        log.debug("margin: %s", margin)
    return margins.narrowest


def _attention_kernel(config: EngineConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionFunction:
    if config.kernels == "torch":
        return reference.attend
    return dispatch.attention_kernel(dtype, kv_dtype, config.device, one_tile=config.batch_invariant)


def _outcome_file(
    config: EngineConfig, checkpoint: Checkpoint, weights: tuple[object, ...], attend: AttentionFunction
) -> OutcomeFile | None:
    """The file of the outcome; None for small models: their checks take less than a second.

    None under tensor parallelism as well: ranks that read different outcomes would run different checks.
    """
    if is_small(checkpoint.path) or config.tensor_parallel > 1:
        return None
    settings: tuple[object, ...] = (config.device, config.kernels, config.mla)
    settings += (config.quantize == "none", config.dtype, config.batch_invariant, config.has_adapters, config.no_media)
    kernel = getattr(attend, "__qualname__", type(attend).__qualname__)
    return OutcomeFile((weights, checkpoint.configuration, settings, kernel))
