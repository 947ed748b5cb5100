"""Damaged models: one file of the bundled model is cut or changed, and the engine loads it.

`python -m tests.faults.folders --count 500` damages a file of a folder (weights in one file or with an index) or a GGUF
file. A load has to succeed, or to raise a ModelError of one line that names the model, in at most 10 s of processor
time. The exit code is 1 if one ends in any other way.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.convert.convert import Conversion, convert
from engine.errors import ModelError
from engine.load.load import load

_SOURCE = Path(__file__).parents[2] / "models" / "target"
_WEIGHTS = "model.safetensors"
_MAX_SECONDS = 10
# Bytes at the start of a GGUF file that are cut or changed: its metadata, and some weights.
_GGUF_START = 200_000
_VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 10**9, 2**63, 1e300, "", "x", [], {}, [None], [-1], {"x": 1})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a load ended.

    end      "loads", "refused", or "defect"
    message  of the error; of a defect its type and text
    seconds  of processor time
    """

    damage: str
    end: str
    message: str
    seconds: float


def save_models(folder: Path) -> list[Path]:
    """The bundled model as a folder, as a folder with an index, and as a GGUF file, in a new process each."""
    plain, indexed, file = folder / "plain", folder / "indexed", folder / "model.gguf"
    shutil.copytree(_SOURCE, plain)
    template = json.loads((plain / "tokenizer_config.json").read_text()).pop(
        "chat_template", "{{ messages[0].content }}"
    )
    (plain / "chat_template.jinja").write_text(template)
    shutil.copytree(plain, indexed)
    _in_child(lambda: _split_weights(indexed))
    _in_child(lambda: convert(Conversion(str(plain), file, None, False, lambda _: None, lambda *_: None, "gpt-2")))
    return [plain, indexed, file]


def _split_weights(folder: Path) -> str:
    tensors = load_file(folder / _WEIGHTS)
    (folder / _WEIGHTS).unlink()
    names, shards = sorted(tensors), dict[str, str]()
    for index, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-0000{index}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard, {"format": "pt"})
        shards |= dict.fromkeys(part, shard)
    index_file = {"metadata": {"total_size": 0}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return ""


def damage(model: Path, random: Random) -> str:
    """Damage one file of a model; a sentence about it."""
    files = [model] if model.is_file() else sorted(model.glob("*.*s*"))
    files = [file for file in files if file.suffix in (".json", ".jinja", ".safetensors", ".gguf")]
    file = random.choice(files)
    content = file.read_bytes()
    if file.suffix == ".json" and random.random() < 0.5:
        return _change_value(file, random)
    start = _changed_bytes(file, content)
    if random.random() < 0.5:
        length = random.choice((0, 1, 7, 8, start - 1, start, len(content) - 1, random.randrange(start)))
        file.write_bytes(content[:length])
        return f"{file.name} cut to {length} bytes"
    changed, places = bytearray(content), sorted(random.sample(range(start), random.choice((1, 1, 2, 8))))
    for place in places:
        changed[place] = random.randrange(256)
    file.write_bytes(changed)
    return f"{file.name} changed at {places}"


def _changed_bytes(file: Path, content: bytes) -> int:
    """The length of the part that is changed: of weights the header."""
    if file.suffix == ".safetensors":
        return 8 + int.from_bytes(content[:8], "little")
    return min(len(content), _GGUF_START) if file.suffix == ".gguf" else len(content)


def _change_value(file: Path, random: Random) -> str:
    """Replace or remove a value of a JSON file."""
    content = json.loads(file.read_text())
    parent, path = content, list[str]()
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        key = random.choice(keys)
        path.append(str(key))
        if not (isinstance(parent[key], dict | list) and parent[key]) or random.random() < 0.3:
            break
        parent = parent[key]
    value = random.choice(_VALUES)
    parent[key] = value
    if random.random() < 0.15:
        del parent[key]
        value = "nothing"
    file.write_text(json.dumps(content))
    return f"{file.name}: {'.'.join(path)} is {value!r}"


def load_damaged(models: list[Path], seed: int) -> Outcome:
    """Load a model with a damaged file, in a process of its own."""
    random = Random(seed)
    model = random.choice(models)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, model.name)
        shutil.copy(model, copy) if model.is_file() else shutil.copytree(model, copy)
        description = f"seed {seed}: {model.name}, {damage(copy, random)}"
        answer, seconds, status = _in_child(lambda: _load(copy))
    if not answer:
        return Outcome(description, "defect", f"the process ended with {status}", seconds)
    end, _, message = answer.partition(" ")
    if seconds > _MAX_SECONDS:
        end, message = "defect", f"{seconds:.0f} s: {end} {message}"
    return Outcome(description, end, message, seconds)


def _load(model: Path) -> str:
    """ "loads", "refused" or "defect", and the message of the error."""
    try:
        load(EngineConfig(model=str(model), device="cpu", threads=1), lambda _: None)
    except ModelError as error:
        is_clear = str(error).strip().count("\n") == 0 and str(model) in str(error)
        return f"{'refused' if is_clear else 'defect'} {error}"
    except Exception as error:
        return f"defect {type(error).__name__}: {error}"
    return "loads "


def _in_child(work: Callable[[], Any]) -> tuple[str, float, int]:
    """The text that `work` returns in a fork of this process, its processor time and its wait status."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        logging.disable(logging.CRITICAL)
        resource.setrlimit(resource.RLIMIT_CPU, (6 * _MAX_SECONDS, 7 * _MAX_SECONDS))
        try:
            os.write(writer, str(work()).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    _, status, usage = os.wait4(child, 0)
    return answer, usage.ru_utime + usage.ru_stime, status


def main() -> int:
    """Print the defects, and a summary; 1 if there are defects."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.folders", description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    arguments = parser.parse_args()
    counts, slowest, began = Counter[str](), 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(Path(folder))
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            outcome = load_damaged(models, seed)
            counts[outcome.end] += 1
            slowest = max(slowest, outcome.seconds)
            if outcome.end == "defect":
                print(f"{outcome.damage}\n  {outcome.message[:500]}", flush=True)
    print(
        f"{dict(counts)}; the slowest took {slowest:.1f} s of processor time; {time.monotonic() - began:.0f} s in all"
    )
    return int(counts["defect"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
