"""The table of docs/models.md: fifty published checkpoints with tiny widths, loaded by the loader of the product.

`python -W ignore -m tests.engine.kit.checkpoints [NAME ...]` prints the table (minutes), or the rows of some, and the
totals.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engine.convert.convert import convert
from engine.draft.mtp_head import has_mtp, load_mtp
from engine.errors import ModelInconvertible, ModelUnsupported
from engine.gguf.architectures.settings import Inexpressible
from engine.gguf.architectures.table import writable
from engine.load.load import LoadedModel
from engine.load.read.skeleton import model_class
from engine.run.sequential import SequentialRunner
from tests.engine.convert.checkpoints import SIZE, byte_level, conversion
from tests.engine.draft.mtp_models import mtp_weights
from tests.engine.kit.checkpoint_list import PUBLISHED, Published
from tests.engine.kit.families import LENGTH, Family, plant
from tests.engine.kit.models import load_model
from tests.engine.kit.tiny import FAMILIES, VOCABULARY, settings

# Of the checkpoints.
STARTING_GOAL, NATIVE_GOAL = 45, 35
HEADS = ("checkpoint", "type", "starts", "native", "GGUF", "MTP", "shift")
# Settings of towers, by the names that their configurations have.
_TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mm_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "conf_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 4),
    "head_dim": 16,
    "image_size": 28,
    "deepstack_visual_indexes": [0],
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a checkpoint does; a reason in place of a "yes"."""

    published: Published
    starts: str
    native: str = "-"
    gguf: str = "-"
    mtp: str = "-"
    shift: str = "-"

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        return (
            self.published.name,
            self.published.model_type,
            self.starts,
            self.native,
            self.gguf,
            self.mtp,
            self.shift,
        )


def outcomes(asked: Iterable[Published]) -> Iterator[Outcome]:
    """The outcomes of checkpoints; those that differ in widths only are observed once."""
    known: dict[str, Outcome] = {}
    for published in asked:
        shape = published.shape
        known[shape] = known[shape] if shape in known else observe(published)
        yield replace(known[shape], published=published)


def observe(published: Published) -> Outcome:
    """Write the checkpoint as published, load it and convert it."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = save(published, root / "published", text_only=False)
        try:
            loaded = load_model(folder, "float32")
        except ModelUnsupported as error:
            return Outcome(published, f"no: {_reason(error.reason)}", gguf=_gguf(published, folder, root))
        native = loaded.info.not_native_reason
        return Outcome(
            published,
            "sequentially" if isinstance(loaded.runner, SequentialRunner) else "yes",
            "yes" if native is None else f"no: {native}",
            _gguf(published, folder, root),
            _mtp(published, loaded),
            _shift(loaded),
        )


def save(published: Published, folder: Path, *, text_only: bool) -> Path:
    """Write the checkpoint with tiny widths and a tokenizer.

    text_only  without the other parts, as GGUF files have it
    """
    text = text_settings(published)
    if text_only or published.text_type is None:
        config = AutoConfig.for_model(published.text_type or published.model_type, **text)
        kind: Any = AutoModelForCausalLM
    else:
        config = _whole_config(published, text)
        kind = AutoModelForImageTextToText
    torch.manual_seed(0)
    try:
        model = kind.from_config(config, dtype=torch.float32).eval()
    except ImportError:
        # A tower needs a package that is not a dependency: the files lack its weights, which are not read.
        model = model_class(config).from_config(config, dtype=torch.float32).eval()
    plant(model)
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    if published.mtp is not None:
        _add_mtp_layer(folder / "model.safetensors", config.get_text_config(), apart=published.mtp == "apart")
    return folder


def text_settings(published: Published) -> dict[str, Any]:
    """The settings of the text configuration."""
    kind = published.text_type or published.model_type
    sizes = {"vocab_size": SIZE}
    # The text of a type that the kit lacks is the one of its predecessor.
    base = settings(kind) if kind in FAMILIES else settings(kind.partition("_")[0])
    if "vocab_size_per_layer_input" in base:
        sizes["vocab_size_per_layer_input"] = SIZE
    return base | sizes | published.mechanisms


def _whole_config(published: Published, text: dict[str, Any]) -> Any:
    """The configuration of all parts, the towers small."""
    default = AutoConfig.for_model(published.model_type)
    parts: dict[str, Any] = {"text_config": {**text, "model_type": published.text_type}}
    for name in set(default.sub_configs) - {"text_config"}:
        part = getattr(default, name, None)
        if part is not None:
            known = part.to_dict()
            small = {key: value for key, value in _TOWER.items() if known.get(key) is not None}
            parts[name] = {**small, "model_type": part.model_type}
    tokens = [key for key in default.to_dict() if re.search(r"(image|video|audio|vision).*token_(id|index)$", key)]
    ties = {"tie_word_embeddings": text["tie_word_embeddings"]} if "tie_word_embeddings" in text else {}
    numbers = {key: SIZE - 1 - number for number, key in enumerate(tokens)}
    return AutoConfig.for_model(published.model_type, **parts, **numbers, **ties)


def _add_mtp_layer(file: Path, text: Any, *, apart: bool) -> None:
    """Add the weights of an MTP layer under their published names."""
    weights = load_file(file)
    plain = {key.replace("model.language_model.", "model."): value for key, value in weights.items()}
    weights |= mtp_weights(plain, text.num_hidden_layers, apart=apart)
    save_file(weights, file, metadata={"format": "pt"})


def _gguf(published: Published, folder: Path, root: Path) -> str:
    """Whether files with the text are read, and the checkpoint is written as one."""
    target = root / "text.gguf"
    try:
        config = AutoConfig.for_model(published.text_type or published.model_type, **text_settings(published))
        writable(config)
        # The text of Qwen3-VL has no class of its own.
        has_text_class = published.text_type is not None and type(config) in AutoModelForCausalLM._model_mapping
        text = save(published, root / "text", text_only=True) if has_text_class else folder
        convert(conversion(text, target))
        load_model(target, "float32")
    except (ModelInconvertible, ModelUnsupported) as error:
        return f"no: {_reason(error.reason)}"
    except Inexpressible as error:
        return f"no: {_reason(str(error))}"
    if not has_text_class:
        return "read, written"
    try:
        convert(conversion(folder, root / "whole.gguf"))
    except ModelInconvertible as error:
        return f"read; not written: {_reason(error.reason)}"
    return "read, written"


def _mtp(published: Published, loaded: LoadedModel) -> str:
    """Whether the MTP layer drafts; "none": the checkpoint has no such layer."""
    if published.mtp is None:
        return "none"
    if not has_mtp(loaded):
        return "no: its layer is not found"
    try:
        load_mtp(loaded)
    except ModelUnsupported as error:
        return f"no: {_reason(error.reason)}"
    return "yes"


def _shift(loaded: LoadedModel) -> str:
    """Whether a context shift rotates keys, or their tokens are recomputed."""
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist())
    family = Family("", loaded.model, loaded.runner, loaded.recurrent, prompt)
    cache = family.cache()
    family.feed(cache, (0, prompt))
    return "rotated" if cache.shift(0, 4, 8) == LENGTH - 8 else "recomputed"


def _reason(text: str) -> str:
    """The reason in a cell of a table, without what would help."""
    text = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", re.sub(r"/\S+/", "", text))
    return re.split(r"; |\. ", text)[0].removesuffix(".").replace("|", "/")


def table(rows: Iterable[Outcome]) -> Iterator[str]:
    """The lines of the table and the totals."""
    yield f"| {' | '.join(HEADS)} |"
    yield f"|{'---|' * len(HEADS)}"
    starting = native = count = 0
    for outcome in rows:
        count += 1
        starting += not outcome.starts.startswith("no")
        native += outcome.native == "yes"
        yield f"| {' | '.join(outcome.cells)} |"
    yield ""
    yield f"Of {count}, {starting} start (goal: {STARTING_GOAL}) and {native} run natively (goal: {NATIVE_GOAL})."


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    chosen = [published for published in PUBLISHED if published.name in sys.argv[1:]] or PUBLISHED
    for line in table(outcomes(chosen)):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
