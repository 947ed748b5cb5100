"""Every setting of PEFT's LoraConfig is read, ignored or refused by its name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from peft import LoraConfig

from engine.adapters.config import IGNORED, NEUTRAL_VALUES, READ, AdapterConfig
from engine.errors import AdapterUnsupported


def config(**settings: Any) -> AdapterConfig:
    """The configuration of an adapter with some settings, as PEFT saves it."""
    saved = {name: value for name, value in LoraConfig().to_dict().items() if name != "runtime_config"}
    return AdapterConfig.parse("mine", json.dumps({**saved, **settings}, default=list).encode())


def test_every_setting_of_peft_has_one_treatment() -> None:
    """A setting that a new version of PEFT adds fails here until it is read, ignored or refused."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}

    assert fields == READ | IGNORED | set(NEUTRAL_VALUES)
    assert len(fields) == len(READ) + len(IGNORED) + len(NEUTRAL_VALUES)


def test_the_defaults_of_peft_are_neutral() -> None:
    """An adapter with PEFT's own defaults is accepted, with their rank and alpha."""
    assert config() == AdapterConfig(rank=8, alpha=8)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("alora_invocation_tokens", [5, 6]),
        ("arrow_config", {"top_k": 2}),
        ("bias", "lora_only"),
        ("fan_in_fan_out", True),
        ("kasa_config", {"beta": 1e-4}),
        ("layer_replication", [[0, 2]]),
        ("lora_bias", True),
        ("megatron_config", {"a": 1}),
        ("modules_to_save", ["lm_head"]),
        ("monteclora_config", {"a": 1}),
        ("target_parameters", ["experts.down_proj"]),
        ("trainable_token_indices", [3]),
        ("use_bdlora", {"a": 1}),
        ("use_dora", True),
        ("use_qalora", True),
        ("velora_config", {"a": 1}),
    ],
)
def test_a_setting_that_changes_the_result_is_refused_by_name(setting: str, value: object) -> None:
    """The message has the name of the setting and its value."""
    with pytest.raises(AdapterUnsupported, match=f"'mine'.*{setting}="):
        config(**{setting: value})


def test_each_refused_setting_is_tested() -> None:
    """The table above has all of them."""
    mark = next(iter(test_a_setting_that_changes_the_result_is_refused_by_name.pytestmark))

    assert {setting for setting, _ in mark.args[1]} == set(NEUTRAL_VALUES)


@pytest.mark.parametrize("method", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "newest"])
def test_an_initialisation_that_changes_the_model_is_refused(method: str) -> None:
    """The saved matrices are not the difference to the model then."""
    with pytest.raises(AdapterUnsupported, match="init_lora_weights.*path_initial_model_for_weight_conversion"):
        config(init_lora_weights=method)


@pytest.mark.parametrize("method", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_a_plain_initialisation_is_accepted(method: object) -> None:
    """It leaves the weights of the model as they are."""
    assert config(init_lora_weights=method).rank == 8


def test_an_unknown_setting_is_refused_unless_it_is_empty() -> None:
    """A setting of a later PEFT may change the result."""
    assert config(use_newest=None, newest_names=[], newest_flag=False) == config()
    with pytest.raises(AdapterUnsupported, match="use_newest=True"):
        config(use_newest=True)
    with pytest.raises(AdapterUnsupported, match="use_newest=0"):
        config(use_newest=0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"peft_type": None}, "peft_type is None"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS'"),
        ({"r": 0}, "rank is 0"),
        ({"r": True}, "rank is True"),
        ({"r": "8"}, "rank is '8'"),
        ({"r": 10**9}, "rank is 1000000000"),
        ({"rank_pattern": {"q_proj": -1}}, "rank is -1"),
        ({"rank_pattern": [4]}, "rank_pattern is no object"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern has an invalid expression"),
        ({"alpha_pattern": {"q_proj": None}}, "lora_alpha is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ],
)
def test_invalid_values_are_refused(settings: dict[str, Any], text: str) -> None:
    """Types and ranges are checked before a matrix is read."""
    with pytest.raises(AdapterUnsupported, match=text.replace("(", r"\(")):
        config(**settings)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"LORA"'])
def test_a_file_without_an_object_is_refused(content: bytes) -> None:
    """Whatever its bytes are."""
    with pytest.raises(AdapterUnsupported, match=r"adapter_config\.json is no JSON"):
        AdapterConfig.parse("mine", content)


def test_patterns_match_the_end_of_a_name_as_in_peft() -> None:
    """The first match wins; ranks and alphas are looked up independently."""
    own = config(
        r=8,
        lora_alpha=16,
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 2, "q_proj": 4},
        alpha_pattern={"^model.layers.0.self_attn.q_proj": 32, "proj": 99},
    )

    assert own.rank_of("model.layers.1.self_attn.q_proj") == 2
    assert own.rank_of("model.layers.0.self_attn.q_proj") == 4
    assert own.rank_of("model.layers.0.self_attn.my_q_proj") == 8
    assert own.scaling_of("model.layers.0.self_attn.q_proj") == 32 / 4
    assert own.scaling_of("model.layers.1.self_attn.q_proj") == 16 / 2
    assert config(r=16, lora_alpha=8, use_rslora=True).scaling_of("model.x") == 8 / 4
