"""Builds the processor of a checkpoint from its files, with the image processor of Pillow and numpy.

transformers exports a dummy in place of a processor that also reads videos, as video processors need torchvision. Here
the processor is built from its module, with a stand-in for its video processor: no request has a video.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.auto_mappings import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.configuration_auto import model_type_to_module_name

_CLASS_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class ProcessorUnsupported(Exception):
    """The checkpoint has no processor, or it cannot be built; the text is the reason."""


class NoVideoProcessor:
    """Stands in for a video processor: its attributes are read, but it is never called."""

    merge_size, temporal_patch_size = 2, 2
    model_input_names: tuple[str, ...] = ()


def read_processor(folder: Path) -> Any:
    """The processor of a checkpoint. Raises ProcessorUnsupported, and the errors of transformers."""
    processor_class = _processor_class(folder)
    settings, _ = processor_class.get_processor_dict(folder, local_files_only=True)
    if "audio_tokenizer" in settings:
        raise ProcessorUnsupported("its processor has a model that encodes audio")
    parts = [_part(folder, name) for name in processor_class.get_attributes()]
    return build_processor(processor_class, parts, settings)


def build_processor(processor_class: Any, parts: list[Any], settings: dict[str, Any]) -> Any:
    """A processor of its parts, whose classes are not checked."""
    unchecked = type(
        processor_class.__name__,
        (processor_class,),
        {
            "__module__": processor_class.__module__,
            # Its text is logged, which fails for a part that is not written as JSON.
            "__repr__": object.__repr__,
            "check_argument_for_proper_class": lambda self, name, argument: type(argument),
        },
    )
    return unchecked.from_args_and_dict(parts, settings)  # type: ignore[attr-defined]


def processor_class_of(module_name: str, class_name: str) -> Any:
    """A class of `transformers.models`, from the module that defines it."""
    package = f"transformers.models.{module_name}"
    try:
        module = import_module(f"{package}.processing_{module_name}")
    except ImportError:
        # It takes a function from the variant of its image processor for torchvision: that for Pillow has the same.
        pillow = f"{package}.image_processing_pil_{module_name}"
        if find_spec(pillow) is None:
            raise
        sys.modules[f"{package}.image_processing_{module_name}"] = import_module(pillow)
        module = import_module(f"{package}.processing_{module_name}")
    return getattr(module, class_name)


def _processor_class(folder: Path) -> Any:
    model_type = _read(folder / "config.json").get("model_type", "")
    names = [_read(folder / file).get("processor_class") for file in _CLASS_FILES]
    name = next(filter(None, names), None) or PROCESSOR_MAPPING_NAMES.get(model_type)
    # Several types of models may have the same class.
    types = sorted((type for type, value in PROCESSOR_MAPPING_NAMES.items() if value == name), key=model_type.__ne__)
    for candidate in types:
        module_name = model_type_to_module_name(candidate)
        if find_spec(f"transformers.models.{module_name}.processing_{module_name}") is not None:
            return processor_class_of(module_name, str(name))
    raise ProcessorUnsupported("it has no processor" if name is None else f"transformers has no processor {name}")


def _part(folder: Path, name: str) -> Any:
    match name:
        case "tokenizer":
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        case "image_processor":
            return _image_processor(folder)
        case "feature_extractor" | "audio_processor":
            return AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        case "video_processor":
            return NoVideoProcessor()
    raise ProcessorUnsupported(f"its processor has a part {name}, which is not supported")


def _image_processor(folder: Path) -> Any:
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False, local_files_only=True)
    except (ImportError, ValueError) as error:
        if "torchvision" not in str(error):
            raise
        reason = "its image processor needs torchvision, which is missing or does not match torch"
        raise ProcessorUnsupported(reason) from error


def _read(file: Path) -> dict[str, Any]:
    """The JSON object of a file; empty without the file. Raises ProcessorUnsupported."""
    if not file.exists():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise ProcessorUnsupported(f"{file.name} is no JSON object")
    return settings
