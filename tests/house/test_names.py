"""Variables are named by nouns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import ROOT, Source, sources

# Words that say nothing about a value.
EMPTY_WORDS = {"own", "at", "found", "each", "one", "some", "given", "many", "most"}
# Comments and literals, which may be sentences, or an identifier. A function may be called `at`, like std::vector's.
CPP_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\bat(?=\()|(?P<name>\b[A-Za-z_]\w*)""", re.DOTALL
)


def test_no_variable_is_named_by_an_empty_word() -> None:
    """In Python: variables, parameters, attributes, keywords of calls, functions and imports."""
    assert [] == [f"{source.label}:{line} {name}" for source in sources() for line, name in empty_names(source)]


def test_no_identifier_of_the_kernels_is_an_empty_word() -> None:
    """In C++: all identifiers."""
    files = [path for pattern in ("*.h", "*.cpp") for path in (ROOT / "engine/kernels/cpu").rglob(pattern)]

    assert [] == [f"{path.relative_to(ROOT)} {name}" for path in files for name in empty_identifiers(path.read_text())]
    assert files


@pytest.mark.parametrize(
    "code",
    [
        "one = 1",
        "def f(one): pass",
        "def one(): pass",
        "f(one=1)",
        "self.one",
        "lambda one: 1",
        "[one for one in ()]",
        "import a as one",
        "global one",
        "try: pass\nexcept E as one: pass",
        "match x:\n case [*one]: pass",
    ],
)
def test_names_of_python_are_seen(code: str) -> None:
    """Every kind of name."""
    assert {"one"} == {name for node in ast.walk(ast.parse(code)) for name in names(node)} & EMPTY_WORDS


def test_identifiers_of_cpp_are_seen() -> None:
    """Not those in comments and literals."""
    code = 'int many = "some" /* each */; // found\nchar c = \'"\'; x.at(i) + at[i]; state->own;'

    assert ["many", "at", "own"] == empty_identifiers(code)


def empty_names(source: Source) -> Iterator[tuple[int, str]]:
    """Lines and empty words."""
    for node in source.all_nodes:
        yield from ((node.lineno, name) for name in names(node) if name in EMPTY_WORDS)  # type: ignore[attr-defined]


def names(node: ast.AST) -> list[str]:
    """The identifiers of a syntax node, without those of the nodes in it."""
    match node:
        case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.AsyncFunctionDef(name=name) | ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
            return [name]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
        case ast.Global(names=names_in_outer_scope) | ast.Nonlocal(names=names_in_outer_scope):
            return names_in_outer_scope
        case _:
            return []


def empty_identifiers(code: str) -> list[str]:
    """Empty words among the identifiers of C++ code."""
    tokens = (match["name"] for match in CPP_TOKEN.finditer(code))
    return [name for name in tokens if name in EMPTY_WORDS]
