"""A start takes over what an earlier one checked, and only where nothing that matters has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.kernels import reference
from engine.load import checking, outcomes
from engine.load.load import LoadedModel
from engine.load.outcomes import Outcome, OutcomeFile
from engine.model.layers import CachedLayer
from engine.quantize.plan import QuantizationPlanNames
from kvcache.spec import AttentionRange, LayerSpec, Rotation
from tests.engine.models import load_model
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
    has_states=True,
    quantised=QuantizationPlanNames((("a.q", "a.k"), ("b",)), {"not in use": 2}, ("experts",)),
    bits=8,
    native=True,
    batch_invariant=True,
)


def test_an_outcome_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Frequencies are the same bit for bit, and None stays None."""
    file = OutcomeFile("model", tmp_path)
    for outcome in (OUTCOME, replace(OUTCOME, quantised=None, bits=None, native=False)):
        file.write(outcome)

        assert outcome == file.read()


@pytest.mark.parametrize("damage", ["", "{}", "[]", "no JSON", '{"layers": [{"layer": 0}]}'])
def test_a_file_that_cannot_be_read_is_no_outcome(tmp_path: Path, damage: str) -> None:
    """Whatever is in it, the model is checked."""
    file = OutcomeFile("model", tmp_path)
    file.write(OUTCOME)
    file.file.write_text(damage)

    assert file.read() is None


def test_another_identity_code_or_machine_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a file holds all that its outcome depends on."""
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
    """Loads a tiny model as if it were large; with the checks that were made."""
    monkeypatch.setattr(outcomes, "cache_folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr(checking, "is_small", lambda folder: False)
    made: list[str] = []

    def noted(module: Any, name: str) -> None:
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **more: (made.append(name), own(*given, **more))[1])

    noted(checking, "find_runner")
    noted(checking, "is_batch_invariant")

    def start(family: str = "gemma3", **settings: Any) -> tuple[LoadedModel, list[str]]:
        made.clear()
        return load_model(folder(family), "float32", **settings), list(made)

    return start


Start = Callable[..., tuple[LoadedModel, list[str]]]


def kept(tmp_path: Path) -> list[Path]:
    """The files of outcomes."""
    return sorted((tmp_path / "checks").glob("*.json"))


@pytest.mark.parametrize(
    ("quantize", "checks"), [("none", ["find_runner"]), ("int8", ["find_runner", "is_batch_invariant"])]
)
def test_the_second_start_checks_nothing(start: Start, tmp_path: Path, quantize: str, checks: list[str]) -> None:
    """The first start checks and keeps the outcome; the second one runs the same layers the same way."""
    built("step")
    first, made = start(quantize=quantize)
    assert checks == made
    second, made = start(quantize=quantize)

    assert [] == made
    assert first.layers == second.layers
    assert type(first.runner) is type(second.runner)
    assert (first.info.dtype, first.info.batch_invariant) == (second.info.dtype, second.info.batch_invariant)
    assert 1 == len(kept(tmp_path))


def test_what_changes_an_outcome_is_checked_anew(start: Start, tmp_path: Path) -> None:
    """Other settings, a damaged file, and no file."""
    start()
    assert ["find_runner"] == start(context=64)[1]
    for file in kept(tmp_path):
        file.write_text(json.dumps({"layers": []}))
    assert ["find_runner"] == start()[1]

    assert [] == start()[1]
    for file in kept(tmp_path):
        file.unlink()
    assert ["find_runner"] == start()[1]


def test_names_that_the_model_does_not_have_are_no_outcome(start: Start, tmp_path: Path) -> None:
    """Layers to quantise are taken over only if all of them are there."""
    start(quantize="int8")
    (file,) = kept(tmp_path)
    content = json.loads(file.read_text())
    content["quantised"]["groups"][0][0] = "nowhere"
    file.write_text(json.dumps(content))

    assert ["find_runner", "is_batch_invariant"] == start(quantize="int8")[1]


def test_a_slower_way_is_not_kept(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel changes logits the reason may be the machine: it is checked at every start."""
    start()
    for file in kept(tmp_path):
        file.write_text("")
    own = checking.find_runner
    monkeypatch.setattr(checking, "find_runner", lambda *given: _slower(own(*given)))
    start()

    assert [] == kept(tmp_path)


def _slower(runner: Any) -> Any:
    runner._attend = lambda *given, **more: reference.attend(*given, **more)
    return runner
