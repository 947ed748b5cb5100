"""The pages in docs: each is in the index, and links lead somewhere."""

from __future__ import annotations

import re

from tests.house.source import PACKAGES, ROOT

DOCS = ROOT / "docs"
_link = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *DOCS.rglob("*.md"),
]


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text()

    assert [] == [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index]


def test_links_lead_to_files() -> None:
    """Of every page; addresses of the web are not tried."""
    broken = [
        (page.relative_to(ROOT).as_posix(), target)
        for page in PAGES
        for target in _link.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]

    assert [] == broken


def test_no_text_installs_a_package_of_the_index() -> None:
    """Nothing is published yet: anyone may register the name, and what it installs would be theirs."""
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files = [*PAGES, *sources, *(path for path in ROOT.glob("docker/*") if path.is_file())]
    named = re.compile(r"(?:pip|pipx|uv tool) install [^`\n]*['\" ]kvcellar(?![-\w])")

    assert [] == [path.relative_to(ROOT).as_posix() for path in files if named.search(path.read_text())]
