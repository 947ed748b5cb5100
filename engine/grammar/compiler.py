"""From the source of a grammar to one that can be followed: compiled once, within limits, off the engine thread."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable

from llguidance import LLTokenizer

from engine.errors import GrammarTooCostly, InvalidRequest, Overloaded
from engine.grammar.matcher import CompiledGrammar, GrammarMatcher
from engine.grammar.sandbox import GrammarSandbox, Vocabulary
from engine.text.tokenizer import Tokenizer
from engine.types.request import Grammar

_MAX_SOURCE_BYTES = 256 * 2**10
# Half of them are a schema's levels. llguidance has limits of its own, but what recurses too deeply ends the process.
_MAX_NESTING = 128
# Compiled, a grammar takes 30 to 400 times its source (measured).
_MAX_CACHED, _MAX_CACHED_BYTES = 64, 512 * 2**10
# Tokens of the beginning that are followed, where there is only one.
_PROBED_TOKENS = 16
# How many trials are remembered.
_MAX_SANDBOX_RESULTS = 1024
_LOCK_TIMEOUT_SECONDS = 10.0
_MAX_REASON_LENGTH = 500

# Strings, regular expressions and comments of Lark and of the JSON inside it: their brackets nest nothing. What is not
# closed reaches to the end of its line, so that no letter is read twice.
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?')
_EXCERPT = re.compile(r"\n[ \t]+\d+ \| ")
_LOCATION = re.compile(r"^(?:(?:at )?\d+\(\d+\): )+(?:failed to compile JSON schema: )?")


class GrammarCompiler:
    """The grammars of one model. For worker threads: all methods block.

    size  tokens that the model knows
    ends  those that end a text
    """

    def __init__(self, tokenizer: Tokenizer, *, vocabulary_size: int, end_tokens: Iterable[int]) -> None:
        self._tokenizer, self._vocabulary_size, self._end_tokens = tokenizer, vocabulary_size, sorted(end_tokens)
        self._vocabulary: LLTokenizer | None = None
        self._sandbox: GrammarSandbox | None = None
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        # What a trial found wrong, by digest.
        self._sandbox_faults: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar, ready to be followed. Raises InvalidRequest, and Overloaded where too many are to be compiled.

        One is compiled at a time, so that they take one core at most from those who compute.
        """
        digest = _checked_digest(grammar.source)
        compiled = self._cached(digest)
        if compiled is None:
            if not self._compiling.acquire(timeout=_LOCK_TIMEOUT_SECONDS):
                raise Overloaded(1, _LOCK_TIMEOUT_SECONDS)
            try:
                compiled = self._cached(digest) or self._compile(digest, grammar.source)
            finally:
                self._compiling.release()
            self._add_to_cache(digest, compiled)
        if compiled.error:
            raise InvalidRequest("grammar", readable_error(compiled.error))
        return compiled

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Follows a text from its beginning. Raises as `compile` does."""
        return GrammarMatcher(self.compile(grammar), self._vocabulary_size)

    def _compile(self, digest: bytes, source: str) -> CompiledGrammar:
        vocabulary = self._load_vocabulary()
        self._check_in_sandbox(digest, source)
        compiled = CompiledGrammar(vocabulary, source)
        if not compiled.error:
            compiled.error = self._first_fault(GrammarMatcher(compiled, self._vocabulary_size))
        return compiled

    def _first_fault(self, matcher: GrammarMatcher) -> str:
        """What is wrong at the beginning of a text; "": nothing. The first mask builds most of the lexer."""
        for _ in range(2):
            mask = matcher.allowed_mask(())
            if matcher.error or mask is None or not mask.any():
                return matcher.error or "NoExtension"
            for token in matcher.forced_tokens(_PROBED_TOKENS):
                matcher.append(token)
        return ""

    def _check_in_sandbox(self, digest: bytes, source: str) -> None:
        """GrammarTooCostly where another process says so."""
        assert self._sandbox is not None
        if digest not in self._sandbox_faults:
            self._sandbox_faults[digest] = self._sandbox.check(source)
            if len(self._sandbox_faults) > _MAX_SANDBOX_RESULTS:
                self._sandbox_faults.popitem(last=False)
        if fault := self._sandbox_faults[digest]:
            raise GrammarTooCostly("grammar", fault)

    def prepare(self) -> None:
        """Build what the first grammar would have to wait for; nothing for a model that cannot have grammars."""
        with self._compiling, contextlib.suppress(InvalidRequest):
            self._load_vocabulary()

    def _load_vocabulary(self) -> LLTokenizer:
        """The vocabulary as llguidance has it: 0.2 seconds and 20 MB for 32,000 tokens, spent where one is needed."""
        if self._vocabulary is None:
            if not self._end_tokens:
                raise InvalidRequest("grammar", "this model has no token that ends a text, and a grammar needs one")
            tokens, markers = self._tokenizer.token_bytes(self._vocabulary_size)
            known = Vocabulary(tokens, markers, end_tokens=self._end_tokens, encode=self._tokenizer.encode_inside_text)
            self._sandbox = GrammarSandbox(known)
            # The other process reads it at the same time.
            self._sandbox.start()
            try:
                self._vocabulary = known.to_llguidance()
            except ValueError as error:
                self._sandbox.close()
                raise InvalidRequest("grammar", f"grammars cannot read this model's tokenizer: {error}") from error
        return self._vocabulary

    def _cached(self, digest: bytes) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._cache.get(digest)
            if compiled is None or compiled.exhausted:
                return None
            self._cache.move_to_end(digest)
            return compiled

    def _add_to_cache(self, digest: bytes, compiled: CompiledGrammar) -> None:
        """Keep it, and let go of those that were not asked for for longest."""
        with self._lock:
            self._cache[digest] = compiled
            while (
                len(self._cache) > _MAX_CACHED
                or sum(len(one.source) for one in self._cache.values()) > _MAX_CACHED_BYTES
            ):
                self._cache.popitem(last=False)


def readable_error(error: str) -> str:
    """What llguidance says, in one line: without the excerpt of the source, and where in it."""
    if error.startswith("NoExtension"):
        return "no text follows this grammar"
    said = _LOCATION.sub("", _EXCERPT.split(error.replace("<non-verbose/>", ""))[0].strip())
    _, expression, wrong = said.partition("regex parse error:")
    if expression:
        said = f"invalid regular expression: {wrong.split('error: ')[-1]}"
    return " ".join(said.split())[:_MAX_REASON_LENGTH]


def nesting_depth(source: str) -> int:
    """How deeply brackets stand inside brackets."""
    depth = deepest = 0
    for letter in re.findall(r"[()\[\]{}]", _LITERALS.sub("", source)):
        depth = depth + 1 if letter in "([{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _checked_digest(source: str) -> bytes:
    """The digest of a source that may be compiled."""
    try:
        encoded = source.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("grammar", "the grammar holds half of a surrogate pair, which is no character") from error
    if len(encoded) > _MAX_SOURCE_BYTES:
        raise InvalidRequest("grammar", f"it has {len(encoded)} bytes, and may have {_MAX_SOURCE_BYTES}")
    if (deepest := nesting_depth(source)) > _MAX_NESTING:
        raise InvalidRequest("grammar", f"it nests {deepest} levels deep, and may nest {_MAX_NESTING}")
    return hashlib.sha256(encoded).digest()
