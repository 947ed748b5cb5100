"""The wheels, built and installed in environments without a compiler: both serve, one of them natively."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine.kernels.cpu.build import libraries
from tests.e2e.serving import ROOT

BUILD_SECONDS, START_SECONDS = 1800, 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(BUILD_SECONDS),
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed"),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of prebuilt libraries: one of an earlier `make wheel`, or a new one."""
    earlier = ROOT / "build/kernels"
    names = set(libraries.prebuilt_names(platform.machine()))
    if names == {file.name for file in earlier.glob("*.so")}:
        return earlier
    folder = tmp_path_factory.mktemp("kernels")
    try:
        libraries.prebuild(folder)
    except libraries.LibraryUnavailable as error:
        pytest.skip(error.reason)
    return folder


def wheel(kernels: str, folder: Path) -> Path:
    """A new wheel of this checkout in the folder."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, env={**os.environ, "KERNELS": kernels})
    [built] = folder.glob("*.whl")
    return built


def install(built: Path, folder: Path) -> Path:
    """The command `cellar` of a new environment with the wheel, and with the dependencies of this environment."""
    venv.create(folder, with_pip=False)
    site = folder / f"lib/python{sysconfig.get_python_version()}/site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    target = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--no-deps"]
    subprocess.run([*target, "--no-index", "--ignore-installed", str(built)], check=True, capture_output=True)
    return folder / "bin/cellar"


@contextmanager
def serving(command: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The address of a server without a compiler on its PATH, and the start-up screen."""
    empty = folder / "no-programs"
    empty.mkdir()
    environment = {"PATH": str(empty), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    arguments = [str(command), "serve", "--port", "0", "--store", "none"]
    output: list[str] = []
    with subprocess.Popen(
        arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        stuck = threading.Timer(START_SECONDS, server.kill)
        stuck.start()
        try:
            assert server.stdout is not None
            for line in server.stdout:
                output.append(line)
                if found := re.search(r"try +curl (http://\S+)/v1", line):
                    yield found.group(1), "".join(output)
                    return
            raise AssertionError("the server did not start:\n" + "".join(output))
        finally:
            stuck.cancel()
            server.terminate()


def answer(url: str) -> str:
    """One answer of the bundled model."""
    message = {"role": "user", "content": "What is Cellar?"}
    body = {"model": "cellar-tiny", "temperature": 0, "max_tokens": 16, "messages": [message]}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False).raise_for_status().json()
    return str(reply["choices"][0]["message"]["content"])


@pytest.mark.skipif(libraries.variants("step") == (), reason="no kernel of the native step runs on this processor")
def test_wheel_with_kernels_runs_natively_without_a_compiler(kernels: Path, tmp_path: Path) -> None:
    built = wheel(str(kernels), tmp_path)
    assert re.fullmatch(r"kvcellar-[\d.]+-py3-none-(manylinux_2_\d+|macosx)_\w+\.whl", built.name)

    with serving(install(built, tmp_path / "environment"), tmp_path) as (url, screen):
        assert re.search(r"steps +one native call", screen), screen
        assert "compiler" not in screen
        assert answer(url)


def test_pure_wheel_serves_without_a_compiler_and_names_it(tmp_path: Path) -> None:
    built = wheel("", tmp_path)
    assert built.name.endswith("-py3-none-any.whl")

    with serving(install(built, tmp_path / "environment"), tmp_path) as (url, screen):
        assert re.search(r"steps +torch operations instead of the native step: no C\+\+ compiler on the PATH", screen)
        assert answer(url)


def test_libraries_of_other_sources_are_refused(tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "attention-generic-x86_64-0123456789abcdef.so").write_bytes(
        b"\x7fELF".ljust(18, b"\0") + (62).to_bytes(2, "little")
    )

    with pytest.raises(subprocess.CalledProcessError) as failure:
        wheel(str(stale), tmp_path)
    assert b"has libraries of other sources" in failure.value.stderr
