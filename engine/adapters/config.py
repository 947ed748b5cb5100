"""The settings of a PEFT adapter (adapter_config.json), each of which is read, ignored or refused by its name.

A setting that changes the result and is not implemented must not be ignored: the adapter would silently compute
another text than in PEFT.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.errors import AdapterUnsupported

CONFIG_FILE = "adapter_config.json"
Number = TypeVar("Number", int, float)

# Settings that `AdapterConfig` reads.
READ = frozenset(
    ("peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights")
)
# Settings without an effect on the result of a saved adapter: its origin, its training, and the choice of its layers,
# which the names in its file tell.
IGNORED = frozenset(
    (
        *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # Of settings that are refused.
        *("megatron_core", "qalora_group_size"),
    )
)
# Settings that change the result, and are refused with another value than these.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "kasa_config": (None,),
    "layer_replication": (None,),
    "lora_bias": (False,),
    "megatron_config": (None,),
    "modules_to_save": (None, []),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_dora": (False,),
    "use_qalora": (False,),
    "velora_config": (None,),
}
# Values of a setting that is not in PEFT's version of the tests.
_NEUTRAL_UNKNOWN: tuple[object, ...] = (None, False, "", [], {})
# Initialisations that leave the weights of the model unchanged. The others move a part of them into the adapter, so
# its saved matrices alone are not the difference to the model.
_PLAIN_INITIALISATIONS: tuple[object, ...] = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_TASKS: tuple[object, ...] = (None, "CAUSAL_LM")
# Layers of the largest models have fewer columns.
_MAX_RANK = 2**16


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank and scaling of each layer.

    rank_pattern, alpha_pattern  ranks and alphas of the layers whose names end in a match of a regular expression
    uses_rslora                  the scaling is alpha / sqrt(rank) instead of alpha / rank
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    uses_rslora: bool = False

    @classmethod
    def parse(cls, name: str, content: bytes) -> AdapterConfig:
        """The settings in an adapter_config.json. Raises AdapterUnsupported with the name of the adapter."""
        settings = _parse_object(name, content)
        _check_supported(name, settings)
        rank_pattern, alpha_pattern = (settings.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
        config = cls(
            settings.get("r", 8),
            settings.get("lora_alpha", 8),
            rank_pattern,
            alpha_pattern,
            bool(settings.get("use_rslora", False)),
        )
        config._check(name)
        return config

    def rank_of(self, layer: str) -> int:
        """The rank of a layer by its name."""
        return _first_match(self.rank_pattern, layer, self.rank)

    def scaling_of(self, layer: str) -> float:
        """The factor of the low-rank product of a layer."""
        rank, alpha = self.rank_of(layer), _first_match(self.alpha_pattern, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)

    def _check(self, name: str) -> None:
        for setting, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            if not isinstance(patterns, dict):
                raise AdapterUnsupported(name, f"its {setting} is no object")
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except (re.error, RecursionError, OverflowError) as error:
                    raise AdapterUnsupported(name, f"its {setting} has an invalid expression ({error})") from error
        for rank in (self.rank, *self.rank_pattern.values()):
            if type(rank) is not int or not 1 <= rank <= _MAX_RANK:
                raise AdapterUnsupported(name, f"its rank is {rank!r}, not a number from 1 on")
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if type(alpha) not in (int, float) or not math.isfinite(alpha):
                raise AdapterUnsupported(name, f"its lora_alpha is {alpha!r}, not a number")


def _parse_object(name: str, content: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterUnsupported(name, f"its adapter_config.json is no JSON ({error})") from error
    if not isinstance(settings, dict):
        raise AdapterUnsupported(name, "its adapter_config.json is no JSON object")
    return settings


def _check_supported(name: str, settings: Mapping[str, Any]) -> None:
    """Raise AdapterUnsupported for a setting with an effect that is not implemented."""
    if settings.get("peft_type") != "LORA":
        raise AdapterUnsupported(name, f"its peft_type is {settings.get('peft_type')!r}, and only 'LORA' is supported")
    for setting, value in settings.items():
        if setting in READ or setting in IGNORED:
            continue
        if not _is_any_of(value, NEUTRAL_VALUES.get(setting, _NEUTRAL_UNKNOWN)):
            raise AdapterUnsupported(name, f"{setting}={_shown(value)} is not supported")
    if not _is_any_of(settings.get("task_type"), _TASKS):
        raise AdapterUnsupported(name, f"task_type={_shown(settings['task_type'])} is not supported")
    initialisation = settings.get("init_lora_weights")
    if not _is_any_of(initialisation, _PLAIN_INITIALISATIONS):
        raise AdapterUnsupported(
            name,
            f"init_lora_weights={_shown(initialisation)} changes the weights of the model; save the adapter with "
            "path_initial_model_for_weight_conversion",
        )


def _is_any_of(value: object, accepted: tuple[object, ...]) -> bool:
    """Whether a value is one of the accepted ones, without Python's equality of 0, 0.0 and False."""
    return any(type(value) is type(option) and value == option for option in accepted)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _first_match(patterns: Mapping[str, Number], layer: str, default: Number) -> Number:
    """The value of the first pattern that matches the end of a name, as in PEFT."""
    matches = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return next(matches, default)
