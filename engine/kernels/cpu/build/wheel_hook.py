"""The build hook of wheels: a wheel with prebuilt kernels gets the tag of their platform, one without is pure Python.

The libraries come from the folder in the environment variable KERNELS, by default `prebuilt`; empty: no libraries.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

# Builds have a separate environment, without torch and without this project.
sys.path.append(str(Path(__file__).resolve().parents[4]))
from engine.kernels.cpu.build.wheel_platform import linux_platform, require_current

_PREBUILT = Path("engine/kernels/cpu/prebuilt")


class KernelWheelHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the libraries of the kernels to a wheel, and sets its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises ValueError for libraries of other sources or of several architectures."""
        libraries = [] if version == "editable" else _libraries(Path(self.root))
        if libraries:
            build_data["force_include"] |= {str(file): str(_PREBUILT / file.name) for file in libraries}
            build_data |= {"pure_python": False, "tag": f"py3-none-{_platform_tag(libraries)}"}


def _libraries(root: Path) -> list[Path]:
    folder = os.environ.get("KERNELS")
    if folder == "":
        return []
    libraries = sorted((root / (folder or _PREBUILT)).glob("*.so"))
    if folder and not libraries:
        raise ValueError(f"KERNELS={folder} has no libraries: run python -m engine.kernels.cpu.build {folder}")
    return libraries


def _platform_tag(libraries: list[Path]) -> str:
    if sys.platform != "linux":
        require_current(libraries, platform.machine())
        return str(next(iter(platform_tags())))
    current = linux_platform(libraries)
    require_current(libraries, current.machine)
    return current.tag
