"""A language model and the vision tower beside it (mmproj) as one model of transformers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import Keys
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig

from engine.gguf.container import GgufError, GgufModel, read_model
from engine.gguf.projectors.projector import ProcessorFiles, Projector, TowerFile
from engine.gguf.projectors.table import projector_of
from engine.gguf.sources import ParameterSource
from engine.gguf.tower_files import tower_files
from engine.gguf.weights import parameter_sources, skeleton_shapes

_ENDS = ("eos_token_id", "bos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower that fits a language model."""

    content: GgufModel
    file: TowerFile
    projector: Projector

    def config(self, text_file: GgufModel, text: Any) -> Any:
        """The configuration of the whole model. Raises GgufError.

        text  configuration of the language model
        """
        _, tokens = text_file.metadata.find_strings(Keys.Tokenizer.LIST, self.projector.tokens.values())
        missing = next((token for token in self.projector.tokens.values() if token not in tokens), None)
        if missing is not None:
            raise GgufError(f"the vocabulary of the language model lacks the token {missing}")
        names = {attribute: tokens[token] for attribute, token in self.projector.tokens.items()}
        fields = self.projector.settings(self.file, text) | names
        ends = {name: getattr(text, name, None) for name in _ENDS}
        try:
            config = AutoConfig.for_model(
                self.projector.model,
                text_config=self.projector.text(text.to_dict()),
                tie_word_embeddings=text.tie_word_embeddings,
                **ends,
                **fields,
            )
        except (ArithmeticError, ValueError, TypeError, StrictDataclassError) as error:
            reason = " ".join(str(error).split())
            raise GgufError(f"its metadata has values that do not fit together: {reason}") from error
        config.dtype = config.text_config.dtype = text.dtype
        return config

    def processor(self) -> ProcessorFiles:
        """The settings of the processor of images. Raises GgufError."""
        return self.projector.processor(self.file)

    def sources(self, text_file: GgufModel, skeleton: nn.Module, config: Any) -> dict[str, ParameterSource]:
        """The source of each parameter of the whole model. Raises GgufError."""
        prefix = f"model.{self.projector.text_prefix}"
        shapes = skeleton_shapes(skeleton)
        names = {name: name.replace(prefix, "model.", 1) for name in shapes if name.startswith((prefix, "lm_head."))}
        tower = {name: self._source(name, shape) for name, shape in shapes.items() if name not in names}
        used = {tensor.name for source in tower.values() for tensor in source.tensors}
        present = {tensor.name for name, tensor in self.file.tensors.items() if not self._is_ignored(name)}
        if unused := sorted(present - used):
            raise GgufError(f"{self.file.name}: it has tensors that its projector lacks, such as {unused[0]}")
        text = parameter_sources(text_file, {names[name]: shapes[name] for name in names}, config.get_text_config())
        return {name: text[names[name]] if name in names else tower[name] for name in shapes}

    def _source(self, name: str, shape: tuple[int, ...]) -> ParameterSource:
        for row in self.projector.tensors:
            source = row.source(
                name.removeprefix("model."), shape, self.file.tensors, self.file.size("attention.head_count")
            )
            if source is not None:
                return source
        raise GgufError(f"{self.file.name}: no tensor is known for {name}")

    def _is_ignored(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.projector.ignored)


def find_tower(path: Path, text: Any) -> Tower | None:
    """The first vision tower beside the file of a language model that fits it; None: there is no tower.

    Raises GgufError with the reason of the last one if none fits, and OSError.
    """
    fault: GgufError | None = None
    for candidate in tower_files(path):
        try:
            return _fitting(read_model(candidate), text)
        except GgufError as error:
            fault = error if candidate.name in str(error) else GgufError(f"{candidate.name}: {error}")
    if fault is not None:
        raise fault
    return None


def _fitting(content: GgufModel, text: Any) -> Tower:
    if content.metadata.text("general.architecture") != "clip":
        raise GgufError("it is no encoder of images (mmproj)")
    file = TowerFile(content)
    projector = projector_of(file, text)
    width = projector.width(file)
    if width != text.hidden_size:
        raise GgufError(f"it is for a language model of width {width}, not {text.hidden_size}")
    return Tower(content, file, projector)
