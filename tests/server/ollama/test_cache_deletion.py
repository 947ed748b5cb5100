"""Deletion of models of the hub's cache: nothing else is deleted, whatever repositories, revisions and links it has."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from engine.errors import ModelKept
from engine.load.hub.hub_cache import cached_models, find_cached, remove_revisions
from engine.types.status import DraftingInfo
from server.app import create_app
from tests.server.fakes import INFO, FakeEngine, ask, settings

REPOSITORIES = ("old/name", "new/name", "some/other")
COMMITS = ("a" * 40, "ab" * 20, "c" * 40)
# The blobs that revisions share are in the commits of all repositories.
FILES = {commit: {"config.json": "shared", "1_Pooling/config.json": f"pool {commit[1]}"} for commit in COMMITS}
for commit in COMMITS:
    FILES[commit]["model.safetensors"] = f"weights of {commit}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def folder_of(cache: Path, id: str) -> Path:
    return cache / f"models--{id.replace('/', '--')}"


def pull(cache: Path, id: str, commit: str, ref: str | None = "main") -> Path:
    """A revision as the hub's library writes it: links to blobs that are named by their content."""
    repository = folder_of(cache, id)
    snapshot = repository / "snapshots" / commit
    for name, content in FILES[commit].items():
        blob = repository / "blobs" / content.replace(" ", "-")
        file = snapshot / name
        for folder in (blob.parent, file.parent):
            folder.mkdir(parents=True, exist_ok=True)
        blob.write_text(content)
        file.unlink(missing_ok=True)
        file.symlink_to(os.path.relpath(blob, file.parent))
    if ref is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def content(folder: Path) -> dict[str, bytes | str]:
    """The files of a folder by path, links by their target."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def snapshot_content(snapshot: Path) -> dict[str, str]:
    return {name: (snapshot / name).read_text() for name in FILES[snapshot.name]}


def delete(app: Any, name: str) -> int:
    return ask(app, "DELETE", "/api/delete", json_body={"model": name}).status


def serve(folder: Path | str = INFO.folder) -> tuple[Any, FakeEngine]:
    engine = FakeEngine(info_value=replace(INFO, folder=str(folder)))
    return create_app(engine, settings()), engine  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["old/name", "new/name"])
def test_a_repository_with_the_same_commit_stays(cache: Path, name: str) -> None:
    """Also that of a data set; each of several times, as sets of repositories have no order."""
    app, _ = serve()
    shutil.copytree(pull(cache, name, COMMITS[0]).parents[1], cache / "datasets--old--name", symlinks=True)
    for _ in range(8):
        for id in ("old/name", "new/name"):
            pull(cache, id, COMMITS[0])
        others = {folder: content(folder) for folder in cache.iterdir() if folder != folder_of(cache, name)}

        assert 200 == delete(app, name)
        assert others == {folder: content(folder) for folder in cache.iterdir()}


def test_one_revision_is_named_by_branch_commit_or_its_begin(cache: Path) -> None:
    """A begin of several commits is refused, and so is an empty one."""
    app, _ = serve()
    for commit, ref in zip(COMMITS, ("main", "v1", None), strict=True):
        pull(cache, "old/name", commit, ref)

    assert [400, 404, 404] == [delete(app, f"old/name@{each}") for each in ("a", "", "d")]
    assert 3 == len(cached_models())
    assert [200, 200, 200] == [delete(app, f"old/name@{each}") for each in ("c", "v1", COMMITS[0])]
    assert [] == [*cache.iterdir()]


@pytest.mark.parametrize("kind", ["folder", "linked folder", "linked files", "draft"])
def test_a_loaded_model_is_not_deleted_under_any_name(cache: Path, tmp_path: Path, kind: str) -> None:
    """By the files of the loaded models: another name or revision of its repository can be deleted."""
    loaded, other = pull(cache, "old/name", COMMITS[0]), pull(cache, "old/name", COMMITS[1], "v1")
    twin = pull(cache, "new/name", COMMITS[0])
    (tmp_path / "linked").symlink_to(loaded)
    shutil.copytree(loaded, tmp_path / "copy", symlinks=True)
    for name in FILES[COMMITS[0]]:
        (tmp_path / "copy" / name).unlink()
        (tmp_path / "copy" / name).symlink_to((loaded / name).resolve())
    folders = {"folder": loaded, "linked folder": tmp_path / "linked", "linked files": tmp_path / "copy"}
    app, engine = serve(folders.get(kind, INFO.folder))
    if kind == "draft":
        engine.drafting = DraftingInfo(model=replace(INFO, folder=str(loaded)))

    assert [400, 400] == [delete(app, name) for name in ("old/name", f"old/name@{COMMITS[0]}")]
    assert (loaded.exists(), other.exists(), twin.exists()) == (True, True, True)
    assert [200, 200] == [delete(app, name) for name in (f"old/name@{COMMITS[1]}", "new/name")]
    assert (loaded.exists(), other.exists(), twin.exists()) == (True, False, False)
    assert FILES[COMMITS[0]] == snapshot_content(loaded)


def test_all_shards_of_a_loaded_gguf_file_are_in_use(cache: Path, tmp_path: Path) -> None:
    """Only the second one leads to the cache."""
    snapshot = pull(cache, "old/name", COMMITS[0])
    first, second = (tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_text("GGUF")
    second.symlink_to(snapshot / "model.safetensors")

    with pytest.raises(ModelKept, match="in use"):
        remove_revisions(find_cached("old/name"), [str(first)])
    assert FILES[COMMITS[0]] == snapshot_content(snapshot)


@pytest.mark.parametrize("name", ["snapshots", "blobs", "refs"])
def test_linked_folders_of_a_repository_are_not_followed(cache: Path, tmp_path: Path, name: str) -> None:
    """One revision of several cannot be deleted then; the whole repository can, but for what is elsewhere."""
    app, _ = serve()
    for commit, ref in zip(COMMITS, ("main", "v1", "v2"), strict=True):
        pull(cache, "old/name", commit, ref)
    folder, moved = folder_of(cache, "old/name") / name, tmp_path / "repository" / name
    moved.parent.mkdir()
    folder.rename(moved)
    folder.symlink_to(moved)
    if name == "snapshots":
        (tmp_path / "blobs").symlink_to(folder_of(cache, "old/name") / "blobs")
        (tmp_path / "repository" / "blobs").symlink_to(folder_of(cache, "old/name") / "blobs")
    before = content(moved)
    one = delete(app, "old/name@v1")

    assert (one, before) == (200 if name == "blobs" else 400, content(moved))
    assert (200, before) == (delete(app, "old/name"), content(moved))
    assert [] == [*cache.iterdir()]


def test_targets_of_planted_links_stay(cache: Path, tmp_path: Path) -> None:
    """Outside of the cache, in another repository, and in another revision."""
    app, _ = serve()
    kept = [pull(cache, "new/name", COMMITS[0]), pull(cache, "old/name", COMMITS[0])]
    snapshot = pull(cache, "old/name", COMMITS[1], "v1")
    (tmp_path / "outside.txt").write_text("outside")
    files = [tmp_path / "outside.txt", kept[0] / "model.safetensors", (kept[0] / "config.json").resolve()]
    for number, target in enumerate([*files, tmp_path, kept[1] / "model.safetensors"]):
        (snapshot / f"planted-{number}").symlink_to(target)

    assert (200, False) == (delete(app, "old/name@v1"), snapshot.exists())
    assert "outside" == (tmp_path / "outside.txt").read_text()
    assert [FILES[COMMITS[0]]] * 2 == [*map(snapshot_content, kept)]


def test_a_folder_that_cannot_be_deleted_is_an_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app, _ = serve()
    pull(cache, "old/name", COMMITS[0])

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)

    assert 400 == delete(app, "old/name")
    assert "permission denied" in caplog.text


@dataclass
class Reference:
    """The created names of a server, the revisions of its cache, and the revision that the engine has loaded."""

    presets: set[str] = field(default_factory=set)
    revisions: set[tuple[str, str]] = field(default_factory=set)
    loaded: tuple[str, str] | None = None

    def selected(self, id: str, begin: str) -> set[tuple[str, str]]:
        return {each for each in self.revisions if each[0] == id and each[1].startswith(begin)}


class Play:
    """A random sequence of operations on a server and its cache."""

    def __init__(self, app: Any, engine: FakeEngine, cache: Path, seed: int) -> None:
        self.app, self.engine, self.cache, self.random = app, engine, cache, random.Random(seed)
        self.outside = cache.parent / "outside"
        self.reference, self.places = Reference(), 0

    def run(self) -> None:
        self.outside.mkdir()
        for number in range(3):
            (self.outside / f"{number}.txt").write_text(f"outside {number}")
        (self.cache / "models--planted--link").symlink_to(self.outside)
        before = content(self.outside)
        operations: list[Callable[[], None]] = [self.pull, self.delete, self.delete, self.copy, self.create]
        for operation in self.random.choices([*operations, self.plant, self.load], k=14):
            operation()
            self.check()
            assert before == content(self.outside)
        self.engine.info_value = INFO
        for name in self.reference.presets:
            assert 200 == delete(self.app, name)
        for id in REPOSITORIES:
            present = bool(self.reference.selected(id, "")) and not self._is_damaged(id)
            assert (200 if present else 404) == delete(self.app, id)
            assert folder_of(self.cache, id).exists() == self._is_damaged(id)
        assert before == content(self.outside)

    def pull(self) -> None:
        id, commit = self.random.choice(REPOSITORIES), self.random.choice(COMMITS)
        pull(self.cache, id, commit, self.random.choice(("main", "v1", None)))
        self.reference.revisions.add((id, commit))

    def delete(self) -> None:
        if self.reference.presets and self.random.random() < 0.3:
            name = self.random.choice(sorted(self.reference.presets))
            self.reference.presets.remove(name)
            assert 200 == delete(self.app, name)
            return
        id, begin = self.random.choice(REPOSITORIES), self.random.choice(("", *COMMITS, "a", "c"))
        selected = self.reference.selected(id, begin)
        status = delete(self.app, f"{id}@{begin}" if begin else id)
        if not selected or self._is_damaged(id):
            assert 404 == status
        elif (begin and len(selected) > 1) or self.reference.loaded in selected:
            assert 400 == status
        else:
            assert 200 == status
            self.reference.revisions -= selected

    def copy(self) -> None:
        self._add("copy", source=self.random.choice(("fake", *sorted(self.reference.presets))))

    def create(self) -> None:
        self._add("create", **{"from": self.random.choice(("fake", *sorted(self.reference.presets)))}, stream=False)

    def _add(self, path: str, **body: Any) -> None:
        name = self.random.choice(("mario", "luigi"))
        body["destination" if path == "copy" else "model"] = name
        assert 200 == ask(self.app, "POST", f"/api/{path}", json_body=body).status
        self.reference.presets.add(name)

    def load(self) -> None:
        """The engine has a model of the cache, or another one."""
        self.reference.loaded = self.random.choice([None, *sorted(self.reference.revisions)])
        loaded = self.reference.loaded
        folder = INFO.folder if loaded is None else self._snapshot(*loaded)
        self.engine.info_value = replace(INFO, folder=str(folder))

    def plant(self) -> None:
        """A link to a file or folder outside the cache, or to a file or blob of any revision."""
        if not self.reference.revisions:
            return
        snapshot, other = (self._snapshot(*each) for each in self.random.choices(sorted(self.reference.revisions), k=2))
        file = other / "model.safetensors"
        places = [*sorted(self.outside.iterdir()), self.outside, file, file.resolve()]
        self.places += 1
        (snapshot / f"planted-{self.places}").symlink_to(self.random.choice(places))

    def check(self) -> None:
        """The revisions of the reference are there, with all files; and no other revision, blob or name."""
        for id in REPOSITORIES:
            commits = {commit for each, commit in self.reference.revisions if each == id}
            folder = folder_of(self.cache, id)
            present = {each.name for each in (folder / "snapshots").glob("*")}
            assert (commits, bool(commits)) == (present, folder.exists())
            for commit in commits:
                assert FILES[commit] == snapshot_content(self._snapshot(id, commit))
            blobs = {each.read_text() for each in (folder / "blobs").glob("*")}
            assert {text for commit in commits for text in FILES[commit].values()} == blobs
        assert (self.cache / "models--planted--link").is_symlink()
        listed = {model["name"] for model in ask(self.app, "GET", "/api/tags").json["models"]}
        assert {"fake", "org/alias", *self.reference.presets} == listed

    def _is_damaged(self, id: str) -> bool:
        """Whether a planted link leads nowhere since another deletion: such a repository is not listed."""
        return any(not file.exists() for file in (folder_of(self.cache, id) / "snapshots").rglob("*"))

    def _snapshot(self, id: str, commit: str) -> Path:
        return folder_of(self.cache, id) / "snapshots" / commit


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_random_operations_delete_nothing_else(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls, copies, creations and deletions over equal commits, several revisions and planted links."""
    app, engine = serve()
    for seed in range(count):
        folder = tmp_path / str(seed) / "hub"
        folder.mkdir(parents=True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
        Play(app, engine, folder, seed).run()
