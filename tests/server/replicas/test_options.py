"""The options of `cellar ray`, without Ray."""

from __future__ import annotations

import pytest

from server.commands import ray
from server.configuration.settings import Settings
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
    assert "pip install 'kvcellar[ray]'" in capsys.readouterr().err


def test_a_free_port_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray's proxies on several machines have the same port."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    assert ray.EXIT_USAGE == ray.run_ray(RayOptions(), Settings(port=0))
    assert "--port 0" in capsys.readouterr().err
