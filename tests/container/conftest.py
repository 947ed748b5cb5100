"""The image of this checkout, built once for all tests of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.container.dockerfile import ROOT

TOOLS = ("buildah", "crun", "mmdebstrap", "unshare", "nsenter", "ip")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
BUILD_SECONDS = 7200
NEEDED = f"not found: {', '.join(MISSING)} (apt-get install buildah crun mmdebstrap iproute2)"


@pytest.fixture(scope="session")
def image() -> None:
    """Built by the script, or skipped; CELLAR_IMAGE_BUILT=1: the image of an earlier build."""
    if os.geteuid() != 0:
        pytest.skip("buildah with chroot isolation needs root")
    if MISSING:
        pytest.skip(NEEDED)
    if os.environ.get("CELLAR_IMAGE_BUILT") == "1":
        return
    script, environment = ROOT / "docker/build-without-docker.sh", {**os.environ, "PYTHON": sys.executable}
    subprocess.run([script], check=True, env=environment, timeout=BUILD_SECONDS)
