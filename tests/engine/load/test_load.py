"""Loading by name: folders, refusals and their messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, XLNetConfig

from engine.config import EngineConfig
from engine.core import Core
from engine.errors import ModelMissing, ModelUnsupported, PlanTooLarge
from engine.load.load import load
from engine.load.read.checkpoint import fingerprint, read_checkpoint, resolve, weight_files
from engine.load.read.configuration import max_context
from engine.load.read.tokenizer_files import read_model_tokenizer, read_template
from tests.engine.gguf.files import write_checkpoint
from tests.engine.kit import encoders
from tests.engine.kit.models import CONTEXT
from tests.engine.kit.play import Job, ask, play

Folder = Callable[[str], Path]


@pytest.fixture
def copy(folder: Folder, tmp_path: Path) -> Path:
    """A folder with a tiny llama to modify."""
    return Path(shutil.copytree(folder("llama"), tmp_path / "model"))


def load_folder(folder: Path, **settings: object) -> Core:
    """An engine over a folder, as the server would load it."""
    config = EngineConfig(model=str(folder), **{"context": CONTEXT, "slots": 2, "dtype": "float64", **settings})
    return Core(load(config, lambda phase: None), config)


def change(file: Path, **entries: object) -> None:
    """Set entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_load_reports_its_phases_in_order(folder: Folder) -> None:
    phases: list[str] = []
    load(EngineConfig(model=str(folder("llama")), context=CONTEXT, slots=1), phases.append)

    assert ["resolve", "weights", "calibrate", "kernels", "self-test", "native step"] == phases


def test_local_folder_is_loaded(folder: Folder) -> None:
    """With or without a trailing slash."""
    assert folder("llama") == resolve(str(folder("llama")))
    assert folder("llama") == resolve(f"{folder('llama')}/")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing-here", "nothing", "a/b/c", ""])
def test_missing_folder_is_one_error_line(name: str) -> None:
    with pytest.raises(ModelMissing) as refusal:
        resolve(name)

    assert repr(name) in str(refusal.value)
    assert 1 == len(str(refusal.value).splitlines())


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "name", "reason"),
    [
        (["q4.gguf", "q8.gguf"], "", r"the folder has 2 GGUF models; pass one of the files: q4\.gguf, q8\.gguf"),
        (["q4-00002-of-00002.gguf"], "", r"it lacks the shard q4-00001-of-00002\.gguf"),
        (["q4-00002-of-00002.gguf"], "q4-00002-of-00002.gguf", r"it lacks the shard q4-00001-of-00002\.gguf"),
        ([], "models/model.gguf", "there is no such file"),
        (["consolidated.safetensors", "params.json"], "", r"has no config\.json"),
    ],
)
def test_local_file_of_another_format_is_refused_without_the_hub(
    files: list[str], name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.load.hub.hub.snapshot_download", None)
    for file in files:
        (tmp_path / file).write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)

    for spelt in (f"{tmp_path}/{name}", f"./{name}", *([name] if name else [])):
        with pytest.raises(ModelMissing, match=reason) as refusal:
            resolve(spelt)
        assert 1 == len(str(refusal.value).splitlines())


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (b'{"model_type": "llama"}', "config.json", "pass its folder, .*"),
        (b"\x02\0\0\0\0\0\0\0{}", "model.safetensors", "pass its folder, .*"),
        (b"# A model", "README", "it is a text file"),
        (b"", "model.safetensors", "it is an empty file"),
        (b"<html>Not found</html>", "model.gguf", "it is an HTML page, such as the answer to a failed download"),
        (b"\x80\x04K\x00.", "pytorch_model.bin", "it is PyTorch weights in Python's pickle format"),
    ],
)
def test_file_that_is_no_model_is_refused_by_its_content(
    content: bytes, name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ModelMissing, match=reason):
        resolve(str(tmp_path / name))


@pytest.mark.parametrize(
    "file", ["pytorch_model.bin", "model.gguf", "consolidated.safetensors", "model.onnx", "tf_model.h5"]
)
def test_weights_of_another_format_are_named(copy: Path, file: str) -> None:
    (copy / "model.safetensors").rename(copy / file)

    with pytest.raises(ModelUnsupported, match=f"no safetensors weights in the layout of transformers.*{file}"):
        load_folder(copy)


def test_pickled_weights_are_refused_with_the_remedy(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")

    with pytest.raises(ModelUnsupported, match=r"pytorch_model\.bin has weights in Python's pickle.*save_pretrained"):
        load_folder(copy)


@pytest.mark.parametrize(
    ("content", "base"),
    [(b'{"base_model_name_or_path": "a/b"}', r"adapter \(LoRA\) of a/b"), (b"[]", r"\(LoRA\)"), (b"\xff", r"\(LoRA\)")],
)
def test_the_folder_of_an_adapter_is_refused_with_the_remedy(tmp_path: Path, content: bytes, base: str) -> None:
    """With and without the base model's config.json."""
    (tmp_path / "adapter_config.json").write_bytes(content)
    (tmp_path / "adapter_model.safetensors").touch()
    for _ in range(2):
        with pytest.raises(ModelMissing, match=f"{base}.*merge_and_unload"):
            resolve(str(tmp_path))
        (tmp_path / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.example/v1\n", "model.safetensors is a Git LFS pointer"),
        (b"<html>Not found</html>", "model.safetensors is an HTML page"),
        (b"", "model.safetensors is an empty file"),
    ],
)
def test_weights_that_are_another_kind_of_file_are_named(copy: Path, content: bytes, reason: str) -> None:
    (copy / "model.safetensors").write_bytes(content)

    with pytest.raises(ModelUnsupported, match=reason):
        load_folder(copy)


def test_consolidated_copy_of_the_weights_is_ignored(copy: Path) -> None:
    """Mistral's checkpoints contain all weights twice."""
    before = fingerprint(copy)
    (copy / "consolidated.safetensors").write_bytes((copy / "model.safetensors").read_bytes())

    assert before == fingerprint(copy)
    assert [copy / "model.safetensors"] == weight_files(copy)


def test_pickled_weights_are_never_read(copy: Path) -> None:
    """A folder with pytorch_model.bin only is refused without opening it."""
    for file in copy.glob("*.safetensors"):
        file.unlink()
    ran = copy / "ran"
    evil = b"cposix\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR."
    (copy / "pytorch_model.bin").write_bytes(evil)

    with pytest.raises(ModelUnsupported, match="no safetensors weights"):
        load_folder(copy)

    assert not ran.exists()


def test_code_of_a_checkpoint_is_never_run(copy: Path) -> None:
    """A configuration with Python files of its own is refused or served without them."""
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
def test_damaged_file_is_one_error_line(copy: Path, file: str, content: bytes) -> None:
    (copy / file).write_bytes(content)

    with pytest.raises(ModelUnsupported) as refusal:
        load_folder(copy)

    assert 1 == len(str(refusal.value).splitlines())


def test_truncated_safetensors_file_is_refused(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])

    with pytest.raises(ModelUnsupported):
        load_folder(copy)


def test_missing_weights_are_named(copy: Path) -> None:
    """A checkpoint with fewer layers than its configuration is refused."""
    change(copy / "config.json", num_hidden_layers=3)

    with pytest.raises(ModelUnsupported, match=r"lack weights, 9 in all, such as model\.layers\.2"):
        load_folder(copy)


def test_model_without_text_generation_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(tmp_path)

    with pytest.raises(ModelUnsupported):
        load_folder(tmp_path)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are read."""

    def refuse(*_: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("engine.load.load.read_model", refuse)


@pytest.mark.usefixtures("unread")
def test_missing_tokenizer_is_refused_before_reading_weights(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()

    with pytest.raises(ModelUnsupported, match=r"its tokenizer cannot be read: the folder has none, such as tokenizer"):
        load_folder(copy)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_model_that_requires_media_is_refused_without_media_route(tmp_path: Path, family: str) -> None:
    encoders.save_encoder_model(family, tmp_path)

    with pytest.raises(ModelUnsupported, match="its decoder needs audio or a text for its encoder, and no request can"):
        load_folder(tmp_path, media=False)


@pytest.mark.usefixtures("unread")
def test_context_beyond_the_model_is_refused_before_reading_weights(copy: Path) -> None:
    with pytest.raises(ModelUnsupported, match=f"context is at most {CONTEXT} tokens; lower --context"):
        load_folder(copy, context=CONTEXT + 1)


def test_negative_max_position_means_no_limit() -> None:
    """XLNet's configuration has -1."""
    assert 8192 == max_context(XLNetConfig())
    assert 128 == max_context(LlamaConfig(max_position_embeddings=128))


def test_cache_beyond_the_memory_is_refused_with_sizes(folder: Folder) -> None:
    with pytest.raises(PlanTooLarge, match=r"GiB of .* GiB available: lower --context"):
        load_folder(folder("llama"), cells=10**13)


def test_context_beyond_the_trained_one_is_refused(folder: Folder) -> None:
    with pytest.raises(ModelUnsupported, match=f"context is at most {CONTEXT} tokens"):
        load_folder(folder("llama"), context=CONTEXT + 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_weights_and_cells_have_the_dtype_of_the_setting(folder: Folder, dtype: str) -> None:
    engine = load_folder(folder("llama"), dtype=dtype)

    assert getattr(torch, dtype) == engine.cache.groups[0].pool.dtype
    assert 3 == len(play(engine, [Job(ask("one", (1, 2, 3), 3))])["one"].tokens)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_chat_template_from_a_file_replaces_the_one_of_the_model(tmp_path: Path, is_gguf: bool) -> None:
    """With today's date under both names that templates have for it."""
    file = tmp_path / "template.jinja"
    file.write_text("{{ date_string }}|{{ strftime_now('%d %b %Y') }}|{{ messages[0].content }}!")
    path = write_checkpoint("llama", tmp_path) if is_gguf else resolve(None)
    checkpoint = read_checkpoint(path)
    template = read_template("model", str(file))
    tokenizer = read_model_tokenizer("model", checkpoint, template, vocabulary=10**6).with_context(512, 512)
    rendered = tokenizer.render_chat([{"role": "user", "content": "hi"}])

    today = datetime.now().strftime("%d %b %Y")
    assert f"{today}|{today}|hi!" == tokenizer.decode(rendered.tokens)
