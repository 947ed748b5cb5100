"""From the source of a grammar to one that can be followed: compiled once, within limits, off the engine thread."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable

from llguidance import LLTokenizer

from engine.errors import InvalidRequest, Overloaded, TooCostly
from engine.grammar.matcher import Compiled, Matcher
from engine.grammar.sandbox import Trial, Vocabulary
from engine.text.tokenizer import Tokenizer
from engine.types.request import Grammar

_LONGEST_BYTES = 256 * 2**10
# Half of them are a schema's levels. llguidance has limits of its own, but what recurses too deeply ends the process.
_DEEPEST = 128
# Compiled, a grammar takes 30 to 400 times its source (measured).
_KEPT, _KEPT_BYTES = 64, 512 * 2**10
# Tokens of the beginning that are followed, where there is only one.
_FORCED = 16
# How many trials are remembered.
_TRIED = 1024
_PATIENCE_SECONDS = 10.0
_LONGEST_REASON = 500

# Strings, regular expressions and comments of Lark and of the JSON inside it: their brackets nest nothing. What is not
# closed reaches to the end of its line, so that no letter is read twice.
_OPAQUE = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?')
_EXCERPT = re.compile(r"\n[ \t]+\d+ \| ")
_PLACE = re.compile(r"^(?:(?:at )?\d+\(\d+\): )+(?:failed to compile JSON schema: )?")


class Grammars:
    """The grammars of one model. For worker threads: all methods block.

    size  tokens that the model knows
    ends  those that end a text
    """

    def __init__(self, tokenizer: Tokenizer, *, size: int, ends: Iterable[int]) -> None:
        self._tokenizer, self._size, self._ends = tokenizer, size, sorted(ends)
        self._vocabulary: LLTokenizer | None = None
        self._trial: Trial | None = None
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        # What a trial found wrong, by digest.
        self._faults: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def compile(self, grammar: Grammar) -> Compiled:
        """The grammar, ready to be followed. Raises InvalidRequest, and Overloaded where too many are to be compiled.

        One is compiled at a time, so that they take one core at most from those who compute.
        """
        digest = _checked(grammar.source)
        compiled = self._known(digest)
        if compiled is None:
            if not self._compiling.acquire(timeout=_PATIENCE_SECONDS):
                raise Overloaded(1, _PATIENCE_SECONDS)
            try:
                compiled = self._known(digest) or self._compile(digest, grammar.source)
            finally:
                self._compiling.release()
            self._keep(digest, compiled)
        if compiled.error:
            raise InvalidRequest("grammar", readable(compiled.error))
        return compiled

    def matcher(self, grammar: Grammar) -> Matcher:
        """Follows a text from its beginning. Raises as `compile` does."""
        return Matcher(self.compile(grammar), self._size)

    def _compile(self, digest: bytes, source: str) -> Compiled:
        vocabulary = self._tokens()
        self._try(digest, source)
        compiled = Compiled(vocabulary, source)
        if not compiled.error:
            compiled.error = self._first_fault(Matcher(compiled, self._size))
        return compiled

    def _first_fault(self, matcher: Matcher) -> str:
        """What is wrong at the beginning of a text; "": nothing. The first mask builds most of the lexer."""
        for _ in range(2):
            mask = matcher.allowed(())
            if matcher.error or mask is None or not mask.any():
                return matcher.error or "NoExtension"
            for token in matcher.forced(_FORCED):
                matcher.append(token)
        return ""

    def _try(self, digest: bytes, source: str) -> None:
        """TooCostly where another process says so."""
        assert self._trial is not None
        if digest not in self._faults:
            self._faults[digest] = self._trial.fault(source)
            if len(self._faults) > _TRIED:
                self._faults.popitem(last=False)
        if fault := self._faults[digest]:
            raise TooCostly("grammar", fault)

    def prepare(self) -> None:
        """Build what the first grammar would have to wait for; nothing for a model that cannot have grammars."""
        with self._compiling, contextlib.suppress(InvalidRequest):
            self._tokens()

    def _tokens(self) -> LLTokenizer:
        """The vocabulary as llguidance has it: 0.2 seconds and 20 MB for 32,000 tokens, spent where one is needed."""
        if self._vocabulary is None:
            if not self._ends:
                raise InvalidRequest("grammar", "this model has no token that ends a text, and a grammar needs one")
            tokens, markers = self._tokenizer.token_bytes(self._size)
            known = Vocabulary(tokens, markers, ends=self._ends, spell=self._tokenizer.spell)
            self._trial = Trial(known)
            # The other process reads it at the same time.
            self._trial.start()
            try:
                self._vocabulary = known.built()
            except ValueError as error:
                self._trial.close()
                raise InvalidRequest("grammar", f"grammars cannot read this model's tokenizer: {error}") from error
        return self._vocabulary

    def _known(self, digest: bytes) -> Compiled | None:
        with self._lock:
            compiled = self._kept.get(digest)
            if compiled is None or compiled.spent:
                return None
            self._kept.move_to_end(digest)
            return compiled

    def _keep(self, digest: bytes, compiled: Compiled) -> None:
        """Keep it, and let go of those that were not asked for for longest."""
        with self._lock:
            self._kept[digest] = compiled
            while len(self._kept) > _KEPT or sum(len(one.source) for one in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)


def readable(error: str) -> str:
    """What llguidance says, in one line: without the excerpt of the source, and where in it."""
    if error.startswith("NoExtension"):
        return "no text follows this grammar"
    said = _PLACE.sub("", _EXCERPT.split(error.replace("<non-verbose/>", ""))[0].strip())
    _, expression, wrong = said.partition("regex parse error:")
    if expression:
        said = f"invalid regular expression: {wrong.split('error: ')[-1]}"
    return " ".join(said.split())[:_LONGEST_REASON]


def nesting(source: str) -> int:
    """How deeply brackets stand inside brackets."""
    depth = deepest = 0
    for letter in re.findall(r"[()\[\]{}]", _OPAQUE.sub("", source)):
        depth = depth + 1 if letter in "([{" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _checked(source: str) -> bytes:
    """The digest of a source that may be compiled."""
    try:
        encoded = source.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("grammar", "the grammar holds half of a surrogate pair, which is no character") from error
    if len(encoded) > _LONGEST_BYTES:
        raise InvalidRequest("grammar", f"it has {len(encoded)} bytes, and may have {_LONGEST_BYTES}")
    if (deepest := nesting(source)) > _DEEPEST:
        raise InvalidRequest("grammar", f"it nests {deepest} levels deep, and may nest {_DEEPEST}")
    return hashlib.sha256(encoded).digest()
