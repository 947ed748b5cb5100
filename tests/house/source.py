"""The source of the three packages, as the rules of the house look at it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvcache", "engine", "server")


@dataclass(frozen=True)
class Source:
    """One file. `name` is how it is imported: engine.kernels.reference."""

    path: Path

    @property
    def name(self) -> str:
        """The module's dotted name; of a package's own file, the package's."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The top package."""
        return self.path.relative_to(ROOT).parts[0]

    @property
    def label(self) -> str:
        """The path as people write it."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """What the file says."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """What Python reads."""
        return ast.parse(self.text)


def sources(*packages: str) -> list[Source]:
    """Every Python file of the packages, all of them if none is named."""
    return [Source(path) for package in packages or PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(source: Source, *, types: bool) -> Iterator[str]:
    """Dotted names that a file imports; with `types`, those that only annotations need, too."""
    skipped = set() if types else {child for node in _type_blocks(source.tree) for child in ast.walk(node)}
    for node in ast.walk(source.tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.label}: relative imports hide the floor"
            yield from (_imported(str(node.module), alias.name) for alias in node.names)


def _imported(module: str, name: str) -> str:
    """`from engine import hooks` imports engine.hooks, `from engine.core import Core` imports engine.core."""
    inside = ROOT / module.replace(".", "/") / name
    return f"{module}.{name}" if inside.is_dir() or inside.with_suffix(".py").is_file() else module


def _type_blocks(tree: ast.Module) -> Iterator[ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield node
