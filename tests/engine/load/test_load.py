"""From a name to a model: what is found, what is refused, and in which words. The hub is a server on this machine."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, JSONResponse
from transformers import LlamaConfig, XLNetConfig

from engine.config import EngineConfig
from engine.core import Core
from engine.errors import ModelMissing, ModelUnsupported, PlanTooLarge
from engine.load.checkpoint import fingerprint, resolve, weight_files
from engine.load.load import load, max_context
from tests.engine import encoders
from tests.engine.models import CONTEXT
from tests.engine.play import Job, ask, play

Folder = Callable[[str], Path]


@pytest.fixture
def copy(folder: Folder, tmp_path: Path) -> Path:
    """A tiny llama to be spoilt."""
    return Path(shutil.copytree(folder("llama"), tmp_path / "model"))


def load_folder(folder: Path, **settings: object) -> Core:
    """An engine over a folder, as the server would load it."""
    config = EngineConfig(model=str(folder), **{"context": CONTEXT, "slots": 2, "dtype": "float64", **settings})
    return Core(load(config, lambda phase: None), config)


def change(file: Path, **entries: object) -> None:
    """Set entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_the_phases_are_told_in_order(folder: Folder) -> None:
    """Whoever waits can see what is going on."""
    phases: list[str] = []
    load(EngineConfig(model=str(folder("llama")), context=CONTEXT, slots=1), phases.append)

    assert ["resolve", "weights", "calibrate", "kernels", "self-test", "native step"] == phases


def test_a_local_folder_is_itself(folder: Folder) -> None:
    """A folder needs no network, with or without a slash at its end."""
    assert folder("llama") == resolve(str(folder("llama")))
    assert folder("llama") == resolve(f"{folder('llama')}/")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing-here", "nothing", "a/b/c", ""])
def test_a_missing_folder_is_told_in_one_sentence(name: str) -> None:
    """What is neither a folder nor a name on the hub is refused at once, with the name and the reason."""
    with pytest.raises(ModelMissing) as refusal:
        resolve(name)

    assert repr(name) in str(refusal.value)
    assert 1 == len(str(refusal.value).splitlines())


def test_a_folder_without_a_model_is_told_so(tmp_path: Path) -> None:
    """An empty folder is no model."""
    with pytest.raises(ModelMissing, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "name", "reason"),
    [
        (["model.gguf"], "model.gguf", "GGUF files are not read yet"),
        (["Model.GGUF"], "Model.GGUF", "GGUF files are not read yet"),
        (["model-q4.gguf"], "", "the folder holds GGUF files, which are not read yet"),
        ([], "models/model.gguf", "there is no such file"),
        (["config.json", "model.safetensors"], "model.safetensors", "name the folder that it is in, .*"),
        (["config.json"], "config.json", "name the folder that it is in, .*"),
        (["README"], "README", "it is a file"),
        (["consolidated.safetensors", "params.json"], "", r"has no config\.json"),
    ],
)
def test_what_is_here_in_another_format_is_told_so(
    files: list[str], name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, or a folder of another format, is refused for what it is; the hub is never asked."""
    monkeypatch.setattr("engine.load.checkpoint.snapshot_download", None)
    for file in files:
        (tmp_path / file).write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)

    for spelt in (f"{tmp_path}/{name}", f"./{name}", *([name] if name else [])):
        with pytest.raises(ModelMissing, match=reason) as refusal:
            resolve(spelt)
        assert 1 == len(str(refusal.value).splitlines())


@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "model.gguf", "consolidated.safetensors", "model.onnx", "tf_model.h5"]
)
def test_weights_of_another_format_are_named(copy: Path, file: str) -> None:
    """A folder with the settings of a model and no weights that are read says which are there instead."""
    (copy / "model.safetensors").rename(copy / file)

    with pytest.raises(ModelUnsupported, match=f"no safetensors weights in the layout of transformers.*{file}"):
        load_folder(copy)


def test_a_copy_of_the_weights_counts_once(copy: Path) -> None:
    """Mistral's checkpoints hold all weights twice; the fingerprint is that of the files that are read."""
    before = fingerprint(copy)
    (copy / "consolidated.safetensors").write_bytes((copy / "model.safetensors").read_bytes())

    assert before == fingerprint(copy)
    assert [copy / "model.safetensors"] == weight_files(copy)


def test_pickled_weights_are_never_read(copy: Path) -> None:
    """A folder that holds only pytorch_model.bin is refused, and the file stays unopened: its code would have run."""
    for file in copy.glob("*.safetensors"):
        file.unlink()
    ran = copy / "ran"
    evil = b"cposix\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR."
    (copy / "pytorch_model.bin").write_bytes(evil)

    with pytest.raises(ModelUnsupported, match="no safetensors weights"):
        load_folder(copy)

    assert not ran.exists()


def test_code_of_a_checkpoint_is_never_run(copy: Path) -> None:
    """A configuration that points to its own Python files is refused or served without them; they never run."""
    ran = copy / "ran"
    code = f"open({str(ran)!r}, 'w').write('x')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    code += "class Config(LlamaConfig):\n    model_type = 'evil'\n"
    (copy / "evil.py").write_text(code)
    parts = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.Tokenizer"}
    change(copy / "config.json", auto_map=parts, model_type="evil", architectures=["EvilModel"])
    change(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})

    with pytest.raises(ModelUnsupported):
        load_folder(copy)

    assert not ran.exists()


def test_code_beside_a_known_model_is_ignored(copy: Path) -> None:
    """A known model that also brings code is served by transformers' own."""
    ran = copy / "ran"
    (copy / "evil.py").write_text(f"open({str(ran)!r}, 'w').write('x')\n")
    change(copy / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    answer = play(load_folder(copy), [Job(ask("one", (1, 2, 3), 4))])["one"]

    assert 4 == len(answer.tokens)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"\xff\xfe"),
        ("config.json", b'{"model_type": "no such thing"}'),
        ("config.json", b'{"model_type": "llama", "hidden_size": "wide"}'),
        ("model.safetensors", b""),
        ("model.safetensors", b"\xff" * 100),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"\xff\xfe"),
    ],
    ids=lambda part: part[:20],
)
def test_a_spoilt_file_is_told_in_one_sentence(copy: Path, file: str, content: bytes) -> None:
    """Broken or absurd files end in words, not in a traceback."""
    (copy / file).write_bytes(content)

    with pytest.raises(ModelUnsupported) as refusal:
        load_folder(copy)

    assert 1 == len(str(refusal.value).splitlines())


def test_half_a_safetensors_file_is_refused(copy: Path) -> None:
    """A download that was cut off is noticed."""
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])

    with pytest.raises(ModelUnsupported):
        load_folder(copy)


def test_missing_weights_are_named(copy: Path) -> None:
    """A checkpoint of fewer layers than its configuration says would answer nonsense; it is refused."""
    change(copy / "config.json", num_hidden_layers=3)

    with pytest.raises(ModelUnsupported, match=r"lack weights, 9 in all, such as model\.layers\.2"):
        load_folder(copy)


def test_a_model_that_is_no_text_generator_is_refused(tmp_path: Path) -> None:
    """An encoder cannot continue a text."""
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(tmp_path)

    with pytest.raises(ModelUnsupported):
        load_folder(tmp_path)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that nobody may read."""

    def refuse(*_: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("engine.load.load._read_model", refuse)


@pytest.mark.usefixtures("unread")
def test_a_missing_tokenizer_is_told_before_the_weights_are_read(copy: Path) -> None:
    """Reading gigabytes first would help nobody."""
    for file in copy.glob("tokenizer*"):
        file.unlink()

    with pytest.raises(ModelUnsupported, match=r"its tokenizer cannot be read: the folder has none, such as tokenizer"):
        load_folder(copy)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_a_model_that_needs_media_is_refused_where_no_request_can_bring_them(tmp_path: Path, family: str) -> None:
    """A server without a route for media says so at its start, in place of a refusal for every request."""
    encoders.save_encoder_model(family, tmp_path)

    with pytest.raises(ModelUnsupported, match="its decoder needs audio or a text for its encoder, and no request can"):
        load_folder(tmp_path, media=False)


@pytest.mark.usefixtures("unread")
def test_a_context_beyond_the_models_own_is_told_before_the_weights_are_read(copy: Path) -> None:
    """The number that it knows is in the message."""
    with pytest.raises(ModelUnsupported, match=f"knows contexts of up to {CONTEXT} tokens; lower --context"):
        load_folder(copy, context=CONTEXT + 1)


def test_no_limit_is_no_negative_context() -> None:
    """XLNet writes -1 where there is no limit."""
    assert 8192 == max_context(XLNetConfig())
    assert 128 == max_context(LlamaConfig(max_position_embeddings=128))


def test_more_than_the_memory_is_refused_in_numbers(folder: Folder) -> None:
    """A cache that cannot fit is refused before it is allocated, with what would help."""
    with pytest.raises(PlanTooLarge, match=r"GiB of .* GiB available: lower --context"):
        load_folder(folder("llama"), cells=10**13)


def test_a_context_beyond_the_models_is_refused(folder: Folder) -> None:
    """Positions that the model was never trained for are not served."""
    with pytest.raises(ModelUnsupported, match=f"contexts of up to {CONTEXT} tokens"):
        load_folder(folder("llama"), context=CONTEXT + 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_cache_has_the_models_type(folder: Folder, dtype: str) -> None:
    """Weights and cells are of the type that was asked for."""
    engine = load_folder(folder("llama"), dtype=dtype)

    assert getattr(torch, dtype) == engine.cache.groups[0].pool.dtype
    assert 3 == len(play(engine, [Job(ask("one", (1, 2, 3), 3))])["one"].tokens)


# What repositories hold besides: other formats, code, and the weights again for other libraries.
UNWANTED = (
    *("pytorch_model.bin", "evil.py", "model-q4.gguf", "consolidated.safetensors"),
    *("consolidated-00001-of-00002.safetensors", "consolidated.safetensors.index.json"),
    *("original/consolidated.00.pth", "original/model.safetensors", "original/tokenizer.model", "original/params.json"),
    *("openvino/openvino_model.bin", "openvino/config.json", "onnx/model.onnx", "onnx/tokenizer.json"),
    *("fp32/model.safetensors", "checkpoint-100/model.safetensors", "adapters/adapter_model.safetensors"),
)


class Hub:
    """What huggingface_hub asks a hub: the files of a revision, and each of them."""

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
        siblings = [{"rfilename": file} for file in self.names()]
        return JSONResponse({"_id": "1", "id": f"{owner}/{name}", "sha": "a" * 40, "siblings": siblings})

    async def tree(self, owner: str, name: str, revision: str) -> Response:
        """The list of files again, with sizes."""
        return JSONResponse([{"type": "file", "path": file, "size": 9, "oid": "b" * 40} for file in self.names()])

    def names(self) -> list[str]:
        """The files, and those that nobody should want."""
        return [*(file.name for file in self.files.iterdir()), *UNWANTED]

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


def test_a_model_of_the_hub_is_downloaded_and_served(hub: Hub) -> None:
    """A name on the hub becomes a folder with safetensors and settings only, and the model in it answers."""
    folder = resolve("someone/tiny")
    answer = play(load_folder(folder), [Job(ask("one", (1, 2, 3), 4))])["one"]

    assert 4 == len(answer.tokens)
    assert {file.name for file in hub.files.iterdir()} == {file.name for file in folder.iterdir()}
    assert not set(UNWANTED) & set(hub.asked)


def test_the_modules_of_an_embedding_model_are_downloaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbered folders in the layout of sentence-transformers are a part of the model."""
    modules = ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    hub.files = Path(shutil.copytree(hub.files, tmp_path / "files"))
    for module in modules:
        (hub.files / module).parent.mkdir(exist_ok=True)
        (hub.files / module).write_text("{}")
    monkeypatch.setattr(hub, "names", lambda: ["config.json", *modules, *UNWANTED])

    folder = resolve("someone/tiny")

    assert {"config.json", *modules} == {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_repository_of_another_format_is_told_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that holds GGUF files alone has no settings of a model."""
    monkeypatch.setattr(hub, "names", lambda: ["README.md", "model-q4.gguf"])

    with pytest.raises(ModelMissing, match=r"its repository has no config\.json"):
        resolve("someone/tiny")


def test_a_downloaded_model_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the local cache serves, even when the hub is gone."""
    folder = resolve("someone/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    assert folder == resolve("someone/tiny")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nobody/nothing", "no model of this name"),
        ("someone/gated", "HF_TOKEN"),
        ("someone/tiny:Q4_K_M", "organisation/model"),
    ],
)
def test_what_the_hub_does_not_give_is_told_in_one_sentence(hub: Hub, name: str, reason: str) -> None:
    """A wrong name and a closed model have sentences of their own."""
    with pytest.raises(ModelMissing, match=reason) as refusal:
        resolve(name)

    assert 1 == len(str(refusal.value).splitlines())


def test_a_hub_out_of_reach_is_told_in_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network and without a local copy there is no model."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(ModelMissing, match="out of reach") as refusal:
        resolve("someone/tiny")

    assert 1 == len(str(refusal.value).splitlines())
