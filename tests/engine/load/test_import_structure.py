"""The names of transformers' classes in the cache folder."""

from __future__ import annotations

from pathlib import Path

from transformers.utils.import_utils import create_import_structure_from_path, define_import_structure

from engine.load.import_structure import Structure, stored


def test_an_entry_replaces_the_scan_until_a_file_changes(tmp_path: Path) -> None:
    """Entries that cannot be read are replaced, and a folder of one model has none."""
    package, cache, scans = tmp_path / "models", tmp_path / "cache", list[str]()
    source = package / "llama" / "modeling_llama.py"
    source.parent.mkdir(parents=True)
    source.write_text('__all__ = ["LlamaModel"]\n')

    def scan(path: str, prefix: str | None = None) -> Structure:
        scans.append(path)
        define_import_structure.cache_clear()
        create_import_structure_from_path.cache_clear()
        found: Structure = define_import_structure(path, prefix)
        return found

    def read() -> Structure:
        return stored(scan, cache)(package, prefix="models")

    first, second = read(), read()
    [entry] = cache.iterdir()
    entry.write_text("[1")
    third = read()
    stored(scan, cache)(package)

    expected = {frozenset({"torch"}): {"models.llama.modeling_llama": {"LlamaModel"}}}
    assert [expected] * 3 == [first, second, third]
    assert 3 == len(scans)

    source.write_text('__all__ = ["LlamaModel", "LlamaForCausalLM"]\n')
    assert {"LlamaModel", "LlamaForCausalLM"} == read()[frozenset({"torch"})]["models.llama.modeling_llama"]
