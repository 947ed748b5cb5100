"""The configuration file: every option of the code, its place behind flags and environment, and wrong entries."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from bench.options import BenchOptions
from engine.types.setting import union_members
from server import cli
from server.commands.option_sources import SECTIONS
from server.configuration.options import Option, options
from server.configuration.settings import Settings
from tests.selection import quick

ROOT = Path(__file__).parents[3]
IN_FILE = [option for option in options() if option.field != "config"]
# Options that exclude others.
ALONE = ("models_dir", "tensor_parallel", "batch_invariant")
# Options with texts of a certain form.
TEXTS = {
    "memory": "9GiB",
    "device": "auto",
    "host": "localhost",
    "disk_cache": "{folder}",
    "store": "memory",
    "key_file": "{folder}/keys",
    "calibration": "{folder}/keys",
    "chat_template": "{folder}/keys",
    "drafter": "model",
    "lora_dir": "{folder}",
    "models_dir": "{folder}/models",
    "keep_alive": "5m",
}


class Run:
    """Runs `cellar serve` up to the start of the server, with a file, variables and arguments."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.file, self.settings, self._patch = folder, folder / "cellar.toml", Settings(), monkeypatch
        monkeypatch.setattr(cli, "run", self._keep)
        monkeypatch.setattr(cli, "run_several", lambda settings, entries: self._keep(settings))
        (folder / "models" / "a").mkdir(parents=True)
        (folder / "models" / "a" / "config.json").write_text("{}")
        (folder / "keys").write_text("from-file")
        (folder / "keys").chmod(0o600)

    def _keep(self, settings: Settings) -> int:
        self.settings = settings
        return 0

    def code(self, *argv: str, command: str = "serve", **environment: str) -> int | str | None:
        self._patch.setattr("os.environ", {"PATH": "", "XDG_CONFIG_HOME": str(self.folder / "none"), **environment})
        with pytest.raises(SystemExit) as ended:
            cli.make_app()([command, *argv])
        return ended.value.code

    def from_file(self, text: str, *argv: str, **environment: str) -> Settings:
        """The settings with a file."""
        self.file.write_text(text)
        assert 0 == self.code("--config", str(self.file), *argv, **environment)
        return self.settings


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def value_of(option: Option, folder: Path) -> Any:
    """A value that is not the default."""
    if option.field in TEXTS:
        return TEXTS[option.field].format(folder=folder)
    if option.field == "lora":
        return ["sql=a", "support=b"]
    parts = union_members(option.value_type)
    if option.choices and option.default != option.choices[-1]:
        return option.choices[-1]
    if option.value_type is bool:
        return not option.default
    if int in parts or float in parts:
        return 9
    return ["a", "b"] if get_origin(parts[0]) is tuple else "some/name"


def toml(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')


def flags(option: Option, value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    return [text for item in items for text in ([option.flag] if item is True else [option.flag, str(item)])]


def misspelt(name: str) -> str:
    """The name without one letter in its middle."""
    middle = len(name) // 2
    return name[:middle] + name[middle + 1 :]


def in_text(option: Option, value: Any) -> str:
    """A value in a variable."""
    separator = "," if option.field == "keys" else " "
    return separator.join(value) if isinstance(value, list) else str(value)


def names_at(some: Sequence[Option], names: Callable[[Option], Sequence[str]]) -> Iterator[list[tuple[Option, str]]]:
    """Lists with one name of each option, until each name is in a list; options without names are left out."""
    for at in range(max(len(names(option)) for option in some)):
        yield [(option, names(option)[min(at, len(names(option)) - 1)]) for option in some if names(option)]


def test_every_option_has_one_meaning_in_all_places(run: Run) -> None:
    """The same values on the command line, in the environment and in the file, under every name of the options."""
    check_meanings(run, [option for option in IN_FILE if option.field not in ALONE])
    for field in ALONE:
        check_meanings(run, [option for option in IN_FILE if option.field == field])


def test_counts_and_sizes_may_have_a_unit(run: Run) -> None:
    settings = run.from_file('context = "4k"\ndisk-cache-bytes = "2GiB"\n')

    assert (4096, 2 * 2**30) == (settings.context, settings.disk_cache_bytes)


def test_a_key_of_another_server_is_answered_with_the_remedy(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.file.write_text('enable-lora = "x"\n')

    assert 2 == run.code("--config", str(run.file))
    assert "enable-lora is not an option. --lora name=FOLDER" in capsys.readouterr().err


def check_meanings(run: Run, some: Sequence[Option]) -> None:
    values = {option: value_of(option, run.folder) for option in some}
    found = [run.from_file("", *itertools.chain(*(flags(option, value) for option, value in values.items())))]
    for names in names_at(some, lambda option: option.variables):
        found.append(run.from_file("", **{name: in_text(option, values[option]) for option, name in names}))
    for names in names_at(some, lambda option: (*option.keys, option.keys[0].replace("-", "_"))):
        found.append(run.from_file("".join(f"{name} = {toml(values[option])}\n" for option, name in names)))

    for option in some:
        read = [getattr(settings, option.field) for settings in found]
        assert read == [read[0]] * len(read), option.flag
        assert read[0] != option.default, option.flag


@pytest.mark.parametrize("option", quick(IN_FILE[::6], IN_FILE), ids=lambda option: option.flag)
def test_a_misspelt_option_is_refused_in_all_places(
    run: Run, option: Option, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the nearest name, and nothing starts."""
    for key in option.keys:
        wrong = misspelt(key)
        run.file.write_text(f"{wrong} = 1\n")
        variable = f"CELLAR_{wrong.replace('-', '_').upper()}"
        assert 2 == run.code("--config", str(run.file))
        assert f"cellar: {run.file}: {wrong} is not an option; the nearest one is {key}\n" == capsys.readouterr().err
        assert 2 == run.code(**{variable: "1"})
        assert f"{variable} is no setting; the nearest one is CELLAR_{key.replace('-', '_').upper()}" in (
            capsys.readouterr().out
        )
        assert 0 != run.code(f"--{wrong}=1")
        assert f"--{key}" in " ".join(capsys.readouterr().err.replace("│", "").split())


TYPED = [*zip(IN_FILE, itertools.cycle(("{ x = 1 }", "1979-05-27", "[[1]]")), strict=False)]


@pytest.mark.parametrize(
    ("option", "wrong"),
    quick(TYPED[::4], TYPED),
    ids=lambda value: getattr(value, "flag", value),
)
def test_a_value_of_another_type_is_refused(
    run: Run, option: Option, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """File, key and the accepted type are named."""
    run.file.write_text(f"{option.keys[0]} = {wrong}\n")
    assert 2 == run.code("--config", str(run.file))
    assert f"{run.file}: {option.keys[0]} must be " in capsys.readouterr().err


def test_flags_win_over_the_environment_and_that_over_the_file(run: Run) -> None:
    text = 'port = 1\nslots = 2\ncontext = 512\nmodel = "from/file"\n'

    settings = run.from_file(text, "--port", "3", CELLAR_PORT="4", CELLAR_SLOTS="5", CELLAR_CONTEXT="")

    assert (3, 5, 512, "from/file") == (settings.port, settings.slots, settings.context, settings.model)
    assert "given" == run.from_file(text, "given").model
    assert "env" == run.from_file(text, CELLAR_MODEL="env").model


def test_the_file_is_found_by_flag_by_variable_and_by_its_place(run: Run) -> None:
    """In this order; a flag or variable that names no file is an error, a missing file in the usual place is none."""
    usual = run.folder / "home" / "cellar" / "cellar.toml"
    usual.parent.mkdir(parents=True)
    for number, file in enumerate([usual, run.folder / "env.toml", run.folder / "flag.toml"], 1):
        file.write_text(f"port = {number}\n")
    home, variable = {"XDG_CONFIG_HOME": str(run.folder / "home")}, {"CELLAR_CONFIG": str(run.folder / "env.toml")}

    assert 0 == run.code()
    assert 8000 == run.settings.port
    assert 0 == run.code(**home)
    assert 1 == run.settings.port
    assert 0 == run.code(**home, **variable)
    assert 2 == run.settings.port
    assert 0 == run.code("--config", str(run.folder / "flag.toml"), **home, **variable)
    assert 3 == run.settings.port
    assert 2 == run.code("--config", str(run.folder / "missing"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('slots = "512"', "slots must be a whole number, not '512'"),
        ("slots = true", "slots must be a whole number, not true"),
        ("context = true", "context must be a whole number or a text, not true"),
        ("lenient = 1", "lenient must be true or false, not 1"),
        ('quantize = "int5"', 'quantize must be "none", "int8", "int4", "auto", not \'int5\''),
        ("draft-tokens = 1.5", 'draft-tokens must be "auto" or a whole number, not 1.5'),
        ("served-model-name = [1]", "served-model-name must be a text or a list of texts, not [1]"),
        ("model = 3", "model must be a text, not 3"),
        ("port = ", "is not TOML"),
        ("max-waiting = 1\nmax_waiting = 2", "max-waiting is there twice"),
        ("config = 'x'", "config is not an option"),
        ("[serve]\nport = 1", "[serve] is no section; options of `cellar serve` stand above all sections"),
        ("max_model_len = 4096", "max-model-len is not an option; the nearest one is context"),
        ("[bench]\nroundz = 1", "[bench] roundz is not an option; the nearest one is rounds"),
        ("[bench]\nrounds = '1'", "[bench] rounds must be a whole number, not '1'"),
        ("bench = 1", "bench is a section: write [bench]"),
        ("[bech]\nrounds = 1", "[bech] is no section"),
    ],
)
def test_wrong_entries_are_one_line_and_code_2(
    run: Run, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    run.file.write_text(text)

    assert 2 == run.code("--config", str(run.file))
    shown = capsys.readouterr()
    assert shown.err.startswith(f"cellar: {run.file}")
    assert message in shown.err
    assert (1, "") == (shown.err.count("\n"), shown.out)


def test_a_section_has_the_options_of_one_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cellar bench` reads its section and the options of the server; `cellar serve` ignores the section."""
    seen: list[tuple[BenchOptions, list[str]]] = []
    monkeypatch.setattr(
        "bench.command.measured", lambda options, serving: seen.append((options, list(serving.arguments))) or 0
    )
    run.file.write_text("slots = 3\n[bench]\nrounds = 7\nbase-url = ['a', 'b']\n")

    assert 0 == run.code("--config", str(run.file), command="bench")
    assert 3 == run.from_file(run.file.read_text()).slots
    assert [(BenchOptions(rounds=7, base_url=["a", "b"]), ["--slots", "3"])] == seen


@pytest.mark.parametrize(("mode", "text", "warned"), [(0o644, "api-key='k'", True), (0o600, "api_key='k'", False)])
def test_api_keys_in_a_world_readable_file_are_a_warning(
    run: Run, capsys: pytest.CaptureFixture[str], mode: int, text: str, warned: bool
) -> None:
    """As with key files; without keys everybody may read the file."""
    run.file.touch(mode)
    run.file.chmod(mode)

    assert ("k",) == run.from_file(text).all_keys
    assert warned == (f"can read {run.file}; chmod o-r" in capsys.readouterr().out)
    run.from_file("port = 1")
    assert "" == capsys.readouterr().out


def test_every_option_has_a_type_that_the_file_can_have() -> None:
    """A new kind of type needs a line in the reader."""
    plain = {str, int, float, bool, type(None)}
    parts = {part for option in options() for part in union_members(option.value_type)}

    assert {part for part in parts if part not in plain and not get_args(part)} == set()


IN_SECTIONS = [(command, option) for command, kind in SECTIONS.items() for option in options(kind)]


@pytest.mark.parametrize(
    ("command", "option"),
    quick([(command, options(kind)[-1]) for command, kind in SECTIONS.items()], IN_SECTIONS),
    ids=lambda value: getattr(value, "flag", value),
)
def test_a_misspelt_option_of_a_section_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str], command: str, option: Option
) -> None:
    """In the file with the nearest name of the section, in the environment with the nearest variable."""
    key = option.keys[0]
    wrong, variable = misspelt(key), f"CELLAR_{misspelt(key).replace('-', '_').upper()}"
    run.file.write_text(f"[{command}]\n{wrong} = 1\n")

    assert 2 == run.code("--config", str(run.file))
    assert f"[{command}] {wrong} is not an option; the nearest one is {key}\n" in capsys.readouterr().err
    assert 2 == run.code(**{variable: "1"})
    assert f"{variable} is no setting; the nearest one is {option.variables[0]}" in capsys.readouterr().out


@pytest.mark.parametrize("command", quick(("bench", "chat"), SECTIONS))
def test_help_shows_the_options_of_each_command(command: str) -> None:
    """With their environment variables; docs/cli.md has those of the chat."""
    line = [sys.executable, "-c", "from server.cli import main; main()", command, "--help"]
    wide = {**os.environ, "COLUMNS": "300", "TERM": "dumb"}
    shown = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=wide).stdout
    declared = options(SECTIONS[command])

    assert [] == [option.flag for option in declared if option.flag not in shown]
    assert [] == [option.variables[0] for option in declared if f"[env var: {option.variables[0]}]" not in shown]
    if command != "bench":
        documented = (ROOT / "docs" / "cli.md").read_text()
        assert [] == [option.flag for option in declared if f"`{option.flag}" not in documented]
