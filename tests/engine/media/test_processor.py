"""Contents that are processed alone give the arrays and placeholders of the processor's own call on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import InvalidContent
from engine.media.decode import sound_from
from engine.media.processor import MediaProcessor
from engine.media.read_processor import ProcessorUnsupported, read_processor
from engine.text.contents import ProcessedContent
from engine.types.array import Array
from engine.types.content import ContentKind, ImageDetail, Upload
from tests.engine.media.processors import FAMILIES, IMAGE_FAMILIES, png, random_image, save_processor
from tests.engine.media.test_sounds import wav

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = [(60, 40), (40, 70)]
SCALES_TO_NOTHING = {"pixtral"}


def processor_of(folder: Path, name: str) -> Any:
    return read_processor(save_processor(folder, name))


def image(processor: MediaProcessor, width: int, height: int, detail: ImageDetail = "auto") -> ProcessedContent:
    return processor.process(Upload("image", png(width, height), "messages[0].content[0]", detail))


def numpy_of(array: Array) -> np.ndarray[Any, Any]:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def is_part(part: np.ndarray[Any, Any], whole: np.ndarray[Any, Any]) -> bool:
    """Whether a leading block of an array, in any of its rows, equals the other one."""
    sizes = tuple(slice(size) for size in part.shape[1:])
    starts = range(len(whole) - len(part) + 1)
    return any(np.array_equal(whole[(slice(start, start + len(part)), *sizes)], part) for start in starts)


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_images_alone_equal_the_joint_call(tmp_path: Path, name: str) -> None:
    own = processor_of(tmp_path, name)
    processor, marker = MediaProcessor(own), FAMILIES[name].marker
    images = [random_image(*size) for size in SIZES]
    is_nested = name in ("idefics3", "smolvlm")
    text = f"<s>one {marker} and {marker} two"

    joint = own(
        text=[text],
        images=[images] if is_nested else images,
        return_tensors="np",
        text_kwargs={"add_special_tokens": False},
    )
    alone = [image(processor, *size) for size in SIZES]

    first, second, third = text.split(marker)
    expanded = first + alone[0].replacement + second + alone[1].replacement + third
    assert own.tokenizer(expanded, add_special_tokens=False)["input_ids"] == joint["input_ids"][0].tolist()
    expected = set(joint) - {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "num_patches"}
    for content in alone:
        assert {key for key, _ in content.arrays} == expected
        for key, array in content.arrays:
            part, whole = numpy_of(array), np.asarray(joint[key])
            assert is_part(*((part[0], whole[0]) if is_nested else (part, whole))), key


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (700, 900)])
def test_images_of_any_size(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    """Each is processed, but for strips that a processor scales to no height: those are refused with their field."""
    own = processor_of(tmp_path, name)
    processor = MediaProcessor(own)
    if name in SCALES_TO_NOTHING and max(size) == 200:
        with pytest.raises(InvalidContent, match="refused by the processor") as error:
            image(processor, *size)
        assert (error.value.field, error.value.problem) == ("messages[0].content[0]", "format")
        return

    content = image(processor, *size)

    tokens = own.tokenizer(content.replacement, add_special_tokens=False)["input_ids"]
    assert processor.placeholders.intersection(tokens)
    assert all(np.isfinite(numpy_of(array)).all() for _, array in content.arrays)


def test_a_sound_alone_equals_the_joint_call(tmp_path: Path) -> None:
    own = processor_of(tmp_path, "qwen2_audio")
    processor, marker = MediaProcessor(own), "<|AUDIO|>"
    files = [wav(), wav(seconds=0.7)]

    alone = [processor.process(Upload("audio", data, "messages[0].content[0]")) for data in files]
    samples = [sound_from(data, 16_000, 2) for data in files]
    joint = own(text=[f"{marker} and {marker}"], audio=samples, sampling_rate=16_000, return_tensors="np")

    assert dict(processor.markers) == {"audio": marker}
    expected = joint["input_ids"][0].tolist()
    assert own.tokenizer(" and ".join(content.replacement for content in alone))["input_ids"] == expected
    for index, content in enumerate(alone):
        assert {key for key, _ in content.arrays} == {"input_features", "feature_attention_mask"}
        for key, array in content.arrays:
            assert np.array_equal(numpy_of(array)[0], joint[key][index])


def test_a_sound_beyond_the_window_is_refused(tmp_path: Path) -> None:
    """The feature extractor would cut it."""
    processor = MediaProcessor(processor_of(tmp_path, "qwen2_audio"))

    with pytest.raises(InvalidContent, match="the sound is longer than 2 s") as error:
        processor.process(Upload("audio", wav(seconds=2.5), "messages[0].content[1]"))

    assert (error.value.field, error.value.problem) == ("messages[0].content[1]", "too_large")


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "internvl"])
def test_low_detail_has_one_tile(tmp_path: Path, name: str) -> None:
    processor = MediaProcessor(processor_of(tmp_path, name))

    low, high = (image(processor, 60, 40, detail) for detail in ("low", "high"))

    assert len(low.replacement) < len(high.replacement)
    assert high == image(processor, 60, 40)


def test_low_detail_has_a_smaller_image(tmp_path: Path) -> None:
    """Of a processor whose placeholders follow from the size of the image."""
    save_processor(tmp_path, "qwen2_vl", part_settings={"min_pixels": 28 * 28, "max_pixels": 2000 * 2000})
    processor = MediaProcessor(read_processor(tmp_path))

    low, high = (image(processor, 1400, 700, detail) for detail in ("low", "high"))

    assert (low.replacement.count("<|image_pad|>"), high.replacement.count("<|image_pad|>")) == (18 * 9, 50 * 25)


def test_the_digest_is_of_all_that_decides_the_rows(tmp_path: Path) -> None:
    """Equal pixels in another format have the same one; other pixels or settings have not."""
    processor = MediaProcessor(processor_of(tmp_path / "a", "qwen2_vl"))
    save_processor(
        tmp_path / "b", "qwen2_vl", part_settings={**FAMILIES["qwen2_vl"].part_settings, "do_rescale": False}
    )
    other_settings = MediaProcessor(read_processor(tmp_path / "b"))
    digests = [
        image(processor, 60, 40).digest,
        image(processor, 61, 40).digest,
        processor.process(Upload("image", png(60, 40, seed=1), "")).digest,
        image(other_settings, 60, 40).digest,
    ]

    assert len(set(digests)) == 4
    assert image(processor, 60, 40).digest == digests[0]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "it has no processor"),
        ({"processor_config.json": '{"processor_class": "NoProcessor"}'}, "has no processor NoProcessor"),
        ({"processor_config.json": "[]"}, "is no JSON object"),
        ({"config.json": "{"}, "is no JSON object"),
    ],
)
def test_a_folder_without_a_processor_is_refused(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    with pytest.raises(ProcessorUnsupported, match=reason):
        read_processor(tmp_path)


def test_an_image_processor_of_torchvision_alone_is_refused(tmp_path: Path) -> None:
    save_processor(tmp_path, "llava")
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Lfm2VlImageProcessor"}')

    with pytest.raises(ProcessorUnsupported, match="needs torchvision"):
        read_processor(tmp_path)


def test_a_kind_without_a_token_is_refused(tmp_path: Path) -> None:
    """Its marker in a text would be no placeholder."""
    own = processor_of(tmp_path, "llava")
    own.image_token = "<picture>"

    processor = MediaProcessor(own)

    assert dict(processor.markers) == {}
    assert "no placeholders" in processor.refused["image"]


@pytest.mark.parametrize(("kind", "noun"), [("image", "image"), ("audio", "sound")])
def test_bytes_of_no_format_are_refused(tmp_path: Path, kind: ContentKind, noun: str) -> None:
    processor = MediaProcessor(processor_of(tmp_path, "qwen2_audio" if kind == "audio" else "llava"))

    with pytest.raises(InvalidContent, match=f"the {noun} is no ") as error:
        processor.process(Upload(kind, b"nothing", "field"))

    assert (error.value.field, error.value.problem) == ("field", "format")
