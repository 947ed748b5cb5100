"""The built files of the page equal a new build of its sources."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "server/page"
STATIC = PAGE / "static"


def node() -> str:
    """Node.js, with the packages of the page."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("there is no node")
    if not (PAGE / "node_modules").exists():
        pytest.skip("the packages of the page are missing: npm ci in server/page")
    return program


def test_a_new_build_has_the_same_bytes(tmp_path: Path) -> None:
    """`make page` was run after the last change of server/page/src or of a package."""
    subprocess.run([node(), "build.mjs", str(tmp_path / "static")], cwd=PAGE, check=True, timeout=120)

    built = {file.name: file.read_bytes() for file in (tmp_path / "static").iterdir()}
    assert built == {file.name: file.read_bytes() for file in STATIC.iterdir()}


def test_types_are_right() -> None:
    checked = subprocess.run(
        [node(), "node_modules/typescript/bin/tsc", "--noEmit"],
        cwd=PAGE,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert (0, "") == (checked.returncode, checked.stdout)


def test_the_lock_file_names_versions_and_no_host() -> None:
    """Every package has an exact version and a digest; npm adds the address of its own registry."""
    lock = json.loads((PAGE / "package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}

    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())
    assert all(re.fullmatch(r"[\d.]+", version) for version in lock["packages"][""]["devDependencies"].values())
