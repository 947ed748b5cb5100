"""docs/performance.md is generated from benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gguf.files import READ
from benchmarks.page import PAGE, page
from benchmarks.result import KEYS, OTHER_KEYS, RESULTS, ROOT, BenchmarkResult, command_line, documents, load, measured


def result(date: str, *rows: dict[str, Any], benchmark: str = "peers") -> BenchmarkResult:
    """A result of an invented machine."""
    return BenchmarkResult(
        benchmark=benchmark, command="python", machine={"cpu": "CPU"}, commit="abc", date=date, rows=list(rows)
    )


def decode(tokens_per_second: float) -> dict[str, Any]:
    """A row of benchmarks.serving.peers."""
    about = {"model": "tiny", "weights": "int8", "peer": "llama.cpp", "cell": "prompt of 512"}
    return about | {"figure": "decode, tokens/s", "cellar": tokens_per_second, "other": 10.0, "ratio": 2.0}


def test_the_committed_page_is_up_to_date() -> None:
    """`python -m benchmarks.page` writes it."""
    assert page(load()) == PAGE.read_text()


def test_every_image_of_the_page_exists() -> None:
    plots = [line.partition("(")[2].rstrip(")") for line in PAGE.read_text().splitlines() if line.startswith("![")]

    assert 4 == len(plots)
    assert all((PAGE.parent / plot).is_file() for plot in plots)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_name_their_rows(path: Path) -> None:
    """Rows of benchmarks on the page have all identifying fields, and no key twice."""
    found = documents(path)
    keys = [
        (
            document.benchmark,
            document.cpu,
            *(row[name] for name in (KEYS | OTHER_KEYS).get(document.benchmark, ("name", "path"))),
        )
        for document in found
        for row in document.rows
    ]

    assert all(document.commit and document.rows for document in found)
    assert len(set(keys)) == len(keys) > 0


def test_a_later_row_replaces_an_earlier_one(tmp_path: Path) -> None:
    """By date, not by the name of the file; a replaced document is no source."""
    result("2026-01-02", decode(20.5)).write(tmp_path / "a.json")
    result("2026-01-01", decode(17.5)).write(tmp_path / "b.json")
    text = page(load(tmp_path))

    assert "20.5 / 10.0 (2.0)" in text
    assert "17.5" not in text
    assert "| abc (2026-01-02) |" in text


def test_a_benchmark_without_a_section_is_no_source() -> None:
    text = page([result("2026-01-01", decode(1.0)), result("2026-01-02", {"name": "a"}, benchmark="stalls")])

    assert "2026-01-02" not in text


def test_gguf_files_have_a_table() -> None:
    """A row for each file, with a column for each figure that was measured."""
    about = {"model": "tiny", "weights": "Q4_K_M", "peer": "ik_llama.cpp", "cellar": 2.0, "other": 3.0, "ratio": 1.5}
    rows = [
        about | {"cell": "server", "figure": "start, ms"},
        about | {"cell": "accuracy", "figure": "distance, millinats"},
    ]
    limited = {name: value for name, value in about.items() if name != "ratio"} | {"limit": 4.0}
    rows.append(limited | {"cell": "prompt of 512", "figure": READ})
    text = page([result("2026-01-01", decode(1.0)), result("2026-01-02", *rows, benchmark="gguf")])

    (line,) = [line for line in text.splitlines() if line.startswith("| tiny | Q4_K_M |")]
    assert 2 == line.count("2.00 / 3.00 (1.5)")
    assert "| 2.00 / 3.00 of 4.00 |" in line
    assert "beside ik_llama.cpp:" in text
    assert "decode" not in text[text.index("beside ik_llama.cpp:") :].splitlines()[2].split("read in decode")[0]


def test_absolute_paths_stay_out_of_the_command() -> None:
    command = command_line(
        [f"{ROOT}/benchmarks/serving/peers.py", "llama.cpp", "--model", "/home/me/qwen3-0.6b", "--cellar", "--slots 8"]
    )

    assert "python -m benchmarks.serving.peers llama.cpp --model qwen3-0.6b --cellar '--slots 8'" == command


def test_a_measured_result_survives_its_file(tmp_path: Path) -> None:
    before = measured("peers", [{"model": "tiny"}], note="a note")
    before.write(tmp_path / "a.json")

    (after,) = load(tmp_path)
    assert (before.rows, before.note, before.date, before.cpu) == (after.rows, after.note, after.date, after.cpu)


def test_every_command_names_a_program() -> None:
    """In the pages, the Makefile and the docstrings; a command beside the date of a commit is recorded."""
    files = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.py")]
    lines = [line for file in files for line in file.read_text().splitlines() if not re.search(r"20\d\d-\d\d", line)]
    named = {name for line in lines for name in re.findall(r"-m (benchmarks\.[\w.]+)", line)}

    assert len(named) > 15
    assert [] == [name for name in sorted(named) if not (ROOT / f"{name.replace('.', '/')}.py").exists()]
