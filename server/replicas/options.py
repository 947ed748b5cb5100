"""The options of `cellar ray`. Imported by every command: no heavy imports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

_range = re.compile(r"([0-9]+)(?:\.\.([0-9]+))?")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of `cellar ray` besides the model and the options of each replica."""

    replicas: Annotated[
        str, Parameter(help="Number of replicas, or a range such as 2..8: then their load decides.")
    ] = "2"
    cluster: Annotated[
        str | None,
        Parameter(help="Address of a running Ray cluster, or auto.", show_default="one on this machine is started"),
    ] = None

    def check(self) -> None:
        """Raise ValueError for a range that cannot work."""
        low, high = self.bounds
        if not 1 <= low <= high:
            raise ValueError(f"--replicas must be a number from 1 on or a range such as 2..8, not {self.replicas}")

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most replicas; (0, 0) if they cannot be read."""
        match = _range.fullmatch(self.replicas.strip())
        return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
