"""The evaluation: exact answers by topic on held-out seeds, hand-written probes, and the draft's agreement."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer

from models.recipe.answers import Answer, Model, Prompt
from models.recipe.conversation import Conversation
from models.recipe.dialogues import words
from models.recipe.dialogues.lists import POOLS
from models.recipe.dialogues.topics import converse, converse_at_length
from models.recipe.plan import TARGET
from models.recipe.probes import PROBES, Probe
from models.recipe.rows import encode

SEED = 990_017
ROWS = 1000
LONG_ROWS = 60
DRAFTED = 4


@dataclass(frozen=True, slots=True)
class Score:
    """So many right of so many."""

    right: int
    asked: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well the draft guesses the target's greedy answers.

    share     of all answer tokens, those that the draft likes best too
    accepted  mean number of guesses kept, of `DRAFTED` a round
    a_pass    answer tokens for one pass of the target
    """

    share: float
    accepted: float
    a_pass: float


@dataclass(frozen=True, slots=True)
class Report:
    """Scores by topic, agreement by topic and as a whole, and what went wrong for a reader to look at."""

    scores: dict[str, Score]
    agreement: Agreement
    agreement_by_topic: dict[str, float]
    misses: list[str]


def evaluate(target: Model, draft: Model) -> Report:
    """Ask everything once, greedily."""
    conversations = held_out()
    answers = target.answer([Prompt(one.prompt(), one.tools) for one in conversations])
    scores: dict[str, Score] = {}
    misses: list[str] = []
    by_topic: defaultdict[str, list[tuple[Conversation, Answer]]] = defaultdict(list)
    for one, answer in zip(conversations, answers, strict=True):
        by_topic[one.topic].append((one, answer))
    for topic, pairs in sorted(by_topic.items()):
        wrong = [(one, answer) for one, answer in pairs if not right(one, answer.text)]
        scores[topic] = Score(len(pairs) - len(wrong), len(pairs))
        misses += [f"{topic}: {one.messages[-2].content!r} -> {answer.text!r}" for one, answer in wrong[:8]]
    failed = [(probe, said) for probe in PROBES if probe.holds not in (said := _probe(target, probe))]
    scores["hand-written"] = Score(len(PROBES) - len(failed), len(PROBES))
    misses += [f"hand-written: {probe.turns[-1]!r} -> {said!r}" for probe, said in failed]
    kept = {topic: [matches(draft, answer) for _, answer in pairs] for topic, pairs in by_topic.items()}
    shares = {topic: _share(rows) for topic, rows in sorted(kept.items())}
    return Report(scores, _agreement([row for rows in kept.values() for row in rows]), shares, misses)


def held_out() -> list[Conversation]:
    """Conversations of seeds that no training pool uses; plain text has no question and is left out."""
    random = Random(SEED)
    drawn = [converse(random) for _ in range(ROWS)] + [converse_at_length(random) for _ in range(LONG_ROWS)]
    return [conversation for conversation in drawn if not conversation.raw]


def held_out_texts(count: int) -> list[list[int]]:
    """The first of them whole, as tokens of the target."""
    tokenizer = Tokenizer.from_file(str(TARGET.folder / "tokenizer.json"))
    return [row.ids for row in encode(tokenizer, held_out()[:count])]


def right(conversation: Conversation, answer: str) -> bool:
    """Whether an answer is right: word for word, or by the rules of the open topics."""
    if conversation.exact:
        return answer == conversation.answer
    judges: dict[str, Callable[[Conversation, str], bool]] = {"lists": _right_list, "stories": _right_story}
    return judges[conversation.topic](conversation, answer)


def _right_list(conversation: Conversation, answer: str) -> bool:
    """As many different items as wanted, all of the one kind."""
    items, example = _items(answer), _items(conversation.answer)
    pool = next(pool for pool in POOLS.values() if example[0] in pool)
    return len(items) == len(set(items)) == len(example) and all(item in pool for item in items)


def _right_story(conversation: Conversation, answer: str) -> bool:
    """Four sentences or five, about the animal that was asked for if one was."""
    question = conversation.messages[-2].content.lower()
    asked = [animal for animal in words.ANIMALS if f"a {animal}" in question]
    return 4 <= answer.count(".") <= 5 and answer.endswith(".") and all(animal in answer for animal in asked)


def _items(text: str) -> list[str]:
    if "\n" in text or text.startswith("1. "):
        return [line.partition(". ")[2] for line in text.split("\n")]
    return text.removesuffix(".").split(", ")


def _probe(model: Model, probe: Probe) -> str:
    """The last answer to a probe whose earlier turns the model answers itself."""
    messages: list[dict[str, object]] = [{"role": "system", "content": probe.system}] if probe.system else []
    said = ""
    for turn in probe.turns:
        messages.append({"role": "user", "content": turn})
        said = model.answer([Prompt(messages)])[0].text
        messages.append({"role": "assistant", "content": said})
    return said


@torch.inference_mode()
def matches(draft: Model, answer: Answer) -> list[bool]:
    """For each token of the target's answer, whether the draft would have said it too."""
    ids = torch.tensor([answer.prompt + answer.ids])
    guesses = draft.network(input_ids=ids).logits[0].argmax(-1)[len(answer.prompt) - 1 : -1]
    return [int(guess) == token for guess, token in zip(guesses, answer.ids, strict=True)]


def _share(rows: list[list[bool]]) -> float:
    flat = [match for row in rows for match in row]
    return sum(flat) / len(flat)


def _agreement(rows: list[list[bool]]) -> Agreement:
    """Greedy speculation replayed: while guesses match, the draft has seen what the target said."""
    rounds = accepted = 0
    for row in rows:
        at = 0
        while at < len(row):
            guessed = row[at : at + DRAFTED]
            kept = guessed.index(False) if False in guessed else len(guessed)
            rounds, accepted, at = rounds + 1, accepted + kept, at + kept + 1
    return Agreement(_share(rows), accepted / rounds, sum(map(len, rows)) / rounds)
