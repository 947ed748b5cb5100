"""Measures the time between tokens of streams beside the encoding of images.

    python -m benchmarks.serving.encodings [MODEL] [--streams 8] [--seconds 10] [--itl-target-ms N] [--json FILE]

A text model decodes the streams in this process, undisturbed and beside requests with a new image each, one after
another. The tower is SigLIP-base with random weights (86 million, 196 tokens an image), whose rows are the inputs of
the text. The ratio of the 99th percentiles is the result.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from bench.report import write_json
from benchmarks.result import add_json_option, command_parser, measured, model_name
from engine.config import EngineConfig
from engine.core import Core
from engine.load.load import load
from engine.run.packed import PackedRunner
from engine.run.runner import FirstSupporting
from engine.step.content import ContentEntry, PromptLayout
from engine.types.content import Content
from engine.types.request import Request, SamplingParams

SIDE, PATCH, WIDTH, LAYERS, HEADS = 224, 16, 768, 12, 12
IMAGE_TOKENS = (SIDE // PATCH) ** 2
CONTEXT, ANSWER_TOKENS = 4096, 3500
WARM_STEPS = 30


class RandomTower:
    """The ContentEncoder of SigLIP-base with random weights: the digest of an image is the seed of its pixels."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        config = SiglipVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        )
        self._tower = SiglipVisionModel(config).eval()
        self._projection, self._dtype = nn.Linear(WIDTH, width), dtype
        self.modules: Collection[nn.Module] = (*self._tower.modules(), self._projection)
        self.budget_bytes, self.longest_range, self.encoded = 2**28, 0, 0
        self._width = width

    def entry_bytes(self, content: Content) -> int:
        """Of the rows."""
        return (content.stop - content.start) * self._width * self._dtype.itemsize

    def encode(self, content: Content, tokens: Sequence[int]) -> ContentEntry:
        """Random rows."""
        generator = torch.Generator().manual_seed(int.from_bytes(content.digest[:4]))
        with torch.inference_mode():
            states = self._tower(torch.randn(1, 3, SIDE, SIDE, generator=generator)).last_hidden_state[0]
            rows = self._projection(states).to(self._dtype)
        self.encoded += 1
        return ContentEntry(content.digest, rows)

    def layout(self, tokens: Sequence[int], contents: Sequence[Content]) -> PromptLayout:
        """That of text."""
        return PromptLayout()

    def range_length(self, tokens: Sequence[int], contents: Sequence[Content]) -> int:
        """No tokens attend to later ones."""
        return 0

    def is_bidirectional(self, layer: int) -> bool:
        """False."""
        return False


def request(id: str, start: int, tokens: int, *contents: Content) -> Request:
    """A request that samples; its prompt has the tokens from `start` on, as many as its content and eight more."""
    length = 8 + sum(content.stop - content.start for content in contents)
    prompt = tuple(300 + (start + index) % 1000 for index in range(length))
    sampling = SamplingParams(temperature=1.0, seed=start)
    return Request(id, prompt, sampling, max_tokens=tokens, ignore_eos=True, contents=contents)


def image(number: int) -> Content:
    """A new image after four tokens of text."""
    return Content("image", 4, 4 + IMAGE_TOKENS, number.to_bytes(4) + bytes(28), ())


def gaps(core: Core, seconds: float, between: Callable[[], None] = lambda: None) -> list[float]:
    """Milliseconds between the tokens of a stream."""
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        between()
        if any(name == "stream 0" for name, _ in core.step()):
            times.append(time.perf_counter())
    return [1000 * (after - before) for before, after in zip(times, times[1:], strict=False)]


def row(name: str, values: Sequence[float], images: int) -> dict[str, Any]:
    """One row of the result."""
    percentiles = statistics.quantiles(values, n=100)
    return {"cell": name, "images": images, "tokens": len(values), "p50_ms": percentiles[49], "p99_ms": percentiles[98]}


def main(arguments: list[str] | None = None) -> int:
    """Print two rows and their ratio."""
    parser = command_parser("serving.encodings", __doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each cell")
    parser.add_argument("--itl-target-ms", type=float, default=None, help="as of cellar serve")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    target = options.itl_target_ms or "auto"
    config = EngineConfig(
        model=options.model, context=CONTEXT, slots=options.streams + 1, drafter="none", itl_target_ms=target
    )
    loaded = load(config, lambda _: None)
    width, dtype = loaded.model.config.get_text_config().hidden_size, next(loaded.model.parameters()).dtype
    tower = RandomTower(width, dtype)
    runner = loaded.runner
    packed = runner if isinstance(runner, PackedRunner) else PackedRunner(loaded.model, loaded.layers)
    core = Core(replace(loaded, content_encoder=tower, runner=FirstSupporting([runner, packed])), config)
    for number in range(options.streams):
        core.submit(request(f"stream {number}", 20 * number, ANSWER_TOKENS))
    for _ in range(WARM_STEPS):
        core.step()
    rows = [row("undisturbed", gaps(core, options.seconds), 0)]
    submitted = 0

    def submit() -> None:
        nonlocal submitted
        if submitted == tower.encoded:
            submitted += 1
            core.submit(request(f"image {submitted}", submitted, 1, image(submitted)))

    values = gaps(core, options.seconds, submit)
    rows.append(row("beside images", values, tower.encoded))
    core.close()
    model = model_name(options.model or "cellar-tiny")
    for line in rows:
        line |= {"model": model, "streams": options.streams, "itl_target_ms": target}
        print(line, flush=True)
    print(f"p99 {rows[1]['p99_ms'] / rows[0]['p99_ms']:.2f} times that without images")
    if options.json:
        write_json(options.json, measured("encodings", rows).content())
    return 0


if __name__ == "__main__":
    sys.exit(main())
