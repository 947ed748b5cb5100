"""Rows and positions of contents are those that the whole model hands to its decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.media.capture import ContentsUnsupported
from engine.media.encoder import CapturingEncoder, ContentSample
from engine.media.visibility import Bidirectional, read_bidirectional, runs
from engine.step.content import leaves
from tests.engine.kit.contents import FAMILIES, Prompt, prompt_of, sample, tiny_model

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

# The experts of Llama 4 compute in float32 alone.
_DTYPES = {"llama4": torch.float32}


def _encoder(name: str) -> tuple[Any, CapturingEncoder, list[ContentSample]]:
    family = FAMILIES[name]
    model = tiny_model(family, _DTYPES.get(name, torch.float64))
    samples = [sample(family, model, seed) for seed in range(3)]
    return model, CapturingEncoder(model, samples[:1], budget_bytes=2**20), samples


def _decoder_calls(model: Any, prompt: Prompt, steps: int) -> list[dict[str, Any]]:
    """The arguments of the decoder in each step of `generate`."""
    calls: list[dict[str, Any]] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, __, named: calls.append(dict(named)), with_kwargs=True
    )
    with torch.inference_mode():
        model.generate(**prompt.inputs, do_sample=False, max_new_tokens=steps, eos_token_id=None, pad_token_id=0)
    hook.remove()
    return calls


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_rows_are_those_of_the_whole_model(name: str) -> None:
    model, encoder, (_, image, _) = _encoder(name)
    prompt = prompt_of(FAMILIES[name], model, 1, 7, 8, 9, image, 11, 12)
    content = prompt.contents[0]

    entry = encoder.encode(content, image.tokens)

    call = _decoder_calls(model, prompt, 1)[0]
    assert torch.equal(entry.rows, call["inputs_embeds"][0, content.start : content.stop])
    assert entry.bytes <= encoder.entry_bytes(content) <= 2 * entry.bytes
    for argument, tree in {**entry.token_arguments, **entry.feature_arguments}.items():
        for leaf, whole in zip(leaves(tree), leaves(call[argument]), strict=True):
            expected = whole[0, content.start : content.stop] if argument in entry.token_arguments else whole
            assert torch.equal(leaf, expected)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_positions_are_those_of_generate(name: str) -> None:
    model, encoder, (image, other, _) = _encoder(name)
    prompt = prompt_of(FAMILIES[name], model, 1, 7, 8, image, 9, other, 11, 12, 13)
    length = len(prompt.tokens)

    layout = encoder.layout(prompt.tokens, prompt.contents)

    first, *later = [call["position_ids"] for call in _decoder_calls(model, prompt, 3)]
    positions = torch.arange(length)[None] if layout.positions is None else layout.positions
    first = first[-3:, 0] if first.dim() == 3 else first
    assert torch.equal(positions[-3:].expand_as(first), first)
    for step, expected in enumerate(later):
        assert expected[-3:].unique().tolist() == [length + step + layout.offset]
    assert layout.bidirectional == _expected_ranges(encoder.bidirectional, prompt)


def _expected_ranges(bidirectional: Bidirectional, prompt: Prompt) -> tuple[tuple[int, int], ...]:
    if bidirectional.whole_prompt:
        return ((0, len(prompt.tokens)),)
    return tuple((content.start + 1, content.stop - 1) for content in prompt.contents) if bidirectional else ()


def test_text_alone_has_token_indices() -> None:
    _, encoder, _ = _encoder("qwen2_vl")

    layout = encoder.layout([1, 7, 8, 9], [])

    assert (layout.positions, layout.offset, layout.bidirectional) == (None, 0, ())


def test_another_image_has_other_rows_and_the_same_one_the_same() -> None:
    _, encoder, samples = _encoder("llava")
    first, other = (encoder.encode(image.content, image.tokens) for image in samples[:2])

    assert torch.equal(first.rows, encoder.encode(samples[0].content, samples[0].tokens).rows)
    assert not torch.equal(first.rows, other.rows)


@pytest.mark.parametrize(
    ("name", "layers"), [("gemma3", (True, True, True)), ("gemma4", (True, False, False)), ("llava", (False,) * 3)]
)
def test_layers_whose_placeholders_attend_to_later_ones(name: str, layers: tuple[bool, ...]) -> None:
    model, encoder, _ = _encoder(name)
    config = model.config.get_text_config()

    assert tuple(encoder.bidirectional.holds(config, layer) for layer in range(3)) == layers
    assert not encoder.bidirectional.whole_prompt


def test_prefix_lm_attends_to_the_whole_prompt() -> None:
    _, encoder, _ = _encoder("paligemma")

    assert encoder.bidirectional == Bidirectional(None, whole_prompt=True)


def test_encoder_leaves_a_forward_of_the_model_as_it_was() -> None:
    """Its hooks have no effect, and positions of a prompt are not kept."""
    family = FAMILIES["qwen2_vl"]
    model = tiny_model(family)
    image = sample(family, model, 1)
    prompt = prompt_of(family, model, 1, 7, image, 9)
    with torch.inference_mode():
        expected = model(**prompt.inputs).logits
        model.model.rope_deltas = None
        encoder = CapturingEncoder(model, [image], budget_bytes=2**20)
        encoder.encode(image.content, image.tokens)
        encoder.layout(prompt.tokens, prompt.contents)
        assert model.model.rope_deltas is None
        assert torch.equal(model(**prompt.inputs).logits, expected)


def test_mask_of_other_tokens_is_refused() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[1, 3] = True

    with pytest.raises(ContentsUnsupported, match="outside of the placeholders"):
        read_bidirectional(mask[None, None], [(2, 4)])


def test_runs_of_flags() -> None:
    assert runs([True, True, False, True, False], 3) == ((3, 5), (6, 7))
    assert runs([]) == ()
    assert runs([False, True]) == ((1, 2),)
