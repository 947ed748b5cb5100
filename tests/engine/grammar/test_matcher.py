"""Grammars: masks along a text with drafts, and bounds of time, memory and crashes."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path

import pytest
from llguidance import LLParserLimits
from transformers import AutoTokenizer

from engine.errors import InvalidRequest
from engine.grammar import compiler as grammars
from engine.grammar.compiler import GrammarCompiler, nesting_depth
from engine.grammar.matcher import GrammarMatcher
from engine.text.tokenizer import Tokenizer
from engine.types.request import Grammar
from tests.engine.kit.models import END, VOCABULARY, save_tokenizer
from tests.engine.kit.tokenizers import ADDED, KINDS, SIZE, SPECIAL, served, streamed, vocabulary
from tests.selection import quick

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def of_schema(schema: object) -> Grammar:
    """The grammar of JSON texts of a schema."""
    return Grammar(f"start: json\njson: %json {schema if isinstance(schema, str) else json.dumps(schema)}")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A compiler for the tokenizer of the tiny models, with a vocabulary larger than the tokenizer's."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return grammars_of(folder)


def grammars_of(folder: Path) -> GrammarCompiler:
    """A compiler for a tokenizer on disk."""
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(folder), vocabulary_size=VOCABULARY, context=4096)
    return GrammarCompiler(tokenizer, vocabulary_size=VOCABULARY, end_tokens={END})


def test_prepare_builds_the_vocabulary(tmp_path: Path) -> None:
    """Part by part; a concurrent request waits for a part, and needs no slices."""
    save_tokenizer(tmp_path)
    early = grammars_of(tmp_path)
    with early._compiling:
        preparing = threading.Thread(target=early.prepare)
        preparing.start()
        assert early._vocabulary is None
    preparing.join()
    assert early._vocabulary is None
    first = early.compile(Grammar('start: "a"'))
    unsliced = early._vocabulary
    assert first is early.compile(Grammar('start: "a"'))
    assert [False, False] == [early.prepare() for _ in range(2)]
    vocabulary = early._vocabulary

    assert first is not early.compile(Grammar('start: "a"'))
    assert None not in (unsliced, vocabulary)
    assert unsliced is not vocabulary
    assert vocabulary is early._vocabulary
    assert not GrammarCompiler(early._tokenizer, vocabulary_size=VOCABULARY, end_tokens=()).prepare()


def letter(compiler: GrammarCompiler, text: str) -> int:
    """The token of a letter."""
    return next(token for token in range(256) if compiler._tokenizer.describe_token(token, 0.0).text == text)


def allowed(matcher: GrammarMatcher, guessed: list[int]) -> list[int] | None:
    """The permitted next tokens."""
    mask = matcher.allowed_mask(guessed)
    return None if mask is None else mask.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("source", ['start: "a" | "ab" /[0-9]{1,3}/', of_schema(RECORD).source])
def test_drafts_do_not_change_the_state(compiler: GrammarCompiler, source: str) -> None:
    """Masks along random texts with right and wrong drafts equal the masks of a matcher without drafts."""
    chance = random.Random(1)
    for _ in range(6):
        matcher, text = compiler.matcher(Grammar(source)), list[int]()
        while (tokens := allowed(matcher, [])) != [END] and len(text) < 40:
            guessed: list[int] = []
            for _ in range(chance.randint(0, 4)):
                there = allowed(matcher, guessed)
                assert there is not None
                if there == [END]:
                    break
                guessed.append(chance.choice([token for token in there if token != END]))
            plain = compiler.matcher(Grammar(source))
            for token in [*text, *guessed]:
                plain.append(token)
            assert allowed(plain, []) == allowed(matcher, guessed)
            forbidden = [token for token in range(VOCABULARY) if token not in set(tokens or ())]
            assert allowed(matcher, [chance.choice(forbidden), 3]) is None
            token = chance.choice([*(tokens or ()), *guessed[:1]])
            text.append(token)
            matcher.append(token)
            if token == END:
                break


@pytest.mark.parametrize("as_text", [False, True])
def test_drafts_with_the_same_end_have_their_own_masks(compiler: GrammarCompiler, as_text: bool) -> None:
    """Drafts, and texts, that lead to the same lexer state."""
    matcher = compiler.matcher(Grammar('start: "a" /b*/ "x" | "c" /b*/ "y"'))
    a, b, c, x, y = (letter(compiler, text) for text in "abcxy")

    assert [b, x] == allowed(matcher, [a, b])
    if as_text:
        matcher.append(c)
        matcher.append(b)
    assert [b, y] == allowed(matcher, [] if as_text else [c, b])


def test_only_end_tokens_follow_a_complete_text(compiler: GrammarCompiler) -> None:
    """Ids without a token or without text are never permitted."""
    matcher = compiler.matcher(Grammar('start: "ab"'))
    matcher.append(letter(compiler, "a"))

    assert [letter(compiler, "b")] == allowed(matcher, [])
    assert [END] == allowed(matcher, [letter(compiler, "b")])
    free = compiler.matcher(Grammar("start: /(.|\\n)*/")).allowed_mask([])
    assert free is not None
    assert VOCABULARY == len(free)
    assert not free[[256, *range(262, VOCABULARY)]].any()
    assert bool(free[END])


def test_limits_are_per_text(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher restarts when other texts used up the limits of the shared lexer."""
    monkeypatch.setattr("engine.grammar.matcher.LIMITS", limited(3000))
    grammar = Grammar("start: /(.|\\n)*a(.|\\n){12}b(.|\\n)*/")
    letters = [letter(compiler, "a"), letter(compiler, "b")]
    for seed in range(12):
        matcher, chance = compiler.matcher(grammar), random.Random(seed)
        for _ in range(100):
            mask = matcher.allowed_mask([])
            assert mask is not None
            assert mask.any(), matcher.error
            matcher.append(chance.choice(letters))


def limited(states: int) -> LLParserLimits:
    """Low limits."""
    return LLParserLimits(max_lexer_states=states, verbose_errors=False)


def test_a_limit_is_reported_as_an_error(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is empty, and the matcher has an error; other drafts still match."""
    monkeypatch.setattr("engine.grammar.matcher.LIMITS", limited(40))
    matcher = compiler.matcher(Grammar('start: "b" | "c" /(.|\\n)*a(.|\\n){12}b(.|\\n)*/'))
    chance, draft = random.Random(0), [letter(compiler, "c")]
    while (mask := matcher.allowed_mask(draft)) is not None and mask.any():
        draft.append(letter(compiler, chance.choice("ab")))

    assert mask is not None
    assert "too many states" in matcher.error
    assert [END] == allowed(matcher, [letter(compiler, "b")])
    assert "" == matcher.error


def nested(levels: int) -> str:
    """A schema of nested objects."""
    return '{"type":"object","properties":{"a":' * levels + '{"type":"string"}' + "}}" * levels


REFUSED = {
    "nested 190": (of_schema(nested(190)).source, "levels deep"),
    "nested 3,000": (of_schema(nested(3000)).source, "levels deep"),
    "lists": (of_schema("[" * 100_000).source, "levels deep"),
    "parentheses": ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "levels deep"),
    "some parentheses": ("start: " + "(" * 100 + '"a"' + ")" * 100, "nested"),
    "groups": ("start: /" + "(" * 10_000 + "a" + ")" * 10_000 + "/", "nest"),
    "groups in a pattern": (of_schema({"type": "string", "pattern": "(" * 9000 + ")" * 9000}).source, "nest"),
    "a circle": (of_schema({"$ref": "#"}).source, "no text matches"),
    "a circle of two": (of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}).source, "no text matches"),
    "a rule alone": ("start: start", "no text matches"),
    "far away": (of_schema({"$ref": "http://127.0.0.1:9/x.json"}).source, "registry"),
    "a wrong type": (of_schema({"type": "stsring"}).source, "Invalid type: stsring"),
    "not enforced": (of_schema({"type": "array", "uniqueItems": True}).source, 'Unimplemented keys: ["uniqueItems"]'),
    "look-around": ("start: /(?=a)b/", "look-around"),
    "a bomb": (
        of_schema(
            {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for b in range(4)]} for a in range(10)]}
        ).source,
        "too large",
    ),
    "half a character": ('start: "\ud800"', "surrogate"),
    "nothing": ("", "no start rule"),
    "half a group": ("start: (", "Expected token"),
    "long": (of_schema({"enum": [f"number {at}" for at in range(50_000)]}).source, "bytes"),
    "a row too wide": (
        of_schema({"type": "object", "properties": {f"p{at}": {} for at in range(2000)}}).source,
        "row has",
    ),
}
COMPILED = {
    "names": of_schema({"enum": [f"n{at}" for at in range(20_000)]}).source,
    "optional": of_schema({"type": "object", "properties": {f"p{at}": {} for at in range(400)}}).source,
    "many": of_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}).source,
    "long": of_schema({"type": "string", "maxLength": 10**9}).source,
    "recursive": of_schema({"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}}).source,
    "groups": "start: /" + "(" * 200 + "a" + ")" * 200 + "/",
    "repeated": "start: /" + "(" * 20 + "a" + "{1,1000})" * 20 + "/",
    "evil": "start: /(x+x+)+y(a|a?)+(.*a){30}/",
    "exponential": "start: /(.|\\n)*a(.|\\n){30}b/",
    "ambiguous": 'start: s\ns: s s s | s s | "a" | ""',
    "rules": "start: r0\n" + "\n".join(f"r{at}: r{at + 1} r{at + 1}" for at in range(60)) + '\nr60: "a"',
    "nested repetitions": 'start: (((("a"{0,50}){0,50}){0,50}){0,50}){0,50}',
    "brackets in strings": 'start: "' + "([{" * 500 + '" | /[(][(]{3}/ // ' + "(" * 500,
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_grammars_are_refused_with_a_reason(compiler: GrammarCompiler, name: str) -> None:
    """Within a second, in one line."""
    source, reason = REFUSED[name]
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=r".") as refusal:
        compiler.compile(Grammar(source))

    assert reason in refusal.value.reason
    assert "\n" not in refusal.value.reason
    # Line numbers would refer to the generated grammar, not to the schema of the client.
    assert not re.match(r"(at )?\d+\(", refusal.value.reason)
    assert len(refusal.value.reason) <= 500
    assert time.process_time() - began < 2


@pytest.mark.parametrize("name", COMPILED)
def test_large_grammars_compile_within_limits(compiler: GrammarCompiler, name: str) -> None:
    """In two seconds at most, and twenty tokens in two more; or a limit is reported."""
    began, chance = time.process_time(), random.Random(0)
    matcher = compiler.matcher(Grammar(COMPILED[name]))
    for _ in range(20):
        tokens = allowed(matcher, [])
        assert tokens or "Too many items" in matcher.error or "row has" in matcher.error
        if not tokens or tokens == [END]:
            break
        matcher.append(chance.choice(tokens))

    assert time.process_time() - began < 4


@pytest.mark.parametrize("text", ['\\"', "\\/", "/ ", '"\\'])
def test_nesting_depth_is_linear(text: str) -> None:
    """For unclosed strings and expressions: regular expressions of Python hold the GIL."""
    began = time.thread_time()
    nesting_depth(text * 2**17)

    assert time.thread_time() - began < 1


def test_each_step_is_bounded_in_time(compiler: GrammarCompiler) -> None:
    """A grammar with growing ambiguity exceeds a limit before a step takes long."""
    matcher, longest = compiler.matcher(Grammar(COMPILED["nested repetitions"])), 0.0
    for _ in range(40):
        began = time.thread_time()
        mask = matcher.allowed_mask([])
        matcher.append(letter(compiler, "a"))
        longest = max(longest, time.thread_time() - began)
        if mask is None or not mask.any():
            break

    assert longest < 0.5
    assert "row has" in matcher.error


ENDLESS = [
    'start: ("a" | "b") /a+/ "a"',
    '%llguidance {"no_forcing": false}\nstart: ("a" | "b") /(aa)+/ "aa"',
    'start: inner\ninner: %lark {\n%llguidance {"no_forcing": false}\nstart: ("a" | "b") /a+/ "a"\n}',
]


@pytest.mark.parametrize("source", ENDLESS)
def test_an_endless_text_is_matched_token_by_token(compiler: GrammarCompiler, source: str) -> None:
    """llguidance would compute all forced tokens of the grammar for one mask."""
    matcher = compiler.matcher(Grammar(source))
    for _ in range(4):
        matcher.append(letter(compiler, "a"))

    assert [letter(compiler, "a")] == allowed(matcher, [])


@pytest.mark.parametrize("source", ['start: /(aa)+/ "aa"', 'start: x | /b(a)+/ "a"\nx: "a" x', 'start: "a"{1000000}'])
def test_forced_tokens_respects_its_limit(compiler: GrammarCompiler, source: str) -> None:
    """For an endless terminal."""
    matcher = compiler.matcher(Grammar(source))
    matcher.append(letter(compiler, "b" if "b" in source else "a"))
    forced = matcher.forced_tokens(16)

    assert len(forced) <= 16
    assert {"a"} == set(compiler._tokenizer.decode(forced))


def test_forced_tokens_end_at_a_choice(compiler: GrammarCompiler) -> None:
    """And where the text may end."""
    matcher = compiler.matcher(Grammar('start: "abc" ("d" | "e") "f" | "x" "y"?'))

    assert [] == matcher.forced_tokens(16)
    matcher.append(letter(compiler, "a"))
    assert "bc" == compiler._tokenizer.decode(matcher.forced_tokens(16))
    assert "b" == compiler._tokenizer.decode(matcher.forced_tokens(1))
    assert "f" == compiler._tokenizer.decode(_behind(compiler, matcher, "bcd").forced_tokens(16))
    ended = compiler.matcher(Grammar('start: "abc" ("d" | "e") "f" | "x" "y"?'))
    assert [] == _behind(compiler, ended, "x").forced_tokens(16)


def _behind(compiler: GrammarCompiler, matcher: GrammarMatcher, text: str) -> GrammarMatcher:
    for each in text:
        matcher.append(letter(compiler, each))
    return matcher


def test_a_slow_text_fails(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """After too much excess time, with an error."""
    matcher = compiler.matcher(of_schema(RECORD))
    monkeypatch.setattr("engine.grammar.matcher._STEP_SECONDS", 0.0)
    monkeypatch.setattr("engine.grammar.matcher._MAX_EXCESS_SECONDS", 0.0)
    matcher.allowed_mask([])

    assert [] == allowed(matcher, [])
    assert [] == matcher.forced_tokens(16)
    assert "too long" in matcher.error


def test_slow_grammars_are_not_recompiled_on_the_engine_thread(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text ends when the shared limits of its grammar are used up; the next request recompiles the grammar."""
    monkeypatch.setattr("engine.grammar.matcher.LIMITS", limited(3000))
    monkeypatch.setattr("engine.grammar.matcher._RECOMPILE_SECONDS", 0.0)
    grammar = Grammar("start: /(.|\\n)*a(.|\\n){12}c(.|\\n)*/")
    compiled, letters = compiler.compile(grammar), [letter(compiler, "a"), letter(compiler, "c")]
    for seed in range(12):
        matcher, chance = GrammarMatcher(compiled, VOCABULARY), random.Random(seed)
        for _ in range(100):
            if not allowed(matcher, []):
                break
            matcher.append(chance.choice(letters))

    assert compiled.exhausted
    assert not compiler.compile(grammar).exhausted


def test_the_grammar_cache_is_bounded(compiler: GrammarCompiler) -> None:
    """By number and bytes; a cached source is compiled once."""
    first = compiler.compile(Grammar('start: "kept"'))
    assert first is compiler.compile(Grammar('start: "kept"'))
    for at in range(200):
        compiler.compile(Grammar(f'start: "number {at}"'))
    assert grammars._MAX_CACHED == len(compiler._cache)
    for at in range(8):
        compiler.compile(Grammar(f'start: "{at}" // {"x" * 200_000}'))

    assert sum(len(one.source) for one in compiler._cache.values()) <= grammars._MAX_CACHED_BYTES
    assert first is not compiler.compile(Grammar('start: "kept"'))


def test_threads_may_compile_at_once(compiler: GrammarCompiler) -> None:
    """Each grammar is compiled once, and each thread gets its own matcher."""
    found: list[GrammarMatcher] = []
    grammar = of_schema({**RECORD, "title": "for threads"})
    threads = [threading.Thread(target=lambda: found.append(compiler.matcher(grammar))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    masks = [matcher.allowed_mask([]) for matcher in found]

    assert 8 == len({id(matcher) for matcher in found})
    assert all(mask is not None and masks[0] is not None and mask.equal(masks[0]) for mask in masks)
    assert 1 == len({id(matcher._compiled) for matcher in found})


# CTC drops repeated tokens; joined pieces have no text without spaces.
SEPARATED = [kind for kind in KINDS if kind not in ("CTC", "Python, joined")]


@pytest.mark.parametrize("kind", quick(SEPARATED[::2], SEPARATED))
def test_a_schema_matches_with_every_kind_of_tokenizer(kind: str) -> None:
    """Random permitted tokens decode to JSON of the schema; markers are never permitted."""
    tokenizer, chance = served(kind), random.Random(0)
    end, markers = vocabulary(kind)["</s>"], {vocabulary(kind).get(piece) for piece in (*SPECIAL, *ADDED)}
    start = vocabulary(kind)["##a" if kind.startswith("WordPiece") else "a"]
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    grammars = GrammarCompiler(tokenizer, vocabulary_size=SIZE, end_tokens=[end])
    for _ in range(8):
        matcher, text = grammars.matcher(of_schema(schema)), list[int]()
        while (tokens := allowed(matcher, [])) != [end]:
            assert tokens
            assert not markers & {*tokens} - {end}
            enough = [token for token in tokens if '"' in tokenizer.describe_token(token, 0.0).text or token == end]
            text.append(chance.choice(enough if enough and len(text) > 20 else tokens))
            if text[-1] == end:
                break
            matcher.append(text[-1])
        output = "".join(streamed(kind, [start], [token for token in text if token != end], special=True))

        assert {*json.loads(output)} in ({"a"}, {"a", "b"})
        assert tokenizer.decode([start, *matcher._compiled.retokenize(text[:6])]) == tokenizer.decode(
            [start, *text[:6]]
        )


@pytest.mark.parametrize("kind", ["byte-level BPE", "byte fallback, Llama 2", "byte fallback, Gemma"])
def test_forced_text_is_tokenised_canonically(kind: str) -> None:
    """As inside a text, without a space at the start."""
    matcher = GrammarCompiler(served(kind), vocabulary_size=SIZE, end_tokens=[1]).matcher(Grammar('start: "世a"'))

    assert "世a" == served(kind).decode([vocabulary(kind)["a"], *matcher.forced_tokens(9)])[1:]
    assert served(kind).encode_inside_text("世a") in ([], matcher.forced_tokens(9))


def test_prepare_reads_a_large_vocabulary_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that comes between two parts reads the others."""
    monkeypatch.setattr("engine.grammar.compiler._PART_TOKENS", SIZE // 3)
    tokenizer = served("byte fallback, Gemma")
    early = GrammarCompiler(tokenizer, vocabulary_size=SIZE, end_tokens=[1])

    assert early.prepare()
    assert tokenizer.token_bytes(0, SIZE // 3) == early._token_bytes
    assert early.compile(Grammar('start: "a"'))
    assert tokenizer.token_bytes(0, SIZE) == early._token_bytes[:SIZE]


def test_prepare_starts_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later compilations do not read the tokenizer; a model without an end token builds nothing."""
    grammars = GrammarCompiler(served("byte fallback, Gemma"), vocabulary_size=SIZE, end_tokens=[1])
    grammars.prepare()
    GrammarCompiler(served("byte fallback, Gemma"), vocabulary_size=SIZE, end_tokens=[]).prepare()
    monkeypatch.setattr(grammars._tokenizer, "token_bytes", None)

    assert grammars.compile(Grammar('start: "a"'))


def test_a_model_without_end_token_refuses_grammars(compiler: GrammarCompiler) -> None:
    endless = GrammarCompiler(compiler._tokenizer, vocabulary_size=VOCABULARY, end_tokens=())
    with pytest.raises(InvalidRequest, match="no EOS token"):
        endless.compile(Grammar('start: "a"'))


def test_nesting_depth_ignores_literals() -> None:
    """Brackets in strings, expressions and comments."""
    assert 3 == nesting_depth('start: ([("a" | "((((\\"((("]) | /[(((]\\/((/ // ((((((\n# ((((((\n{{}}')
    assert 0 == nesting_depth("))]]")
