"""The command line: options, environment, refusals, and that asking for help costs nothing."""

from __future__ import annotations

import gc
import os
import re
import shlex
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import httpx
import pytest

from engine.config import EngineConfig
from engine.types.status import DraftingInfo, ModelInfo, QuantizationEstimate
from server import cli, serving
from server.commands.option_sources import SECTIONS
from server.configuration import peer_names
from server.configuration.options import options
from server.configuration.settings import Settings, make_disk_cache
from server.lifecycle import banner
from server.terminal.load_screen import LineScreen
from tests.server.fakes import INFO, MEMORY, FakeEngine, serve_in_thread

ROOT = Path(__file__).parents[2]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a command line up to the point where the server would start; gives the settings.

    In a folder of its own: that of a disk cache is created.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {"PATH": ""})

    def parse(*argv: str, **environment: str) -> Settings:
        found: list[Settings] = []
        monkeypatch.setattr("os.environ", {"PATH": "", **environment})
        monkeypatch.setattr(cli, "run", lambda settings: found.append(settings) or 0)
        with pytest.raises(SystemExit) as ended:
            cli.make_app()(["serve", *argv])
        assert 0 == ended.value.code
        return found[0]

    return parse


def test_the_defaults(parsed: Any) -> None:
    """Bare `cellar serve` is the bundled model on loopback."""
    assert Settings() == parsed()


def test_every_option(parsed: Any) -> None:
    """The names that scripts rely on."""
    command_line = """some/model --host 0.0.0.0 --port 9 --dtype bfloat16 --context 512 --slots 3 --served-model-name a
        --served-model-name b --api-key k1,k2 --overflow shift --max-waiting 7 --itl-target-ms 12.5
        --log-level debug --grace 1.5 --allowed-host x --allowed-host y --threads 2 --mla absorb
        --kv-dtype int8 --quantize int4 --disk-cache kept --disk-cache-bytes 1000 --host-cache-bytes 10
        --drafter model --draft-model small/model --draft-tokens 4"""
    settings = parsed(*command_line.split())

    assert settings == Settings(
        model="some/model",
        host="0.0.0.0",
        port=9,
        dtype="bfloat16",
        context=512,
        slots=3,
        served_names=("a", "b"),
        keys=("k1", "k2"),
        overflow="shift",
        max_waiting=7,
        itl_target_ms=12.5,
        log_level="debug",
        grace_seconds=1.5,
        allowed_hosts=("x", "y"),
        threads=2,
        mla="absorb",
        kv_dtype="int8",
        quantize="int4",
        disk_cache="kept",
        disk_cache_bytes=1000,
        host_cache_bytes=10,
        drafter="model",
        draft_model="small/model",
        draft_tokens=4,
    )


def test_the_environment_stands_in_and_argv_wins(parsed: Any, tmp_path: Path) -> None:
    """CELLAR_ and the option's name; an empty key is no key, as compose passes one that is not set."""
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")

    settings = parsed(
        "--port",
        "10",
        CELLAR_PORT="9",
        CELLAR_SLOTS="2",
        CELLAR_MODEL="m",
        CELLAR_API_KEY="",
        CELLAR_API_KEY_FILE=str(keys),
        CELLAR_SERVED_MODEL_NAME="a b",
    )

    assert (10, 2, "m", ("from-file",), ("a", "b")) == (
        settings.port,
        settings.slots,
        settings.model,
        settings.all_keys,
        settings.served_names,
    )
    assert ("k",) == parsed(CELLAR_API_KEY="k", CELLAR_API_KEY_FILE="").all_keys
    assert Settings() == parsed(CELLAR_DRAFT_MODEL="", CELLAR_PORT="", CELLAR_STORE="")
    engine = parsed("--draft-tokens", "auto").engine_config()
    assert (None, "auto") == (engine.draft_model, engine.draft_tokens)
    assert ["auto", 0.0] == [parsed("--itl-target-ms", text).engine_config().itl_target_ms for text in ("auto", "0")]
    assert [None, None, "x"] == [parsed(CELLAR_DISK_CACHE=name).disk_cache_folder for name in ("", "none", "x")]


@pytest.mark.parametrize(("text", "context"), [("4096", 4096), ("4k", 4096), ("32K", 32768), ("1m", 2**20)])
def test_a_context_may_have_a_unit(parsed: Any, text: str, context: int) -> None:
    """On the command line and in the environment; sizes of caches too."""
    assert context == parsed("--context", text).context
    assert context == parsed(CELLAR_CONTEXT=text).context
    assert 3 * 2**30 == parsed("--disk-cache-bytes", "3GiB").disk_cache_bytes
    assert 5_000_000_000 == parsed(CELLAR_HOST_CACHE_BYTES="5GB").host_cache_bytes


def test_older_names_of_options_are_valid(parsed: Any) -> None:
    """On the command line and in the environment."""
    expected = Settings(disk_cache="x", disk_cache_bytes=5, host_cache_bytes=6)

    assert expected == parsed("--shelf", "x", "--shelf-bytes", "5", "--shelf-memory-bytes", "6")
    assert expected == parsed(CELLAR_SHELF="x", CELLAR_SHELF_BYTES="5", CELLAR_SHELF_MEMORY_BYTES="6")


def test_a_variable_of_another_server_is_answered_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.environ", {"PATH": "", "CELLAR_ENABLE_LORA": "x"})
    with pytest.raises(SystemExit):
        cli.make_app()(["serve"])

    assert "CELLAR_ENABLE_LORA is no setting. --lora name=FOLDER" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "bench"])
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("CELLAR_CONTXET", "CELLAR_CONTEXT"),
        ("CELLAR_SERVED_MODEL", "CELLAR_SERVED_MODEL_NAME"),
        ("CELLAR_MAXWAITING", "CELLAR_MAX_WAITING"),
        ("CELLAR_APIKEY", "CELLAR_API_KEY"),
        ("CELLAR_context", "CELLAR_CONTEXT"),
        ("CELLAR_MAX_MODEL_LEN", "CELLAR_CONTEXT"),
        ("CELLAR_", "CELLAR_"),
    ],
)
def test_an_unknown_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, name: str, nearest: str
) -> None:
    """With exit code 2 and the nearest name: a setting that is ignored looks like one that holds."""
    monkeypatch.setattr("os.environ", {"PATH": "", name: "512"})
    monkeypatch.setattr(cli, "run", lambda settings: 0)
    with pytest.raises(SystemExit) as ended:
        cli.make_app()([command])

    assert 2 == ended.value.code
    assert f"{name} is no setting; the nearest one is {nearest}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("serve --max-model-len=4096", "Unknown option: --max-model-len. Its name in Cellar is --context."),
        ("serve -ngl 99", "Unknown option: -ngl. Its name in Cellar is --device."),
        ("run x y --temp 0.2", "Unknown option: --temp. Its name in Cellar is --temperature."),
        ("serve --lora-modules sql=x", "Unknown option: --lora-modules. Its name in Cellar is --lora."),
        (
            "serve --enable-lora",
            "Unknown option: --enable-lora. --lora name=FOLDER, repeatable, and --lora-dir",
        ),
        ("chat x --mmproj x.gguf", "Unknown option: --mmproj. The vision or audio tower of a checkpoint is loaded"),
        ("serve --cors", "Unknown option: --cors. Its name in Cellar is --allowed-host."),
        ("serve --temp 0", "Unknown option: --temp. Requests have it: their parameter temperature, or --temperature"),
        ("serve --top-k 3", "Unknown option: --top-k. Requests have it: their parameter top_k, or --top-k of cellar"),
        ("serve --context 4q", "Invalid value for --context: must be a whole number, or one with k or m such as 32k"),
        ("serve -m x.gguf", "Unknown option: -m. The model is an argument: cellar serve MODEL."),
        ("serve --enable-prefix-caching", "Unknown option: --enable-prefix-caching. Prefix caching is always on."),
        ("list", 'Unknown command "list". Did you mean "cellar models"?'),
        ("models rm x", 'Unknown command "rm". Did you mean "cellar models remove NAME"?'),
        ("serv", 'Unknown command "serv". Did you mean "serve"?'),
        ("serve --prot 9", "Unknown option: --prot. Did you mean --port?"),
        ("pull x --max-model-len 9", "Unknown option: --max-model-len. Did you mean --model?"),
    ],
)
def test_names_of_other_servers_are_answered_with_those_of_cellar(
    capsys: pytest.CaptureFixture[str], words: str, answer: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.make_app()(words.split())

    assert 2 == ended.value.code
    assert answer in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_no_name_of_another_server_is_one_of_cellar() -> None:
    kinds = (Settings, *SECTIONS.values())
    own = {key for kind in kinds for option in options(kind) for key in option.keys}

    assert set(peer_names._SAME) <= own
    assert set() == own & (peer_names._PEER_NAMES.keys() | peer_names._REMEDY_OF.keys())
    assert set() == peer_names._COMMAND_OF.keys() & {*cli.make_app()}


def test_variables_of_others_are_left_alone(parsed: Any) -> None:
    """Variables of bench, compose.yaml and docker/, and of Kubernetes for a service called cellar or cellar-web."""
    environment = {
        "CELLAR_IMAGES": "x",
        "CELLAR_ROUNDS": "1",
        "CELLAR_SERVICE_HOST": "10.0.0.1",
        "CELLAR_SERVICE_PORT_HTTP": "80",
        "CELLAR_PORT_80_TCP_ADDR": "10.0.0.1",
        "CELLAR_WEB_PORT": "tcp://10.0.0.1:80",
        "CELLARS": "x",
    }
    assert Settings() == parsed(**environment)


@pytest.mark.parametrize(("mode", "told"), [(0o644, True), (0o604, True), (0o640, False), (0o600, False)])
def test_a_world_readable_key_file_is_a_warning(
    parsed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, told: bool
) -> None:
    """With the command that mends it; the key works all the same."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(mode)

    assert ("secret",) == parsed("--api-key-file", str(keys)).all_keys
    shown = capsys.readouterr().out
    assert told == (f"can read {keys}; chmod o-r" in shown)
    assert "secret" not in shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_does_not_end_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the standard output is a file on it: the lines of the start are lost, and so are later ones."""
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    screen = LineScreen(serving._print_status)
    for phase in ("load weights", "warm up"):
        screen.set_phase(phase)

    assert sys.stdout is not full
    sys.stdout.close()
    with suppress(OSError):
        full.close()


def test_garbage_collection_resumes_after_the_import() -> None:
    """Collections pause for the imports alone: what a load leaves must not stay for good."""
    before = gc.get_freeze_count()
    created = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    serving._engine(Settings(), LineScreen(print))

    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(created)


def test_an_option_of_the_engine_is_declared_once() -> None:
    """The server declares no setting of the engine again, except that its requests bring no media."""
    described = get_type_hints(EngineConfig, include_extras=True)
    settings = {
        each.name: each.default for each in fields(EngineConfig) if get_origin(described[each.name]) is Annotated
    }
    listed = {option.field: option for option in options()}

    assert settings.keys() <= listed.keys()
    assert settings == {name: listed[name].default for name in settings}
    assert {"context", "draft_tokens", "disk_cache"} <= settings.keys()
    assert not {"model", "cells", "chunk", "checkpoint", "kernels", "media", "is_draft"} & listed.keys()
    assert Settings().engine_config() == EngineConfig(media=False)


def test_an_empty_text_is_not_set() -> None:
    config = Settings(draft_model="small", draft_quantize="auto", calibration="", memory="", device="").engine_config()

    assert ("auto", None, None) == (config.draft_quantize, config.calibration, config.memory)
    assert "cpu" == config.device


def test_the_settings_reach_the_engine() -> None:
    """As an EngineConfig: API keys stay in the server."""
    config = Settings(model="m", context=64, draft_tokens=0, itl_target_ms=20.0, keys=("secret",)).engine_config()

    assert config == EngineConfig(model="m", context=64, draft_tokens=0, itl_target_ms=20.0, media=False)
    assert type(config) is EngineConfig
    assert 0.02 == config.itl_target_seconds
    assert EngineConfig().itl_target_seconds is None


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--port", "70000"], "--port"),
        (["--grace", "-1"], "--grace"),
        (["--grace", "nan"], "--grace"),
        (["--chat-template", "/nonexistent/x"], "--chat-template /nonexistent/x cannot be read as UTF-8 text"),
        (["--slots", "0"], "--slots must be at least 1"),
        (["--context", "4"], "--context must be at least 8"),
        (["--api-key-file", "/nonexistent/key"], "/nonexistent/key"),
        (["--draft-tokens", "17"], "--draft-tokens must be between 0 and 16"),
        (["--draft-tokens", "-1"], "--draft-tokens must be between 0 and 16"),
        (["--itl-target-ms", "-1"], "--itl-target-ms must be 0 or more"),
        (["--itl-target-ms", "inf"], "--itl-target-ms must be 0 or more"),
        (["--disk-cache", "/dev/null/x"], "--disk-cache /dev/null/x: there can be no such folder: Not a directory"),
        (["--max-waiting", "-1"], "--max-waiting must be 0 or more"),
        (["--shelf-memory-bytes", "-1"], "--host-cache-bytes must be 0 or more"),
        (["some/model", "--drafter", "model"], "--drafter model needs a draft model: name it with --draft-model"),
        (["some/model", "--draft-quantize", "int8"], "--draft-quantize needs a draft model"),
        (["--drafter", "lookup", "--draft-model", "small"], "--drafter lookup does not use the draft model small"),
    ],
)
def test_invalid_settings_are_one_line_and_code_2(
    argv: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names what to change; nothing is loaded."""
    with pytest.raises(SystemExit) as ended:
        cli.make_app()(["serve", *argv])

    assert 2 == ended.value.code
    printed = capsys.readouterr().out
    assert word in printed
    assert 1 == printed.count("\n")


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    """No torch, no transformers, no web framework: help is there at once."""
    code = (
        f"import sys; sys.argv = ['cellar', *{argv!r}]\nfrom server.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'uvicorn', 'numpy') if name in sys.modules])"
    )

    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert ran.stdout.rstrip().endswith("[]"), ran.stdout


def test_the_server_never_imports_torch() -> None:
    """Not even when the whole application is imported; only `cellar serve` loads the engine."""
    code = "import sys, server.app, server.lifecycle\nprint([n for n in ('torch', 'transformers') if n in sys.modules])"

    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert "[]\n" == ran.stdout


def test_the_start_up_screen() -> None:
    """Model, context, queue, memory plan, keys, addresses, and a line to copy."""
    text = banner(INFO, MEMORY, DraftingInfo(), Settings(served_names=("fake",), keys=("k",)), "http://127.0.0.1:8000")

    assert isinstance(INFO, ModelInfo)
    for part in (
        "serves fake",
        "FakeForCausalLM, 1.2k parameters, float32",
        "64 tokens a sequence, 4 slots, overflow: length",
        "64 requests may wait",
        "logits are independent of the batch, bit for bit",
        "weights 4.0 MiB + cache 128.0 KiB (256 tokens x 512 bytes) + work 1.0 MiB = 5.1 MiB",
        "of 1.0 GiB free",
        "drafts     none",
        "1 API key",
        "http://127.0.0.1:8000/v1",
        "Authorization: Bearer YOUR_KEY",
    ):
        assert part in text
    assert "disk cache" not in text
    assert "adapters" not in text
    with_adapters = Settings(lora_dir="/adapters", max_loras=3)
    assert "adapters   of /adapters at their first request, at most 3 in memory" in banner(
        INFO, MEMORY, DraftingInfo(), with_adapters, "http://127.0.0.1:8000"
    )
    assert "/kept, 8.0 GiB at most" in banner(
        INFO, MEMORY, DraftingInfo(), Settings(disk_cache="/kept"), "http://127.0.0.1:8000"
    )


@pytest.mark.parametrize(("chats", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_the_request_of_the_start_up_screen_is_answered(chats: bool, path: str) -> None:
    """A chat or, for a model without a chat template, a completion."""
    with serve_in_thread(FakeEngine()) as port:
        url = f"http://127.0.0.1:{port}"
        text = banner(INFO, MEMORY, DraftingInfo(), Settings(served_names=("fake",)), url, chats=chats)
        _, curl, address, *arguments = shlex.split(text.splitlines()[-1])
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        answer = httpx.post(address, content=options["-d"], headers=dict([options["-H"].split(": ")]))

    assert ("curl", url + path, 200) == (curl, address, answer.status_code)


def test_the_start_up_screen_of_the_bundled_model_offers_others() -> None:
    """A small one, and three of the hub that fit the memory; no other model is a demonstration."""
    memory = replace(MEMORY, available_bytes=8 << 30)
    url = "http://127.0.0.1:8000"
    text = banner(INFO, memory, DraftingInfo(), Settings(), url)
    offered = text.partition("this is    a demonstration: ")[2].splitlines()

    assert offered[0].endswith("models that fit 8.0 GiB of memory, downloaded once:")
    commands = [line for line in offered[1:] if re.fullmatch(r" {13}\S+ serve \S+ +\d.*", line)]
    assert commands == offered[1:5]
    assert "serve smollm2 " in offered[1]
    assert "demonstration" not in banner(INFO, memory, DraftingInfo(), Settings(model="someone/model"), url)


def test_the_start_up_screen_shows_the_inputs_of_a_multimodal_model() -> None:
    text_only = replace(INFO, unread_modalities=("image", "audio"), text_only_reason="--no-media")
    with_images = replace(INFO, input_modalities=("text", "image"), unread_modalities=("video",))
    texts = [banner(info, MEMORY, DraftingInfo(), Settings(), "http://x") for info in (text_only, with_images, INFO)]

    lines = [[line.strip() for line in text.splitlines() if line.strip().startswith("inputs")] for text in texts]
    assert lines == [
        ["inputs     text only: its image, audio parts are not used (--no-media)"],
        ["inputs     text, image"],
        [],
    ]


def test_the_start_up_screen_shows_batch_invariance() -> None:
    """Where logits depend on the batch by rounding, it says so."""
    rounding = replace(INFO, batch_invariant=False)

    assert "logits depend on the batch by rounding" in banner(
        rounding, MEMORY, DraftingInfo(), Settings(), "http://127.0.0.1:8000"
    )


def test_the_start_up_screen_shows_steps_and_quantisation() -> None:
    """The native step or the reason against it, and for each format the remaining weight bytes."""
    offer = QuantizationEstimate((("int8", 0.53), ("int4", 0.28)), "int8")
    native = replace(INFO, quantization_estimate=offer)
    slow = replace(INFO, not_native_reason="it has an encoder", quantization_estimate=replace(offer, auto=None))
    url = "http://127.0.0.1:8000"

    assert (
        "steps      one native call; weight bytes per token with --quantize: int8 53% or int4 28%; auto: int8\n"
    ) in banner(native, MEMORY, DraftingInfo(), Settings(), url)
    assert "torch operations instead of the native step: it has an encoder; weight bytes" in banner(
        slow, MEMORY, DraftingInfo(), Settings(), url
    )
    assert "auto: no quantisation\n" in banner(slow, MEMORY, DraftingInfo(), Settings(), url)
    assert "steps      one native call\n" in banner(INFO, MEMORY, DraftingInfo(), Settings(), url)
    arm64 = replace(INFO, kernel_variants=("neon", "dotprod"))
    same = replace(INFO, kernel_variants=("avx2", "avx2"))
    assert "one native call, with kernels for neon and dotprod\n" in banner(
        arm64, MEMORY, DraftingInfo(), Settings(), url
    )
    assert "one native call, with kernels for avx2\n" in banner(same, MEMORY, DraftingInfo(), Settings(), url)


def test_the_start_up_screen_shows_origins() -> None:
    """None, unless an origin is allowed."""
    url, open_ = "http://127.0.0.1:8000", Settings(allowed_hosts=("x", "https://chat.example.org"))

    assert "browser" not in banner(INFO, MEMORY, DraftingInfo(), Settings(allowed_hosts=("x",)), url)
    assert "of https://chat.example.org may call" in banner(INFO, MEMORY, DraftingInfo(), open_, url)


def test_the_start_up_screen_shows_drafters() -> None:
    """The kinds, how far they go, and what the model among them takes."""
    url, small = "http://127.0.0.1:8000", DraftingInfo(("lookup", "model"), INFO, MEMORY)

    assert "lookup, depth chosen at run time\n" in banner(INFO, MEMORY, DraftingInfo(("lookup",)), Settings(), url)
    assert (
        "lookup and model, depth 4; FakeForCausalLM, 1.2k parameters, from /models/fake: "
        "weights 4.0 MiB + cache 128.0 KiB\n"
    ) in banner(INFO, MEMORY, small, Settings(draft_tokens=4), url)


@pytest.mark.parametrize(
    ("given", "rounds"), [({}, "1000"), ({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "5"}, "5")]
)
def test_spinning_of_threads_is_limited(
    given: dict[str, str], rounds: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bounds their spinning is set before any command runs, and the user's own word stays."""
    seen = []
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "make_app", lambda: lambda: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    cli.main()

    assert [rounds] == seen


def test_the_shell_completes_commands_options_and_words() -> None:
    """The script of bash, run by bash."""
    command = [sys.executable, "-c", "from server.cli import main; main()", "completion", "bash"]
    script = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [script]
    for words in (("cellar", "mod"), ("cellar", "serve", "--quan"), ("cellar", "serve", "--quantize", "in")):
        lines.append(f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=()")
        lines.append('_cellar; echo "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)

    assert ["models", "--quantize", "int8 int4"] == done.stdout.splitlines()


def test_the_completion_is_installed(tmp_path: Path) -> None:
    """In the folder of the shell, which is printed."""
    command = [sys.executable, "-c", "from server.cli import main; main()", "completion", "fish", "--install"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("XDG_CONFIG_HOME", None)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)

    assert tmp_path in (path := Path(done.stdout.strip())).parents
    assert "complete -c cellar" in path.read_text()


def test_the_disk_cache_folder_is_private(tmp_path: Path) -> None:
    """A folder that exists keeps its mode: it may be shared on purpose."""
    for name in ("new", "existing"):
        folder = tmp_path / name
        if name == "existing":
            folder.mkdir(mode=0o750)
        make_disk_cache(str(folder))

    assert 0o700 == stat.S_IMODE((tmp_path / "new").stat().st_mode)
    assert 0o750 == stat.S_IMODE((tmp_path / "existing").stat().st_mode)
