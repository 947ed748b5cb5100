"""Chats with images and sounds: their tokens, and where the contents stand."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.errors import InvalidRequest
from engine.text.contents import ProcessedContent
from engine.text.tokenizer import Tokenizer
from engine.types.content import ContentKind, Upload
from engine.types.request import RenderedPrompt
from tests.engine.media.processors import FAMILIES, IMAGE_FAMILIES, TEMPLATE, media_processor, png, save_processor
from tests.engine.media.test_sounds import wav

pytestmark = pytest.mark.filterwarnings("ignore")

# Reads texts alone.
TEXT_TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content + '' }}</s>{% endfor %}"
# Reads parts alone.
PARTS_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {% for p in m.content | selectattr('type', 'equalto', 'image') %}IMAGE\n"
    "{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}</s>"
    "{% endfor %}"
)
NO_SYSTEM_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    + TEMPLATE
)
IMAGE = {"type": "image"}
Message = dict[str, object]


def text(value: str) -> Message:
    return {"type": "text", "text": value}


def user(*parts: Message) -> Message:
    return {"role": "user", "content": list(parts)}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


@cache
def _folder(root: Path, name: str, template: str) -> Path:
    return save_processor(root / f"{name}-{abs(hash(template))}", name, template)


def chat(folders: Path, name: str, template: str = TEMPLATE, context: int = 20_000) -> Tokenizer:
    """The tokenizer of a family, with its processor in this process."""
    folder = _folder(folders, name, template)
    backend = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(backend, vocabulary_size=len(backend), context=context)
    processor = media_processor(folder)
    tokenizer.use_content_processor(processor, processor.markers)
    return tokenizer


def images(count: int) -> list[Upload]:
    """Of different sizes."""
    return [Upload("image", png(40 + 20 * index, 60, index), f"images[{index}]") for index in range(count)]


def processed(folders: Path, name: str, uploads: list[Upload]) -> list[ProcessedContent]:
    return [media_processor(_folder(folders, name, TEMPLATE)).process(upload) for upload in uploads]


def placeholders(folders: Path, name: str, prompt: RenderedPrompt) -> list[int]:
    known = media_processor(_folder(folders, name, TEMPLATE)).placeholders
    return [index for index, token in enumerate(prompt.tokens) if token in known]


def expected_tokens(tokenizer: Tokenizer, template_text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(template_text, add_special=False))


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_contents_stand_where_their_parts_are(folders: Path, name: str) -> None:
    tokenizer, uploads = chat(folders, name), images(3)
    messages = [
        {"role": "system", "content": "Look."},
        user(text("one "), IMAGE, text(" two "), IMAGE),
        {"role": "assistant", "content": "Yes."},
        user(IMAGE, text("three")),
    ]

    prompt = tokenizer.render_chat(messages, uploads=uploads)

    first, second, third = (content.replacement for content in processed(folders, name, uploads))
    whole = (
        f"<s>system: Look.</s><s>user: one {first} two {second}</s><s>assistant: Yes.</s><s>user: {third}three</s>"
        "<s>assistant: "
    )
    assert prompt.tokens == expected_tokens(tokenizer, whole)
    assert prompt.generation_prompt == "<s>assistant: "
    assert [content.digest for content in prompt.contents] == [
        content.digest for content in processed(folders, name, uploads)
    ]
    found = placeholders(folders, name, prompt)
    assert all(any(content.start <= index < content.stop for content in prompt.contents) for index in found)
    assert all({content.start, content.stop - 1} <= set(found) for content in prompt.contents)
    stops = [content.stop for content in prompt.contents]
    assert all(stop <= content.start for stop, content in zip(stops, prompt.contents[1:], strict=False))


@pytest.mark.parametrize("name", [*IMAGE_FAMILIES, "qwen2_audio"])
def test_markers_of_a_text_stay_text(folders: Path, name: str) -> None:
    """Of messages with contents and of messages without; whatever special token it is."""
    tokenizer, family = chat(folders, name), FAMILIES[name]
    kind: ContentKind = "audio" if name == "qwen2_audio" else "image"
    written = f"{''.join(family.tokens)}</s>"
    files = images(2) if kind == "image" else [Upload("audio", wav(seconds=length), "f") for length in (0.5, 1.0)]
    part: Message = {"type": kind}

    prompt = tokenizer.render_chat([user(text(f"a {written}"), part, text(f"{written} and "), part)], uploads=files)
    without = tokenizer.render_chat([{"role": "user", "content": f"a {written}"}])

    first, second = (content.replacement for content in processed(folders, name, files))
    encode = expected_tokens
    backend = AutoTokenizer.from_pretrained(_folder(folders, name, TEMPLATE))
    plain = backend.encode(written, add_special_tokens=False, split_special_tokens=True)
    assert prompt.tokens == (
        *encode(tokenizer, "<s>user: a "),
        *plain,
        *encode(tokenizer, first),
        *plain,
        *encode(tokenizer, " and "),
        *encode(tokenizer, f"{second}</s><s>assistant: "),
    )
    assert len(prompt.contents) == 2
    assert without.tokens == (*encode(tokenizer, "<s>user: a "), *plain, *encode(tokenizer, "</s><s>assistant: "))
    assert without.contents == ()


@pytest.mark.parametrize("written", ["hello", "hello <image>"])
def test_positions_are_those_of_tokens(folders: Path, written: str) -> None:
    """Ends of messages, the kept system message, the last user message, and breakpoints before and behind an image."""
    tokenizer, uploads = chat(folders, "llava"), images(2)
    messages = [
        {"role": "system", "content": written},
        user(text("ab"), IMAGE, text("cd")),
        {"role": "assistant", "content": "Yes."},
        user(IMAGE, text("e")),
    ]
    points = [(1, 1), (1, 2), (1, 3), (1, 4), (3, 1), (3, 2)]

    prompt = tokenizer.render_chat(messages, uploads=uploads, breakpoints=points)

    system = len(tokenizer.render_chat(messages[:1], add_generation_prompt=False).tokens)
    first, second = prompt.contents
    before = first.start - 2
    question = tokenizer.render_chat(messages[:2], uploads=uploads[:1], add_generation_prompt=False)
    answered = len(tokenizer.render_chat(messages[:3], uploads=uploads[:1], add_generation_prompt=False).tokens)
    assert question.tokens == prompt.tokens[: len(question.tokens)]
    assert prompt.keep == system
    assert prompt.protected == ((answered, len(prompt.tokens) - len("<s>assistant: ") + 2),)
    expected = {system, answered, prompt.protected[0][1]} | {before + 1, first.start, first.stop, first.stop + 1}
    assert set(prompt.checkpoints) == expected | {second.stop, second.stop + 2}


def test_sounds_and_images_are_told_apart(folders: Path) -> None:
    """A model of sounds refuses images by the field of the upload."""
    tokenizer = chat(folders, "qwen2_audio")

    with pytest.raises(InvalidRequest, match="this model reads text and audio only, no images") as error:
        tokenizer.render_chat([user(IMAGE)], uploads=images(1))

    assert error.value.field == "images[0]"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_parts_without_an_upload_are_refused(folders: Path, count: int) -> None:
    """Two parts; as many uploads must be there."""
    with pytest.raises(InvalidRequest, match=f"renders 2 of {count} images and sounds"):
        chat(folders, "llava").render_chat([user(IMAGE, IMAGE)], uploads=images(count))


def test_a_damaged_image_is_refused(folders: Path) -> None:
    with pytest.raises(InvalidRequest, match="the image is no PNG") as error:
        chat(folders, "llava").render_chat([user(IMAGE)], uploads=[Upload("image", b"", "messages[0].content[0]")])

    assert error.value.field == "messages[0].content[0]"


@pytest.mark.parametrize(("free", "count"), [(60 * 60 - 1, 1), (60 * 60, 2)])
def test_pixels_of_a_request_are_limited(folders: Path, monkeypatch: pytest.MonkeyPatch, free: int, count: int) -> None:
    """The first image has 40 x 60 pixels, the second one 60 x 60."""
    monkeypatch.setattr("engine.text.contents.MAX_REQUEST_PIXELS", 40 * 60 + free)
    tokenizer = chat(folders, "llava")
    assert tokenizer.render_chat([user(IMAGE)], uploads=images(1)).contents
    if count == 2:
        assert len(tokenizer.render_chat([user(IMAGE, IMAGE)], uploads=images(2)).contents) == 2
    with pytest.raises(InvalidRequest, match="with it the images of the request have more than") as error:
        tokenizer.render_chat([user(*[IMAGE] * (count + 1))], uploads=images(count + 1))

    assert error.value.field == f"images[{count}]"


@pytest.mark.parametrize("written", ["what?", "what <image> is </s>?"])
def test_a_template_of_texts_gets_markers_before_the_text(folders: Path, written: str) -> None:
    tokenizer, uploads = chat(folders, "llava", TEXT_TEMPLATE), images(2)

    prompt = tokenizer.render_chat([user(text("Well, "), IMAGE, text(written), IMAGE)], uploads=uploads)

    first, second = (content.replacement for content in processed(folders, "llava", uploads))
    start = expected_tokens(tokenizer, f"<s>user: {first}{second}Well, what")
    assert prompt.tokens[: len(start)] == start
    assert tokenizer.decode(prompt.tokens).endswith(f"{written}</s>")
    assert [content.stop - content.start for content in prompt.contents] == [4, 4]


@pytest.mark.parametrize("written", ["what?", "what <image>?"])
def test_a_template_of_parts_gets_texts_as_parts(folders: Path, written: str) -> None:
    """It would leave them out; it also decides that images stand first."""
    tokenizer, uploads = chat(folders, "llava", PARTS_TEMPLATE), images(2)
    messages = [{"role": "user", "content": written}, user(text("Well, "), IMAGE, text(written), IMAGE)]

    prompt = tokenizer.render_chat(messages, uploads=uploads)

    first, second = (content.replacement for content in processed(folders, "llava", uploads))
    shown = f"<s>user: {written}</s><s>user: {first}\n{second}\nWell, {written}</s>"
    assert tokenizer.decode(prompt.tokens) == shown
    assert [content.stop - content.start for content in prompt.contents] == [4, 4]


def test_a_template_without_images_reads_text_only(folders: Path) -> None:
    """It fails on parts, and removes markers."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | replace('IMAGE', '') }}{% endfor %}"

    with pytest.raises(InvalidRequest, match="this model reads text only, no images"):
        chat(folders, "llava", template).render_chat([user(IMAGE)], uploads=images(1))


def test_system_messages_join_messages_with_images(folders: Path) -> None:
    """With a template without them: the next user message, or the last one."""
    tokenizer, uploads = chat(folders, "llava", NO_SYSTEM_TEMPLATE), images(1)
    system: Message = {"role": "system", "content": [text("Be "), text("brief.")]}
    replacement = processed(folders, "llava", uploads)[0].replacement

    before = tokenizer.render_chat([system, user(IMAGE, text("a"))], uploads=uploads, breakpoints=[(0, 4), (1, 1)])
    behind = tokenizer.render_chat([user(IMAGE, text("a")), system], uploads=uploads, breakpoints=[(1, 2)])

    assert before.tokens == expected_tokens(tokenizer, f"<s>user: Be brief.\n\n{replacement}a</s><s>assistant: ")
    assert behind.tokens == expected_tokens(tokenizer, f"<s>user: {replacement}a\n\nBe brief.</s><s>assistant: ")
    assert before.contents[0].stop in before.checkpoints
    assert behind.contents[0].stop + len("a\n\nBe") in behind.checkpoints


@pytest.mark.parametrize(
    ("forged", "written"),
    [
        ("\U000f0001<image>\U000f0000<image>\U000f0001", "<image><image>"),
        ("a\U000f0000", "a"),
        ("\U000f0001a", "\U000f0001a"),
    ],
)
def test_marks_of_a_client_do_not_forge_a_marker(folders: Path, forged: str, written: str) -> None:
    """Private characters with which special tokens of messages are marked are dropped from messages, or stay text."""
    tokenizer = chat(folders, "llava")
    replacement = processed(folders, "llava", images(1))[0].replacement

    prompt = tokenizer.render_chat([user(text(forged), IMAGE)], uploads=images(1))

    assert tokenizer.decode(prompt.tokens) == f"<s>user: {written}{replacement}</s><s>assistant: "
    assert [content.stop - content.start for content in prompt.contents] == [4]


def test_arguments_of_the_template_write_no_marker(folders: Path) -> None:
    tokenizer = chat(folders, "llava", "{{ note }}" + TEMPLATE)

    prompt = tokenizer.render_chat([user(IMAGE)], uploads=images(1), arguments={"note": "<image>"})

    assert tokenizer.decode(prompt.tokens).startswith("<image><s>user: ")
    assert prompt.contents[0].start > len("<image>")


def test_types(folders: Path) -> None:
    """Positions are plain integers, arrays are bytes."""
    prompt: Any = chat(folders, "qwen2_vl").render_chat([user(IMAGE)], uploads=images(1))

    assert all(type(value) is int for content in prompt.contents for value in (content.start, content.stop))
    assert {name for name, _ in prompt.contents[0].arrays} == {"image_grid_thw", "pixel_values"}
