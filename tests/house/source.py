"""The source files of the packages, parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvcache", "engine", "server", "bench")


@dataclass(frozen=True)
class Source:
    """One Python file of a package."""

    path: Path

    @property
    def label(self) -> str:
        """The path from the root of the repository."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def all_nodes(self) -> list[ast.AST]:
        """All syntax nodes."""
        return [*ast.walk(ast.parse(self.path.read_text()))]

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """All syntax nodes of the given kinds."""
        return (node for node in self.all_nodes if isinstance(node, kinds))

    def places(self, nodes: Iterator[ast.AST]) -> list[str]:
        """file:line and source text of each node."""
        return [f"{self.label}:{node.lineno} {ast.unparse(node)[:80]}" for node in nodes]  # type: ignore[attr-defined]


@cache
def sources(*packages: str) -> tuple[Source, ...]:
    """Every Python file of the packages, of all packages if none is named."""
    return tuple(Source(path) for package in packages or PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
