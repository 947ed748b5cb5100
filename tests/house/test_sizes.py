"""Files and functions stay small, and everything public says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import Source, sources

LONGEST_FILE, LONGEST_FUNCTION = 400, 50
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

everything = pytest.mark.parametrize("source", sources(), ids=lambda source: source.label)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, inner ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    """Public classes and functions, and the public methods of public classes."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


@everything
def test_a_file_fits_on_a_few_screens(source: Source) -> None:
    """A noun that outgrows its file gets another one."""
    assert len(source.text.splitlines()) <= LONGEST_FILE


@everything
def test_a_function_fits_on_one_screen(source: Source) -> None:
    """From its first line to its last, docstring and all."""
    long = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in functions(source.tree)
        if (node.end_lineno or 0) - node.lineno + 1 > LONGEST_FUNCTION
    }

    assert {} == long


@everything
def test_a_module_says_what_it_owns(source: Source) -> None:
    """Every file begins with a docstring."""
    assert ast.get_docstring(source.tree)


@everything
def test_public_names_say_what_they_are(source: Source) -> None:
    """Every public class, function and method has a docstring; overloads and inner names need none."""
    silent = [node.name for node in public(source.tree.body) if not ast.get_docstring(node)]

    assert [] == silent


@everything
def test_what_goes_in_and_out_is_typed(source: Source) -> None:
    """Every function names the type of its result."""
    assert [] == [node.name for node in functions(source.tree) if node.returns is None]
