"""A start reuses the outcome of an earlier one unless a dependency has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.kernels import reference
from engine.load.check import checking, outcomes
from engine.load.check.outcomes import Outcome, OutcomeFile
from engine.load.load import LoadedModel
from engine.model.layers import CachedLayer
from engine.quantize.plan import QuantizationPlanNames
from kvcache.spec import AttentionRange, LayerSpec, Rotation
from tests.engine.kit.models import load_model
from tests.libraries import built

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = LayerSpec(
    heads=1,
    key_width=8,
    value_width=8,
    attention_range=AttentionRange("window", 6),
    rotation=Rotation("half", 0, (1.0, 0.1)),
)
OUTCOME = Outcome(
    layers=(
        CachedLayer(0, SPEC),
        CachedLayer(1, replace(SPEC, attention_range=AttentionRange(), rotation=None), (2, 3)),
    ),
    has_hidden_states=True,
    quantised=QuantizationPlanNames((("a.q", "a.k"), ("b",)), {"not in use": 2}, ("experts",)),
    format="int8",
    native=True,
    batch_invariant=True,
)


def test_outcome_survives_a_round_trip(tmp_path: Path) -> None:
    """Frequencies are equal bit for bit."""
    file = OutcomeFile("model", tmp_path)
    for outcome in (OUTCOME, replace(OUTCOME, quantised=None, format=None, native=False)):
        file.write(outcome)

        assert outcome == file.read()


@pytest.mark.parametrize("damage", ["", "{}", "[]", "no JSON", '{"quantised": null, "layers": [{"index": 0}]}'])
def test_damaged_outcome_is_ignored(tmp_path: Path, damage: str) -> None:
    file = OutcomeFile("model", tmp_path)
    file.write(OUTCOME)
    file.file.write_text(damage)

    assert file.read() is None


def test_outcome_file_is_named_by_identity_code_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {OutcomeFile("model", tmp_path).file, OutcomeFile("other", tmp_path).file}
    for name in ("_software", "_processor"):
        with monkeypatch.context() as patch:
            patch.setattr(outcomes, name, lambda: ("another",))
            files.add(OutcomeFile("model", tmp_path).file)

    assert 4 == len(files)
    assert OutcomeFile("model", tmp_path).file in files


@pytest.fixture
def start(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[LoadedModel, list[str]]]:
    """Loads a tiny model as if it were large; returns the checks that ran."""
    monkeypatch.setattr(outcomes, "cache_folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr(checking, "is_small", lambda folder: False)
    ran: list[str] = []

    def noted(module: Any, name: str) -> None:
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **more: (ran.append(name), own(*given, **more))[1])

    noted(checking, "find_runner")
    noted(checking, "batch_dependence")

    def start(family: str = "gemma3", **settings: Any) -> tuple[LoadedModel, list[str]]:
        ran.clear()
        return load_model(folder(family), "float32", **settings), list(ran)

    return start


Start = Callable[..., tuple[LoadedModel, list[str]]]


def outcome_files(tmp_path: Path) -> list[Path]:
    """The files of outcomes."""
    return sorted((tmp_path / "checks").glob("*.json"))


@pytest.mark.parametrize(
    ("quantize", "checks"), [("none", ["find_runner"]), ("int8", ["find_runner", "batch_dependence"])]
)
def test_second_start_reuses_the_outcome(start: Start, tmp_path: Path, quantize: str, checks: list[str]) -> None:
    built("step")
    first, ran = start(quantize=quantize)
    assert checks == ran
    second, ran = start(quantize=quantize)

    assert [] == ran
    assert first.layers == second.layers
    assert type(first.runner) is type(second.runner)
    assert (first.info.dtype, first.info.batch_invariant) == (second.info.dtype, second.info.batch_invariant)
    assert 1 == len(outcome_files(tmp_path))
    assert [] == start(quantize=quantize, context=64, slots=2)[1]


def test_other_settings_or_a_lost_outcome_repeat_the_checks(start: Start, tmp_path: Path) -> None:
    start()
    assert ["find_runner"] == start(mla="expand")[1]
    for file in outcome_files(tmp_path):
        file.write_text(json.dumps({"layers": []}))
    assert ["find_runner"] == start()[1]

    assert [] == start()[1]
    for file in outcome_files(tmp_path):
        file.unlink()
    assert ["find_runner"] == start()[1]


def test_outcome_with_unknown_layer_names_is_ignored(start: Start, tmp_path: Path) -> None:
    start(quantize="int8")
    (file,) = outcome_files(tmp_path)
    content = json.loads(file.read_text())
    content["quantised"]["groups"][0][0] = "nowhere"
    file.write_text(json.dumps(content))

    assert ["find_runner", "batch_dependence"] == start(quantize="int8")[1]


def test_outcome_of_a_slower_runner_is_not_stored(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason may be the machine, so it is checked at every start."""
    start()
    for file in outcome_files(tmp_path):
        file.write_text("")
    own = checking.find_runner
    monkeypatch.setattr(checking, "find_runner", lambda *given: _slower(own(*given)))
    start()

    assert [] == outcome_files(tmp_path)


def _slower(runner: Any) -> Any:
    runner._attend = lambda inputs: reference.attend(inputs)
    return runner
