"""Requests with grammars and constraints: each text matches its grammar, and equals the text of a separate run."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence

import pytest
from jsonschema import validate

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.depth import FixedDepth
from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.load.load import LoadedModel
from engine.schedule.draft import Drafter
from engine.types.events import Failed, Finished
from engine.types.request import Dry, Grammar, ReasoningLimit, Request, SamplingParams, Xtc
from tests.engine.draft import drafters
from tests.engine.kit.models import CONTEXT, END, VOCABULARY, Models, core
from tests.engine.kit.play import Answer, Job, ask, play
from tests.selection import quick

COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SCHEMAS: list[dict[str, object]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "the"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 6},
    {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}]}},
    },
    {"type": "string", "pattern": "^(in|the){2,5}[0-9]{1,4}$"},
    {"enum": ["one", "two", {"three": [3]}]},
]
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.6, seed=2, frequency_penalty=0.5, dry=Dry(1.0)),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, xtc=Xtc(0.5, 0.05), typical_p=0.95, top_n_sigma=3.0),
)
PROMPT = tuple(range(30, 60))


def of_schema(schema: dict[str, object]) -> Grammar:
    """The grammar of compact JSON texts of a schema."""
    return Grammar(f"start: json\njson: %json {json.dumps({**schema, **COMPACT})}")


def requests(count: int = 60) -> list[Request]:
    """All schemas and sampling parameters, and some requests without a grammar."""
    chance, some = random.Random(0), []
    for at, schema in enumerate(SCHEMAS):
        for way, sampling in enumerate(SAMPLINGS):
            prompt = [*PROMPT[: chance.randint(5, 30)], *(chance.randrange(256) for _ in range(4))]
            some.append(ask(f"{at}-{way}", prompt, count, sampling=sampling, grammar=of_schema(schema)))
    plain = [ask(f"plain-{way}", PROMPT, 20, sampling=sampling) for way, sampling in enumerate(SAMPLINGS)]
    return [*some, *plain]


def alone(loaded: LoadedModel, some: Sequence[Request]) -> dict[str, Answer]:
    """The answer of each request in a separate run."""
    engine = core(loaded, slots=1)
    return {request.id: play(engine, [Job(request)])[request.id] for request in some}


def check(some: Sequence[Request], answers: dict[str, Answer]) -> int:
    """Each text that ended matches its schema; their number."""
    ended = 0
    for request in some:
        answer = answers[request.id]
        assert isinstance(answer.end, Finished), (request.id, answer.end)
        if request.grammar is not None and answer.end.reason == "stop":
            validate(json.loads(answer.text), SCHEMAS[int(request.id[0])])
            ended += 1
    return ended


@pytest.fixture(scope="module")
def whole(loaded: Models) -> dict[str, Answer]:
    """The answers in separate runs, without drafts."""
    return alone(loaded("llama"), requests())


def test_outputs_match_their_schemas(whole: dict[str, Answer]) -> None:
    """From random weights, with all sampling parameters; a few reach their limit first."""
    assert 16 <= check(requests(), whole)


def guessing(kind: str, outputs: dict[str, Answer], some: Sequence[Request]) -> Drafter:
    """A drafter of right, wrong, alternating or random tokens."""
    texts = {name: answer.tokens for name, answer in outputs.items()}
    lengths = {request.id: len(request.prompt) for request in some}
    return {
        "right": lambda: drafters.always_right(texts, lengths),
        "partly": lambda: drafters.partly_right(texts, lengths, VOCABULARY),
        "random": lambda: drafters.random_tokens(VOCABULARY),
        "end": lambda: drafters.end_tokens(END),
        "lookup": lambda: LookupDrafter(OutputStore(4096)),
    }[kind]()


@pytest.mark.parametrize("kind", quick(("right", "partly", "lookup"), ("right", "partly", "random", "end", "lookup")))
def test_output_is_independent_of_drafts_batches_and_preemption(
    loaded: Models, whole: dict[str, Answer], kind: str
) -> None:
    """With small chunks and too few cells."""
    some = requests()
    drafter = guessing(kind, whole, some)
    speculation = Speculation(None, drafter, FixedDepth(4), lambda: 0.0)
    engine = core(loaded("llama"), slots=6, cells=CONTEXT + 60, chunk=7, speculation=speculation)
    answers = play(engine, [Job(request, at // 2) for at, request in enumerate(some)], most_steps=20_000)

    assert {name: (one.tokens, one.text) for name, one in whole.items()} == {
        name: (one.tokens, one.text) for name, one in answers.items()
    }
    assert engine.stats().preemptions_total > 0


def test_a_draft_model_follows_the_grammar(loaded: Models, whole: dict[str, Answer]) -> None:
    """With the same noise, the same model drafts correctly, except after an end."""
    from tests.engine.kit.speculated import model_drafter

    speculation = Speculation(None, model_drafter(loaded("llama"), slots=2), FixedDepth(3), lambda: 0.0)
    some = [request for request in requests() if request.id in ("0-1", "3-0")]
    answers = play(core(loaded("llama"), slots=2, speculation=speculation), [Job(request) for request in some])
    usages = [one.end.usage for one in answers.values() if isinstance(one.end, Finished)]

    assert [whole[request.id].tokens for request in some] == [answers[request.id].tokens for request in some]
    assert all(usage.accepted_tokens > 0.4 * usage.completion_tokens for usage in usages)
    assert all(usage.rejected_tokens <= 1 for usage in usages)


BUNDLED = (
    "start: json\njson: %json " + json.dumps({**SCHEMAS[0], **COMPACT}),
    'start: "yes" | "no" | "perhaps"',
    "start: /[A-Z][a-z]{2,9}( [a-z]{2,9}){3}\\./",
    'start: <|im_start|> "x" /[0-9]{3}/',
)


def test_the_bundled_model_follows_grammars() -> None:
    """Schemas, choices, expressions and special tokens, in one batch."""
    from engine.load.load import load

    config = EngineConfig(context=256, slots=8)
    loaded = load(config, lambda phase: None)
    prompt = loaded.tokenizer.encode("Say something about yourself.")
    jobs = [
        Job(
            ask(
                f"{at}-{seed}",
                prompt,
                80,
                sampling=SamplingParams(seed=seed),
                grammar=Grammar(source),
                include_special_tokens=True,
            )
        )
        for at, source in enumerate(BUNDLED)
        for seed in range(4)
    ]
    answers = play(Core(loaded, config), jobs)
    texts = [[answers[f"{at}-{seed}"].text for seed in range(4)] for at in range(len(BUNDLED))]

    assert {"stop"} == {answer.end.reason for answer in answers.values() if isinstance(answer.end, Finished)}
    for text in texts[0]:
        validate(json.loads(text), SCHEMAS[0])
    assert {"yes", "no", "perhaps"} >= set(texts[1])
    assert all(re.fullmatch(r"[A-Z][a-z]{2,9}( [a-z]{2,9}){3}\.", text) for text in texts[2])
    assert all(re.fullmatch(r"<\|im_start\|>x[0-9]{3}", text) for text in texts[3])


def test_a_grammar_dead_end_fails_one_request(loaded: Models) -> None:
    """With a reason, with and without drafts; other requests are unchanged."""
    dead = ask("dead", PROMPT, 20, grammar=Grammar('start: "the"'), sampling=SamplingParams(allowed_tokens=(83,)))
    fine = ask("fine", PROMPT, 20)
    engine = core(loaded("llama"))
    answers = play(engine, [Job(dead), Job(fine)])

    assert isinstance(answers["dead"].end, Failed)
    assert "leave no token" in answers["dead"].end.reason
    assert answers["dead"].end.caused_by_request
    assert alone(loaded("llama"), [fine])["fine"].tokens == answers["fine"].tokens
    assert engine.cache.cells == engine.cache.free_cells + engine.cache.evictable_cells()


def test_tokens_before_a_dead_end_are_emitted(loaded: Models) -> None:
    """Also with accepted drafts; a stop string before it finishes the text."""
    letters = [loaded("llama").tokenizer.encode(letter)[0] for letter in "the12"]
    sampling = SamplingParams(temperature=0.0, allowed_tokens=tuple(letters))
    rules = {"grammar": Grammar('start: /[tx]/ /[hx]/ /[ex]/ "z"'), "sampling": sampling}
    some = [ask("dead", PROMPT, 20, **rules), ask("stopped", PROMPT, 20, stop=("he",), **rules)]
    plain = alone(loaded("llama"), some)
    script = drafters.ScriptedDrafter(lambda want: letters[want.draw.position - len(PROMPT) :])
    engine = core(loaded("llama"), speculation=Speculation(None, script, FixedDepth(4), lambda: 0.0))
    drafted = play(engine, [Job(request) for request in some])

    for answers in (plain, drafted):
        assert isinstance(answers["dead"].end, Failed)
        assert ("the", letters[:3]) == (answers["dead"].text, answers["dead"].tokens)
        assert isinstance(answers["stopped"].end, Finished)
        assert ("t", "he") == (answers["stopped"].text, answers["stopped"].end.stop)
    assert engine.cache.cells == engine.cache.free_cells + engine.cache.evictable_cells()


def test_a_complete_grammar_ends_the_text(loaded: Models) -> None:
    """Regardless of `ignore_eos`, `min_tokens` and allowed tokens; stops and limits still apply."""
    grammar = Grammar('start: "the in"')
    rules = {"ignore_eos": True, "min_tokens": 40, "grammar": grammar}
    letters = tuple(token for token in range(VOCABULARY) if token != END)
    jobs = [
        Job(ask("plain", PROMPT, 60, grammar=grammar)),
        Job(ask("rules", PROMPT, 60, sampling=SamplingParams(temperature=0.0, allowed_tokens=letters), **rules)),
        Job(ask("stop", PROMPT, 60, grammar=grammar, stop=("e i",))),
        Job(ask("limit", PROMPT, 1, grammar=grammar)),
    ]
    answers = play(core(loaded("llama")), jobs)

    assert ["the in", "the in", "th"] == [answers[name].text for name in ("plain", "rules", "stop")]
    assert ["stop", "stop", "stop", "length"] == [
        one.end.reason for one in answers.values() if isinstance(one.end, Finished)
    ]


def test_a_reasoning_limit_holds_inside_a_grammar(loaded: Models) -> None:
    """At its budget, or after the character in progress."""
    source = 'start: THOUGHT "!" /[0-9]{2}/\nTHOUGHT: /[^!]{1,60}/'
    bang = next(token for token in range(256) if loaded("llama").tokenizer.describe_token(token, 0.0).text == "!")
    some = [
        ask(
            f"{seed}",
            PROMPT,
            80,
            sampling=SamplingParams(seed=seed, temperature=2.0),
            grammar=Grammar(source),
            reasoning_limit=ReasoningLimit(start_token=None, end_tokens=(bang,), budget=7),
        )
        for seed in range(12)
    ]
    answers = alone(loaded("llama"), some)
    places = [answer.tokens.index(bang) for answer in answers.values()]

    assert all(re.fullmatch(r"[^!]{1,60}![0-9]{2}", answer.text, re.DOTALL) for answer in answers.values())
    assert max(places) <= 7 + 3
    assert 7 in places


@pytest.mark.parametrize("least", [0, 6, 13])
def test_stop_strings_apply_after_min_tokens(loaded: Models, least: int) -> None:
    """With and without drafts."""
    plain = alone(loaded("llama"), [ask("one", PROMPT, 24, ignore_eos=True)])["one"]
    stops = [letter for letter in sorted(set(plain.text)) if letter != "\ufffd"]
    request = ask("one", PROMPT, 24, ignore_eos=True, stop=tuple(stops), min_tokens=least)
    answer = alone(loaded("llama"), [request])["one"]
    guesser = guessing("right", {"one": plain}, [request])
    engine = core(loaded("llama"), speculation=Speculation(None, guesser, FixedDepth(4), lambda: 0.0))
    drafted = play(engine, [Job(request)])["one"]

    assert isinstance(answer.end, Finished)
    assert isinstance(drafted.end, Finished)
    assert least <= answer.end.usage.completion_tokens < least + 4
    assert (answer.text, answer.tokens) == (drafted.text, drafted.tokens)
    assert drafted.end.usage.accepted_tokens <= drafted.end.usage.completion_tokens


def test_drafts_after_a_stop_string_are_not_emitted(loaded: Models) -> None:
    """They count as rejected."""
    whole = alone(loaded("llama"), [ask("one", PROMPT, 24, ignore_eos=True)])["one"]
    stop = next(letter for letter in whole.text[1:] if letter != "\ufffd")
    request = ask("one", PROMPT, 24, ignore_eos=True, stop=(stop,))
    guesser = guessing("right", {"one": whole}, [request])
    engine = core(loaded("llama"), speculation=Speculation(None, guesser, FixedDepth(16), lambda: 0.0))
    answer = play(engine, [Job(request)])["one"]
    assert isinstance(answer.end, Finished)
    usage, drafts = answer.end.usage, engine.stats().drafts

    assert usage.completion_tokens - 1 <= usage.accepted_tokens <= usage.completion_tokens
    assert sum(sum(one.drafted) for one in drafts) == usage.accepted_tokens + usage.rejected_tokens


WRONG = {
    "allowed_tokens": {"sampling": SamplingParams(allowed_tokens=(VOCABULARY,))},
    "bad_words": {"sampling": SamplingParams(bad_words=((1, -1),))},
    "logit_bias": {"sampling": SamplingParams(logit_bias=((VOCABULARY, 1.0),))},
    "stop_token_ids": {"stop_token_ids": (-1,)},
    "min_tokens": {"min_tokens": 17},
    "thinking": {"reasoning_limit": ReasoningLimit(None, (), 4)},
    "typical_p": {"sampling": SamplingParams(typical_p=0.0)},
    "top_n_sigma": {"sampling": SamplingParams(top_n_sigma=float("nan"))},
    "dry": {"sampling": SamplingParams(dry=Dry(1.0, base=0.5))},
    "xtc": {"sampling": SamplingParams(xtc=Xtc(1.5))},
    "grammar": {"grammar": Grammar('start: "a')},
}


def test_invalid_fields_are_refused_by_name(folder: Callable[[str], object]) -> None:
    """Without a computed token; valid grammars are compiled outside of the engine thread."""
    from tests.engine.test_engine import answer, run_with_engine

    async def story(engine: Engine) -> None:
        for field, wrong in WRONG.items():
            with pytest.raises(InvalidRequest) as refusal:
                await answer(engine, ask("wrong", PROMPT, 16, **wrong))
            assert field == refusal.value.field
        compiled = engine.grammars.compile(Grammar('start: "the"'))
        events = await answer(engine, ask("right", PROMPT, 16, grammar=Grammar('start: "the"')))
        assert "the" == "".join(event.text for event in events if hasattr(event, "text"))
        assert compiled is engine.grammars.compile(Grammar('start: "the"'))

    run_with_engine(folder("llama"), story)
