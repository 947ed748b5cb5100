"""Compiles grammars within limits of time and memory, outside of the engine thread, and caches them."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable

from llguidance import LLTokenizer

from engine.errors import GrammarTooCostly, InvalidRequest, Overloaded
from engine.grammar.matcher import CompiledGrammar, GrammarMatcher
from engine.grammar.sandbox import GrammarSandbox, GrammarVocabulary, with_slices
from engine.text.tokenizer import Tokenizer
from engine.types.request import Grammar

_MAX_SOURCE_BYTES = 256 * 2**10
# A level of a JSON schema takes two. Deeper recursion in llguidance ends the process.
_MAX_NESTING = 128
# A compiled grammar takes 30 to 400 times the bytes of its source (measured).
_MAX_CACHED, _MAX_CACHED_BYTES = 64, 512 * 2**10
# Forced tokens at the start of a text that are matched during compilation.
_PROBED_TOKENS = 16
# Cached results of the sandbox.
_MAX_SANDBOX_RESULTS = 1024
_LOCK_TIMEOUT_SECONDS = 10.0
_MAX_REASON_LENGTH = 500
# Tokens that are read at once: 0.1 s of Python code, which a step of the engine may have to wait for (measured).
_PART_TOKENS = 2**14

# Strings, regular expressions and comments of Lark and of JSON inside it, in which brackets do not nest. Unclosed ones
# reach to the end of the line, so that matching is linear.
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?')
_EXCERPT = re.compile(r"\n[ \t]+\d+ \| ")
_LOCATION = re.compile(r"^(?:(?:at )?\d+\(\d+\): )+(?:failed to compile JSON schema: )?")


class GrammarCompiler:
    """The grammars of one model. For worker threads: all methods block.

    vocabulary_size  tokens of the model
    end_tokens       EOS tokens
    """

    def __init__(self, tokenizer: Tokenizer, *, vocabulary_size: int, end_tokens: Iterable[int]) -> None:
        self._tokenizer, self._vocabulary_size, self._end_tokens = tokenizer, vocabulary_size, sorted(end_tokens)
        # Parts of the vocabulary in the order of construction.
        self._token_bytes: list[bytes] = []
        self._tokens: GrammarVocabulary | None = None
        self._vocabulary: LLTokenizer | None = None
        self._has_slices = False
        self._sandbox: GrammarSandbox | None = None
        self._cache: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        # Results of the sandbox by digest; "" for a grammar within the limits.
        self._sandbox_faults: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar, possibly from the cache. Raises InvalidRequest, and Overloaded after a wait.

        One grammar is compiled at a time, so that compilation occupies at most one core.
        """
        digest = _checked_digest(grammar.source)
        compiled = self._cached(digest)
        if compiled is None:
            if not self._compiling.acquire(timeout=_LOCK_TIMEOUT_SECONDS):
                raise Overloaded(1, _LOCK_TIMEOUT_SECONDS)
            try:
                compiled = self._cached(digest) or self._compile(digest, grammar.source)
            except TimeoutError as error:
                raise Overloaded(1, _LOCK_TIMEOUT_SECONDS) from error
            finally:
                self._compiling.release()
            self._add_to_cache(digest, compiled)
        if compiled.error:
            raise InvalidRequest("grammar", readable_error(compiled.error))
        return compiled

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the start of a text. Raises like `compile`."""
        return GrammarMatcher(self.compile(grammar), self._vocabulary_size)

    def _compile(self, digest: bytes, source: str) -> CompiledGrammar:
        vocabulary = self._load_vocabulary()
        self._check_in_sandbox(digest, source)
        compiled = CompiledGrammar(vocabulary, source)
        if not compiled.error:
            compiled.error = self._find_error(GrammarMatcher(compiled, self._vocabulary_size))
        return compiled

    def _find_error(self, matcher: GrammarMatcher) -> str:
        """An error at the start of a text, or "". The first mask builds most of the lexer."""
        for _ in range(2):
            mask = matcher.allowed_mask(())
            if matcher.error or mask is None or not mask.any():
                return matcher.error or "NoExtension"
            for token in matcher.forced_tokens(_PROBED_TOKENS):
                matcher.append(token)
        return ""

    def _check_in_sandbox(self, digest: bytes, source: str) -> None:
        """Raise GrammarTooCostly if the grammar exceeds the limits of the sandbox."""
        assert self._sandbox is not None, "the sandbox starts with the tokens"
        if digest not in self._sandbox_faults:
            self._sandbox_faults[digest] = self._sandbox.check(source)
            if len(self._sandbox_faults) > _MAX_SANDBOX_RESULTS:
                self._sandbox_faults.popitem(last=False)
        if fault := self._sandbox_faults[digest]:
            raise GrammarTooCostly("grammar", fault)

    def prepare(self) -> bool:
        """Build a part of the vocabulary before the first grammar needs it; whether another part is missing.

        llguidance holds the GIL for a whole part, so streams pause. No error for a model without support for grammars.
        """
        with self._compiling:
            try:
                self._build_part(in_background=True)
            except InvalidRequest:
                return False
            return not self._has_slices

    def _load_vocabulary(self) -> LLTokenizer:
        """The vocabulary for llguidance, built once: 0.2 seconds and 20 MB for 32,000 tokens.

        Slices are added by `prepare` only: they take as long, and without them a mask of 262,000 tokens takes 0.5 ms
        instead of 0.06 (measured).
        """
        while self._vocabulary is None:
            self._build_part()
        return self._vocabulary

    def _build_part(self, *, in_background: bool = False) -> None:
        """Build the next part of the vocabulary, if one is missing. Raises InvalidRequest.

        in_background  whether no grammar waits for it
        """
        if self._tokens is None:
            self._tokens = self._read_tokens(in_background=in_background)
        elif self._vocabulary is None:
            self._vocabulary = self._build_unsliced(self._tokens)
        elif not self._has_slices:
            self._vocabulary, self._has_slices = with_slices(self._vocabulary), True
            with self._lock:
                # Their masks are computed without slices.
                self._cache.clear()

    def _read_tokens(self, *, in_background: bool) -> GrammarVocabulary | None:
        """Read the next tokens; after the last ones start the sandbox, which builds a vocabulary in parallel."""
        if not self._end_tokens:
            raise InvalidRequest("grammar", "this model has no EOS token, which a grammar needs")
        start, size = len(self._token_bytes), max(self._vocabulary_size, self._tokenizer.size)
        self._token_bytes += self._tokenizer.token_bytes(start, min(start + _PART_TOKENS, size))
        if len(self._token_bytes) < size:
            return None
        vocabulary = GrammarVocabulary(
            self._token_bytes,
            self._tokenizer.markers(),
            end_tokens=self._end_tokens,
            encode=self._tokenizer.encode_inside_text,
        )
        self._sandbox = GrammarSandbox(vocabulary)
        self._sandbox.start(in_background=in_background)
        return vocabulary

    def _build_unsliced(self, tokens: GrammarVocabulary) -> LLTokenizer:
        try:
            return tokens.to_llguidance()
        except ValueError as error:
            assert self._sandbox is not None, "the sandbox starts with the tokens"
            self._sandbox.close()
            raise InvalidRequest("grammar", f"llguidance does not support this model's tokenizer: {error}") from error

    def _cached(self, digest: bytes) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._cache.get(digest)
            if compiled is None or compiled.exhausted:
                return None
            self._cache.move_to_end(digest)
            return compiled

    def _add_to_cache(self, digest: bytes, compiled: CompiledGrammar) -> None:
        """Add a compiled grammar and evict the least recently used ones."""
        with self._lock:
            self._cache[digest] = compiled
            while len(self._cache) > _MAX_CACHED or self._cached_bytes() > _MAX_CACHED_BYTES:
                self._cache.popitem(last=False)

    def _cached_bytes(self) -> int:
        return sum(len(compiled.source) for compiled in self._cache.values())


def readable_error(error: str) -> str:
    """A message of llguidance in one line, without its excerpt of the source and its location."""
    if error.startswith("NoExtension"):
        return "no text matches this grammar"
    message = _LOCATION.sub("", _EXCERPT.split(error.replace("<non-verbose/>", ""))[0].strip())
    _, is_regex, detail = message.partition("regex parse error:")
    if is_regex:
        message = f"invalid regular expression: {detail.split('error: ')[-1]}"
    return " ".join(message.split())[:_MAX_REASON_LENGTH]


def nesting_depth(source: str) -> int:
    """The deepest nesting of brackets outside of literals."""
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", _LITERALS.sub("", source)):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _checked_digest(source: str) -> bytes:
    """The digest of a source within the limits of size and nesting. Raises InvalidRequest."""
    try:
        encoded = source.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "grammar", "the grammar contains an unpaired surrogate, which is not a character"
        ) from error
    if len(encoded) > _MAX_SOURCE_BYTES:
        raise InvalidRequest("grammar", f"it has {len(encoded)} bytes, and the limit is {_MAX_SOURCE_BYTES}")
    if (deepest := nesting_depth(source)) > _MAX_NESTING:
        raise InvalidRequest("grammar", f"it nests {deepest} levels deep, and the limit is {_MAX_NESTING}")
    return hashlib.sha256(encoded).digest()
