"""The requests of `cellar verify`: seeded prompts of the model's own tokens, and requests derived from them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.load.load import LoadedModel
from engine.types.request import DrafterChoice, Request, SamplingParams, SpeculationParams

NEW_TOKENS = 24
# Draft tokens of a request with drafts, and the interval of wrong tokens in its prediction: some drafts are rejected.
DRAFT_TOKENS, WRONG_INTERVAL = 4, 7
_SEED = 45
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=_SEED)


def prompt_tokens(loaded: LoadedModel, count: int) -> tuple[int, ...]:
    """Random tokens with text, the same at every run."""
    excluded = {*loaded.eos, *loaded.tokenizer.markers()}
    pieces = loaded.tokenizer.pieces()
    usable = sorted(token for token in pieces if token < loaded.info.vocabulary and token not in excluded)
    return tuple(random.Random(_SEED + count).choices(usable, k=count))  # noqa: S311


def make_requests(loaded: LoadedModel, lengths: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[Request]:
    """A greedy and a sampled request for each length; no two share cached prefixes."""
    return [
        Request(
            f"{length} tokens, {kind}",
            prompt_tokens(loaded, length),
            sampling,
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=2,
            salt=f"{length} {kind}".encode(),
        )
        for length in lengths
        for kind, sampling in (("greedy", GREEDY), ("sampled", SAMPLED))
    ]


def with_drafts(request: Request, drafter: DrafterChoice, output: Sequence[int]) -> Request:
    """The request with a drafter; its prediction is the expected `output` with wrong tokens, so lookup drafts too."""
    prediction = tuple(
        request.prompt[0] if index % WRONG_INTERVAL == WRONG_INTERVAL - 1 else token
        for index, token in enumerate(output)
    )
    return replace(request, speculation=SpeculationParams(drafter, DRAFT_TOKENS), prediction=prediction)


def shared_start(request: Request) -> Request:
    """A request with two thirds of the prompt, and another token after them."""
    prompt = (*request.prompt[: len(request.prompt) * 2 // 3], request.prompt[-1])
    return replace(request, id=f"start of {request.id}", prompt=prompt, max_tokens=1)


def choices(request: Request, count: int) -> Iterator[Request]:
    """The choices of one answer: one prompt and group, each with its own seed."""
    for index in range(count):
        sampling = replace(request.sampling, seed=_SEED + index)
        yield replace(request, id=f"choice {index} of {request.id}", sampling=sampling, group=request.id)
