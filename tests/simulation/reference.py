"""The text of a request computed alone, without cache, batch and drafts: a function of the request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sample.noise import gumbel
from engine.types.request import Request
from kvcache.spec import AttentionRange
from tests.simulation.hash_model import HashModel, Numbers
from tests.simulation.letters import END, VOCABULARY, allowed_tokens, letter

# Positions whose noise is computed at once.
_NOISE_POSITIONS = 16


@dataclass(frozen=True, slots=True)
class ExpectedEnd:
    """All tokens of an answer, its text, and why it ends.

    stop  as in Finished
    """

    tokens: list[int]
    text: str
    reason: str
    stop: str | int | None


def expected_end(model: HashModel, request: Request, seed: int, *, capacity: int, overflow: str) -> ExpectedEnd:
    """The whole answer to a request; `seed` is that of its sampling."""
    shifts = (request.overflow or overflow) == "shift"
    available = capacity if shifts else capacity - len(request.prompt)
    limit = available if request.max_tokens is None else request.max_tokens
    if not shifts:
        limit = min(limit, available)
    context = _Context(model, request, capacity)
    output: list[int] = []
    text = ""
    noise_start, noise = 0, np.empty((0, VOCABULARY))
    while len(output) < limit:
        position = len(request.prompt) + len(output)
        if request.sampling.temperature and position >= noise_start + len(noise):
            noise_start, noise = position, _noise(seed, position)
        scores = _scores(context.logits(), request, output)
        token = int((scores + noise[position - noise_start]).argmax() if len(noise) else scores.argmax())
        context.tokens.append(token)
        output.append(token)
        if token in request.stop_token_ids:
            return ExpectedEnd(output, text, "stop", token)
        if token == END and (not request.ignore_eos or request.grammar is not None):
            return ExpectedEnd(output, text, "stop", None)
        text += letter(token)
        found = [stop for stop in request.stop if text.endswith(stop)]
        if found:
            longest = max(found, key=len)
            return ExpectedEnd(output, text.removesuffix(longest), "stop", longest)
    return ExpectedEnd(output, text, "length", None)


class _Context:
    """The tokens in view, and their numbers in each layer."""

    def __init__(self, model: HashModel, request: Request, capacity: int) -> None:
        self._model, self._capacity = model, capacity
        self.tokens = list(request.prompt)
        special = next((index for index, token in enumerate(request.prompt) if token > END), len(request.prompt))
        self._keep = min(special + 4 if request.keep is None else request.keep, capacity // 2)
        self._carries = request.recurrent_shift == "carry"
        # The input of each layer and the output of the last, for the computed tokens.
        self._numbers: list[Numbers] = [np.empty(0, np.uint64) for _ in range(len(model.ranges) + 1)]
        # What the inputs of each layer add to its sums; those of moved tokens are computed again.
        self._weights: list[Numbers] = [np.empty(0, np.uint64) for _ in model.ranges]
        self._states: list[int] = []

    def logits(self) -> NDArray[np.float64]:
        """Of the token after the last one."""
        if len(self.tokens) > self._capacity:
            self._shift()
        start, model = len(self._numbers[0]), self._model
        new = numbers = model.embed(self.tokens[start:])
        queries = np.arange(start, len(self.tokens))
        for layer, attention_range in enumerate(model.ranges):
            seen = self._numbers[layer] = np.concatenate((self._numbers[layer], numbers))
            known = self._weights[layer]
            added = model.weigh(layer, seen[len(known) :], np.arange(len(known), len(seen)))
            weights = self._weights[layer] = np.concatenate((known, added))
            oldest = [_oldest(attention_range, int(query)) for query in queries]
            sums = [weights[first : query + 1].sum() for first, query in zip(oldest, queries, strict=True)]
            numbers = model.combine(np.asarray(sums, np.uint64), numbers)
        self._numbers[-1] = np.concatenate((self._numbers[-1], numbers))
        if not model.recurrent:
            return model.logits(numbers[-1:])[0]
        for number in new:
            self._states.append(model.next_state(self._states[-1] if self._states else 0, int(number)))
        return model.logits(model.with_states(numbers[-1:], self._states[-1:]))[0]

    def _shift(self) -> None:
        """Drop half of the tokens after those to keep; the others move if keys and states can, or are recomputed."""
        keep, drop, length = self._keep, max((self._capacity - self._keep) // 2, 1), self._capacity
        dropped = slice(keep, keep + drop)
        moves = self._model.can_rotate and (self._carries or not self._model.recurrent)
        for attention_range in self._model.ranges:
            seen = _oldest(attention_range, length) == 0 or _oldest(attention_range, length - drop) >= keep
            moves = moves and attention_range.kind != "chunk" and seen
        del self.tokens[dropped]
        self._weights = [weights[:keep] for weights in self._weights]
        if moves:
            self._numbers = [np.delete(numbers, dropped) for numbers in self._numbers]
            # The last state still contains the dropped tokens.
            del self._states[dropped]
        else:
            self._numbers = [numbers[:keep] for numbers in self._numbers]
            del self._states[keep:]


def _oldest(attention_range: AttentionRange, position: int) -> int:
    if attention_range.kind == "window":
        return max(position - attention_range.size + 1, 0)
    return position - position % attention_range.size if attention_range.kind == "chunk" else 0


def _noise(seed: int, start: int) -> NDArray[np.float64]:
    """The noise of each token at the positions from `start` on [positions, vocabulary]."""
    positions, tokens = torch.meshgrid(
        torch.arange(start, start + _NOISE_POSITIONS), torch.arange(VOCABULARY), indexing="ij"
    )
    return gumbel(torch.full_like(tokens, seed), positions, tokens).numpy()


def _scores(logits: NDArray[np.float64], request: Request, output: Sequence[int]) -> NDArray[np.float64]:
    """The scores of all tokens after an output, without noise."""
    params, scores = request.sampling, logits.copy()
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.repetition_penalty != 1:
        for token in {*request.prompt, *output}:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    if params.frequency_penalty or params.presence_penalty:
        for token, count in Counter(output).items():
            scores[token] -= params.frequency_penalty * count + params.presence_penalty
    forbidden = _forbidden(request, output)
    if forbidden:
        scores[list(forbidden)] = -np.inf
    if params.temperature == 0:
        return scores
    scores /= params.temperature
    if params.top_k:
        scores[scores < np.sort(scores)[-params.top_k]] = -np.inf
    return scores


def _forbidden(request: Request, output: Sequence[int]) -> set[int]:
    if request.grammar is not None:
        return set(range(VOCABULARY)).difference(allowed_tokens(output))
    forbidden = set[int]()
    if request.sampling.allowed_tokens is not None:
        forbidden |= set(range(VOCABULARY)).difference(request.sampling.allowed_tokens)
    text = [*request.prompt, *output]
    for word in request.sampling.bad_words:
        if len(word) == 1 or tuple(text[1 - len(word) :]) == word[:-1]:
            forbidden.add(word[-1])
    if len(output) < request.min_tokens:
        forbidden |= {END, *request.stop_token_ids}
    return forbidden
