"""The options of `cellar ray`, without Ray."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from server import cli
from server.commands import ray
from server.configuration.settings import Settings
from server.replicas import environment
from server.replicas.options import RayOptions


@pytest.mark.parametrize(("text", "bounds"), [("2", (2, 2)), ("2..8", (2, 8)), (" 1..1 ", (1, 1))])
def test_replicas_are_a_number_or_a_range(text: str, bounds: tuple[int, int]) -> None:
    options = RayOptions(replicas=text)
    options.check()

    assert bounds == options.bounds


@pytest.mark.parametrize("text", ["", "0", "8..2", "0..3", "2-8", "many", "2..", "-1"])
def test_other_replicas_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="--replicas must be a number from 1 on or a range such as 2..8"):
        RayOptions(replicas=text).check()


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert ray.EXIT_USAGE == ray.run_ray(RayOptions(), Settings())
    assert "pip install '.[ray]'" in capsys.readouterr().err


def test_a_free_port_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray's proxies on several machines have the same port."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    assert ray.EXIT_USAGE == ray.run_ray(RayOptions(), Settings(port=0))
    assert "--port 0" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--models", "."], ["--config", "cellar.toml"]])
def test_several_models_are_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a folder or of sections of the configuration file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cellar.toml").write_text('[models.small]\nmodel = "small"\n')
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")

    with pytest.raises(SystemExit) as ended:
        cli.make_app()(["ray", *flags])
    assert ended.value.code == ray.EXIT_USAGE
    assert "cellar ray serves one model" in "".join(capsys.readouterr())


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray were installed; the handlers of signals stay those of the tests."""
    monkeypatch.setattr(ray, "_has_ray", lambda: True)
    monkeypatch.setattr(ray, "_interrupt_by_signals", lambda: None)


@pytest.mark.usefixtures("with_ray")
def test_a_port_in_use_is_an_error_before_ray_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert ray.EXIT_FAILED == ray.run_ray(RayOptions(), Settings(port=port))

    assert f"cellar: cannot listen on 127.0.0.1:{port}: Address already in use\n" == capsys.readouterr().err


@pytest.mark.usefixtures("with_ray")
def test_a_missing_model_is_an_error_before_ray_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

    assert ray.EXIT_MODEL == ray.run_ray(RayOptions(), Settings(model=model, port=port))
    assert capsys.readouterr().err.startswith(f"cellar: cannot find the model '{model}'")


def test_changes_of_the_number_of_replicas_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until another command replaces the application."""
    monkeypatch.setattr(ray, "WATCH_SECONDS", 0)
    counts, current = iter([2, 2, 1, 1, 2]), iter([True] * 4 + [False])

    ray._watch(lambda: next(counts), lambda: next(current))
    assert "cellar: 1 replica serving\ncellar: 2 replicas serving\n" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("earlier", "deployed", "current", "owned"),
    [
        (None, "b", "b", True),
        ("a", "b", "b", True),
        # Another command has replaced it.
        (None, "b", "c", False),
        # Refused before its deployment, or its replicas did not start.
        ("a", None, "a", False),
        (None, None, "", True),
        (None, None, None, False),
    ],
)
def test_the_end_of_a_command_ends_its_own_application(
    earlier: str | None, deployed: str | None, current: str | None, owned: bool
) -> None:
    assert owned == ray._is_owned(earlier, deployed, current)


def test_a_token_is_sent_to_a_running_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray sends it of itself only where it has started the cluster."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in (*environment.VARIABLES, *environment.TOKENS, "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    environment.set_environment(running_cluster=True)
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    environment.set_environment()
    assert "RAY_AUTH_MODE" not in os.environ
    environment.set_environment(running_cluster=True)
    assert "token" == os.environ["RAY_AUTH_MODE"]
