"""Models of the hub: whole repositories and single GGUF files. The hub is a server on this machine."""

from __future__ import annotations

import errno
import shutil
import socket
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, JSONResponse
from gguf import GGMLQuantizationType as Type

from engine.config import EngineConfig
from engine.errors import ModelMissing
from engine.gguf.container import read_model
from engine.load.hub.hub import download
from engine.load.hub.hub_cache import cached_models, remove_revisions
from engine.load.load import load
from engine.load.plan.model_plan import plan_model
from engine.load.read.checkpoint import resolve, resolve_headers
from engine.types.progress import Progress, progress_to
from tests.engine.gguf.files import greedy, load_file, prompt, write_types, write_wide
from tests.engine.kit.play import Job, ask, play
from tests.engine.load.test_load import load_folder

Folder = Callable[[str], Path]
OFFLINE = "http://127.0.0.1:9"
SHARDS = tuple(f"big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2))
GGUF = (
    *("README.md", "mmproj-F16.gguf", "imatrix.gguf", "tiny-F16.gguf", "tiny-Q4_K_M.gguf", "tiny-q6_k.gguf"),
    *("tiny-Q4_K_S.gguf", *SHARDS),
)

# Other files of repositories: other formats, code, and copies of the weights for other libraries.
UNWANTED = (
    *("pytorch_model.bin", "evil.py", "model-q4.gguf", "consolidated.safetensors"),
    *("consolidated-00001-of-00002.safetensors", "consolidated.safetensors.index.json"),
    *("original/consolidated.00.pth", "original/model.safetensors", "original/tokenizer.model", "original/params.json"),
    *("openvino/openvino_model.bin", "openvino/config.json", "onnx/model.onnx", "onnx/tokenizer.json"),
    *("fp32/model.safetensors", "checkpoint-100/model.safetensors", "adapters/adapter_model.safetensors"),
)


class Hub:
    """The HTTP API of a hub: the files of a revision, and each file."""

    def __init__(self, files: Path) -> None:
        self.files, self.asked = files, []
        self.app = FastAPI()
        self.app.get("/api/models/{owner}/{name}/revision/{revision}")(self.revision)
        self.app.get("/api/models/{owner}/{name}/tree/{revision}")(self.tree)
        self.app.api_route("/{owner}/{name}/resolve/{revision}/{file:path}", methods=["GET", "HEAD"])(self.file)

    async def revision(self, owner: str, name: str, revision: str) -> Response:
        """The list of files; another name than ours does not exist, and one has a gate."""
        if name == "gated":
            return Response(status_code=403, headers={"X-Error-Code": "GatedRepo"})
        if name != "tiny":
            return Response(status_code=404, headers={"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "v1", "a" * 40):
            return Response(status_code=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": file, "size": self.size(file)} for file in self.names()]
        return JSONResponse({"_id": "1", "id": f"{owner}/{name}", "sha": "a" * 40, "siblings": siblings})

    def size(self, file: str) -> int:
        """The bytes of a file; those of an unwanted file would be noticed."""
        return (self.files / file).stat().st_size if (self.files / file).is_file() else 10**9

    async def tree(self, owner: str, name: str, revision: str) -> Response:
        """The list of files again, with sizes."""
        return JSONResponse([{"type": "file", "path": file, "size": 9, "oid": "b" * 40} for file in self.names()])

    def names(self) -> list[str]:
        """The files of the model, and files that must not be downloaded."""
        return [*(str(file.relative_to(self.files)) for file in self.files.rglob("*") if file.is_file()), *UNWANTED]

    async def file(self, owner: str, name: str, revision: str, file: str) -> Response:
        """One file."""
        self.asked.append(file)
        headers = {"X-Repo-Commit": "a" * 40, "ETag": f'"{file}"'}
        return FileResponse(self.files / file, headers=headers)


@pytest.fixture
def hub(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on 127.0.0.1 with one tiny model, and an empty local cache."""
    hub = Hub(folder("llama"))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(hub.app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    thread.start()
    yield hub
    server.should_exit = True
    thread.join()


def test_model_of_the_hub_is_downloaded_and_served(hub: Hub) -> None:
    """Only safetensors and settings are downloaded."""
    folder = resolve("someone/tiny")
    answer = play(load_folder(folder), [Job(ask("one", (1, 2, 3), 4))])["one"]

    assert 4 == len(answer.tokens)
    assert {file.name for file in hub.files.iterdir()} == {file.name for file in folder.iterdir()}
    assert not set(UNWANTED) & set(hub.asked)


@pytest.mark.parametrize(
    "name",
    ["hf.co/someone/tiny", "https://huggingface.co/someone/tiny", "https://huggingface.co/someone/tiny/tree/main"],
)
def test_an_address_of_the_hub_names_a_model(hub: Hub, name: str) -> None:
    """Also for `cellar pull`, which calls `download`."""
    assert resolve("someone/tiny") == resolve(name) == download(name)


def test_pickled_weights_are_not_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "names", lambda: ["config.json", "pytorch_model.bin"])

    with pytest.raises(
        ModelMissing, match=r"pytorch_model\.bin has weights in Python's pickle format.*save_pretrained"
    ):
        resolve("someone/tiny")
    assert [] == hub.asked


def test_module_folders_of_an_embedding_model_are_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    hub.files = Path(shutil.copytree(hub.files, tmp_path / "files"))
    for module in modules:
        (hub.files / module).parent.mkdir(exist_ok=True)
        (hub.files / module).write_text("{}")
    monkeypatch.setattr(hub, "names", lambda: ["config.json", *modules, *UNWANTED])

    folder = resolve("someone/tiny")

    assert {"config.json", *modules} == {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_repository_of_another_format_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "names", lambda: ["README.md", "model.onnx"])

    with pytest.raises(ModelMissing, match=r"its repository has no config\.json"):
        resolve("someone/tiny")


def test_downloaded_model_loads_without_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve("someone/tiny")
    monkeypatch.setenv("HF_ENDPOINT", OFFLINE)

    assert folder == resolve("someone/tiny")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nobody/nothing", "no model of this name"),
        ("someone/gated", "HF_TOKEN"),
        ("someone/tiny:Q4_K_M", "no such GGUF file; it has model-q4"),
    ],
)
def test_hub_refusal_is_one_error_line(hub: Hub, name: str, reason: str) -> None:
    with pytest.raises(ModelMissing, match=reason) as refusal:
        resolve(name)

    assert 1 == len(str(refusal.value).splitlines())


def test_a_cache_that_cannot_be_written_is_one_error_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is found before the download."""
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 0))
    with pytest.raises(ModelMissing, match=r"the download has \d+\.\d MB, and 0\.0 MB are free at"):
        download("someone/tiny")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/cache")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 10**9))
    monkeypatch.setattr("engine.load.hub.hub.snapshot_download", fail)
    with pytest.raises(ModelMissing, match="the download failed: Read-only file system: /cache"):
        download("someone/tiny")


def test_headers_come_without_weights(hub: Hub) -> None:
    folder = resolve_headers("someone/tiny")

    assert {"config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert [] == [*folder.glob("*.safetensors")]
    assert plan_model(EngineConfig(model="someone/tiny"), folder).parameters > 0
    assert folder == resolve("someone/tiny")


def test_header_of_a_gguf_file_comes_with_the_file(hub: Hub) -> None:
    with pytest.raises(ModelMissing, match="cellar pull someone/tiny:Q4_K_M"):
        resolve_headers("someone/tiny:Q4_K_M")


def test_unreachable_hub_is_one_error_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", OFFLINE)

    with pytest.raises(ModelMissing, match="unreachable") as refusal:
        resolve("someone/tiny")

    assert 1 == len(str(refusal.value).splitlines())


@pytest.fixture
def gguf_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub with a repository of GGUF files."""
    hub.files = tmp_path / "gguf"
    add_files(hub, *GGUF)
    monkeypatch.setattr("tests.engine.load.test_hub.UNWANTED", ())
    return hub


def add_files(hub: Hub, *names: str) -> None:
    """Files with their own name as content."""
    for name in names:
        (hub.files / name).parent.mkdir(parents=True, exist_ok=True)
        (hub.files / name).write_text(name)


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("", "tiny-Q4_K_M.gguf"),
        (":Q4_K_M", "tiny-Q4_K_M.gguf"),
        (":q4_k_m", "tiny-Q4_K_M.gguf"),
        (":Q6_K", "tiny-q6_k.gguf"),
        (":tiny-F16.gguf", "tiny-F16.gguf"),
        (":Q8_0", SHARDS[0]),
        (":big-Q8_0", SHARDS[0]),
    ],
)
def test_only_the_named_file_is_downloaded(gguf_hub: Hub, tag: str, file: str) -> None:
    """By its quantisation in any case, or its name; with all shards, and the vision tower beside it."""
    found = download(f"someone/tiny{tag}")

    assert file == found.name == found.read_text()
    assert {*(SHARDS if file in SHARDS else [file]), "mmproj-F16.gguf"} == set(gguf_hub.asked)
    assert set(gguf_hub.asked) == {each.name for each in found.parent.iterdir()}


def test_a_quantised_file_of_the_hub_is_served(gguf_hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the text of the same local file, later without the hub."""
    file = gguf_hub.files / "tiny-Q4_K_M.gguf"
    write_types(read_model(write_wide("llama", tmp_path)), file, Type.Q4_K, {"general.file_type": 15})
    expected = greedy(load_file(file), prompt(), 8)

    for endpoint in (None, OFFLINE):
        if endpoint is not None:
            monkeypatch.setenv("HF_ENDPOINT", endpoint)
        loaded = load(EngineConfig(model="someone/tiny:Q4_K_M", context=64, slots=2), lambda phase: None)

        assert loaded.info.dtype == "float32, Q4_K_M weights"
        assert expected == greedy(loaded, prompt(), 8)
        assert {file.name, "mmproj-F16.gguf"} == set(gguf_hub.asked)


@pytest.mark.parametrize(
    ("names", "tower"),
    [
        (("mmproj-tiny-BF16.gguf", "mmproj-tiny-f16.gguf", "mmproj-tiny-F32.gguf"), "mmproj-tiny-f16.gguf"),
        (("mmproj-tiny-BF16.gguf", "mmproj-tiny-F32.gguf"), "mmproj-tiny-BF16.gguf"),
        (("tiny.mmproj-Q8_0.gguf", "mmproj/tiny-F16.gguf"), "tiny.mmproj-Q8_0.gguf"),
        (("other/mmproj-F16.gguf", "mmproj-F16.txt"), None),
    ],
)
def test_one_vision_tower_is_downloaded(gguf_hub: Hub, names: tuple[str, ...], tower: str | None) -> None:
    """Of the same folder, in the format that is computed; it is there without the hub, too."""
    (gguf_hub.files / "mmproj-F16.gguf").unlink()
    add_files(gguf_hub, *names)

    file = download("someone/tiny:Q4_K_M")

    assert {path.name for path in file.parent.iterdir()} == {file.name, *([tower] if tower else [])}


@pytest.mark.parametrize("tag", ["", ":Q4_K_M", ":Q8_0"])
def test_downloaded_file_is_found_without_the_hub(gguf_hub: Hub, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = download(f"someone/tiny{tag}")
    monkeypatch.setenv("HF_ENDPOINT", OFFLINE)

    assert found == download(f"someone/tiny{tag}")


def test_without_the_hub_only_downloaded_files_are_listed(gguf_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    download("someone/tiny:F16")
    monkeypatch.setenv("HF_ENDPOINT", OFFLINE)

    with pytest.raises(ModelMissing, match=r"no such GGUF file; it has tiny-F16$"):
        download("someone/tiny:Q4_K_M")


def test_file_in_a_folder_of_its_quantisation_is_found(gguf_hub: Hub) -> None:
    add_files(gguf_hub, "Q5_K_M/other-00001-of-00001.gguf", "IQ2_M/other-I2.gguf")

    assert "Q5_K_M/other-00001-of-00001.gguf" == download("someone/tiny:q5_k_m").read_text()
    assert "IQ2_M/other-I2.gguf" == download("someone/tiny:IQ2_M/other-I2.gguf").read_text()


@pytest.mark.parametrize(
    ("more", "tag", "reason"),
    [
        ((), ":Q4_K", "no such GGUF file; it has big-Q8_0, tiny-F16, tiny-Q4_K_M, tiny-Q4_K_S, tiny-q6_k$"),
        (("tiny-UD-Q4_K_M.gguf",), ":Q4_K_M", "2 files match: tiny-Q4_K_M, tiny-UD-Q4_K_M; name one"),
        (("big-Q2_K-00001-of-00003.gguf",), ":Q2_K", "1 of the 3 shards of big-Q2_K-00001-of-00003.gguf are there"),
        (tuple(f"{number}.gguf" for number in range(20)), ":Q9", "it has 0, 1, .* and 13 more"),
    ],
)
def test_ambiguous_or_missing_file_is_refused_with_a_list(
    gguf_hub: Hub, more: tuple[str, ...], tag: str, reason: str
) -> None:
    add_files(gguf_hub, *more)

    with pytest.raises(ModelMissing, match=reason):
        download(f"someone/tiny{tag}")
    assert [] == gguf_hub.asked


def test_file_without_a_preferred_quantisation_is_the_first(gguf_hub: Hub) -> None:
    shutil.rmtree(gguf_hub.files)
    add_files(gguf_hub, "mmproj-F16.gguf", "b-IQ3_M.gguf", "a-IQ2_M.gguf")

    assert "a-IQ2_M.gguf" == download("someone/tiny").name


def test_safetensors_are_preferred_to_gguf_files(gguf_hub: Hub) -> None:
    add_files(gguf_hub, "model.safetensors", "config.json")

    assert {"model.safetensors", "config.json"} == {file.name for file in download("someone/tiny").iterdir()}


def test_a_download_reports_its_bytes(hub: Hub) -> None:
    """Up to the sizes of the files that are not in the cache yet, and nothing when all are there."""
    reports: list[Progress] = []
    with progress_to(reports.append):
        folder = download("someone/tiny")
        counted = len(reports)
        download("someone/tiny")
    size = sum(file.stat().st_size for file in folder.iterdir())

    assert {("download", "bytes", size)} == {(each.step, each.unit, each.total) for each in reports}
    assert size == reports[-1].done
    assert counted == len(reports)


def test_a_revision_is_downloaded_by_its_name(hub: Hub) -> None:
    folder = download("someone/tiny", "v1")

    assert "a" * 40 == folder.name
    assert "a" * 40 == (folder.parents[1] / "refs" / "v1").read_text()
    with pytest.raises(ModelMissing, match="the repository has no revision v2"):
        download("someone/tiny", "v2")


def test_models_of_the_cache_are_listed_and_removed(hub: Hub) -> None:
    assert [] == cached_models()
    folder = download("someone/tiny", "v1")
    (model,) = cached_models()

    assert ("someone/tiny", "a" * 40, ("v1",), folder) == (model.id, model.revision, model.names, model.folder)
    assert (("safetensors",), ()) == (model.formats, model.files)
    assert sum(file.stat().st_size for file in folder.iterdir()) == model.size_bytes == remove_revisions([model])
    assert [] == cached_models()
    assert not folder.exists()
