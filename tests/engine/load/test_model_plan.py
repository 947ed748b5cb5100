"""The plan of a model without its weights: the sizes are the ones of the loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.config import EngineConfig
from engine.convert.convert import Conversion, convert
from engine.draft.loading import load_draft
from engine.errors import ModelUnsupported
from engine.load.cache import model_cache
from engine.load.load import LoadedModel, load
from engine.load.plan.model_plan import ModelPlan, plan_model, plan_with_draft
from engine.step.input import StepInput
from kvcache.spec import Span
from tests.engine.kit.models import CONTEXT, save_model, save_tokenizer
from tests.engine.kit.tiny import settings
from tests.selection import quick

Folder = Callable[[str], Path]
# Attention in all layers, windows, chunks, experts, latent attention, recurrent layers.
FAMILIES = ("llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "jamba", "lfm2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a tiny model by family."""
    return lambda family: save_model(family, tmp_path_factory.mktemp(family))


def planned(path: Path, **options: Any) -> ModelPlan:
    """The plan of a model."""
    return plan_model(EngineConfig(model=str(path), drafter="none", context=CONTEXT, slots=2, **options), path)


def loaded(path: Path, **options: Any) -> LoadedModel:
    """The loaded model, with the same settings."""
    config = EngineConfig(model=str(path), drafter="none", context=CONTEXT, slots=2, **options)
    return load(config, lambda _: None)


def require_equal(plan: ModelPlan, model: LoadedModel) -> None:
    """The plan has the sizes of the loaded model."""
    assert plan.memory is not None
    # Packed matrices are aligned to 64 bytes, which counts in tiny ones.
    assert pytest.approx(model.memory.weights_bytes, rel=0.01) == plan.weights_bytes
    others = {"available_bytes": 0, "workspace_bytes": 0, "weights_bytes": 0}
    assert replace(model.memory, **others) == replace(plan.memory, **others)
    assert model.info.parameters == plan.parameters
    assert (model.info.architecture, model.info.context, model.info.slots) == (
        plan.architecture,
        plan.context,
        plan.slots,
    )


@pytest.mark.parametrize("family", quick(FAMILIES[1::2] + FAMILIES[:1], FAMILIES))
def test_sizes_are_the_ones_of_the_loaded_model(folder: Folder, family: str) -> None:
    path = folder(family)
    plan, model = planned(path), loaded(path)

    require_equal(plan, model)
    assert model.recurrent == (plan.state_bytes > 0)
    assert sum(len(layer.sharing_layers) + 1 for layer in model.layers) >= sum(group.layers for group in plan.groups)
    assert plan.table
    assert all(entry.fits for entry in plan.table)


def test_plan_of_a_draft_model_is_the_one_of_the_load(folder: Folder) -> None:
    path, draft_path = folder("llama"), folder("gemma3")
    config = EngineConfig(model=str(path), draft_model=str(draft_path), context=CONTEXT, slots=2)
    draft = load_draft(config, load(config, lambda _: None), lambda _: None)
    plan = plan_with_draft(config, path, draft_path).draft

    assert isinstance(draft, LoadedModel)
    assert plan is not None
    require_equal(plan, draft)


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}])
def test_formats_change_the_plan_as_the_model(folder: Folder, options: dict[str, Any]) -> None:
    path = folder("llama")

    require_equal(planned(path, **options), loaded(path, **options))


@pytest.mark.parametrize("name", quick(("gemma3",), ("llama", "gemma3")))
def test_quantised_gguf_file(name: str, folder: Folder, tmp_path: Path) -> None:
    """With embeddings of their own, and as the output layer."""
    file = tmp_path / "model.gguf"
    convert(Conversion(str(folder(name)), file, "q8_0", False, lambda _: None, lambda *_: None, "gpt-2"))
    plan = planned(file)

    require_equal(plan, loaded(file))
    assert plan.weights == "Q8_0"


def test_int4_is_an_upper_estimate(folder: Folder) -> None:
    path = folder("llama")
    model = loaded(path, quantize="int4")

    assert planned(path, quantize="int4").weights_bytes == pytest.approx(model.memory.weights_bytes, rel=0.25)


def test_recurrent_state_has_the_size_of_the_stored_one(folder: Folder) -> None:
    path = folder("lfm2")
    model = loaded(path)
    cache = model_cache(EngineConfig(model=str(path), drafter="none"), model)
    tokens = (1, 2, 3)
    with cache.forward([Span(0, 0, len(tokens))]) as forward:
        model.runner.run(StepInput(forward, list(tokens), [len(tokens) - 1]))
    assert cache.recurrent_states is not None

    assert cache.recurrent_states.acquire(0, 0, len(tokens)).bytes == planned(path).state_bytes


def test_windows_take_no_cells_of_a_longer_context(folder: Folder) -> None:
    groups = {group.window: group for group in planned(folder("gemma3")).groups}

    assert {None, 8} == groups.keys()
    assert all(group.layers == 1 and group.token_bytes > 0 for group in groups.values())


def test_settings_that_do_not_fit_have_a_reason(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.load.plan.model_plan.available_bytes", lambda _: 2**20)
    plan = planned(folder("llama"))

    assert plan.memory is None
    assert plan.total_bytes is None
    assert plan.reason is not None
    assert "lower --context" in plan.reason
    assert not any(entry.fits for entry in plan.table)


def test_model_that_reads_values_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("jetmoe", **settings("jetmoe")).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)

    with pytest.raises(ModelUnsupported, match="layers cannot be found without its weights"):
        planned(tmp_path)
