"""A process that compiles grammars before this one does, and follows them a little.

llguidance bounds most of what a grammar costs, but not all: some need minutes or gigabytes, or end the process. There
they end only the other one. It runs this file by itself, so nothing but llguidance is imported here.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# A lexer's state has 1 to 2 kB. Of a grammar only a few hundred are ever met, unless it is made to have many. A row's
# cost grows with the square of its items: 2,000 (llguidance's default) keep a mask near 100 ms, 10,000 took 12 s.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    # Less than the default, which lets nested repetitions compute for seconds.
    initial_lexer_fuel=400_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
LOG_LEVEL = 0
# Of a text that is forced without end, as by /a+/ "a", llguidance would compute all, for one mask. The last one counts.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

# Of elapsed time: the machine may be busy. A new process reads the vocabulary first, a second for 150,000 tokens.
_START_TIMEOUT_SECONDS, _COMPILE_TIMEOUT_SECONDS = 60.0, 5.0
# It is waited for in so many parts: where both processes were suspended, only one part is lost.
_POLLS = 10
# Of processor time, by one mask or one token.
_MAX_STEP_SECONDS = 0.2
_MEMORY_BYTES = 256 * 2**20
# How much of a text is tried.
_SAMPLED_TOKENS = 16
_NICE_INCREMENT = 5

_DEVNULL = subprocess.DEVNULL
COMPILE_LIMIT_EXCEEDED = "it takes too long or too much memory to be compiled"
STEP_LIMIT_EXCEEDED = "it takes too long to be followed"


class Vocabulary:
    """What llguidance is told of a tokenizer (`llguidance.TokenizerWrapper`).

    tokens   the bytes of each; none for numbers that are no tokens, which are never allowed
    markers  those that are never a part of text
    spell    the tokens of a text, as the model would choose them
    """

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], markers: list[int], *, end_tokens: list[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id, self._encode = tokens, markers, end_tokens[0], encode
        self.end_tokens = end_tokens

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)

    def to_llguidance(self) -> LLTokenizer:
        """The same as llguidance has it. Other threads wait for this: 1.3 s of processor time for 262,000 tokens."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self.end_tokens)


class GrammarSandbox:
    """The other process, started where it is needed. One thread at a time may ask it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        lengths = [len(token) for token in vocabulary.tokens]
        numbers = json.dumps([lengths, vocabulary.special_token_ids, vocabulary.end_tokens])
        self._vocabulary = numbers.encode(), b"".join(vocabulary.tokens)
        self._pipe: Connection | None = None
        self._ready = False
        self._end: Callable[[], object] = lambda: None

    def check(self, source: str) -> str:
        """Why a grammar shall not be compiled in this process; "": nothing is known against it."""
        pipe = self._wait_ready()
        try:
            pipe.send_bytes(source.encode())
            if _poll(pipe, _COMPILE_TIMEOUT_SECONDS):
                return pipe.recv_bytes().decode()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        self.close()
        return COMPILE_LIMIT_EXCEEDED

    def close(self) -> None:
        """End the process; another one is started where one is needed again."""
        self._end()
        self._pipe, self._ready = None, False

    def start(self) -> Connection:
        """Begin to start the process, if it does not run."""
        if self._pipe is None:
            self._pipe = self._start()
        return self._pipe

    def _wait_ready(self) -> Connection:
        pipe = self.start()
        if not self._ready:
            if not _poll(pipe, _START_TIMEOUT_SECONDS):
                self.close()
                raise TimeoutError("the process that tries grammars does not start")
            pipe.recv_bytes()
            self._ready = True
        return pipe

    def _start(self) -> Connection:
        here, there = Pipe()
        # Isolated, or the files beside this one would stand before the standard library's.
        command = [sys.executable, "-I", __file__, str(there.fileno())]
        # What it says when it ends is no fault of ours, and a signal from the terminal is not meant for it.
        process = subprocess.Popen(
            command, pass_fds=[there.fileno()], stdin=_DEVNULL, stderr=_DEVNULL, start_new_session=True
        )
        there.close()
        self._end = weakref.finalize(self, _terminate, process, here)
        for part in self._vocabulary:
            here.send_bytes(part)
        return here


def _poll(pipe: Connection, seconds: float) -> bool:
    """Whether something can be read within so many seconds."""
    return any(pipe.poll(seconds / _POLLS) for _ in range(_POLLS))


def _terminate(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()


def _serve(pipe: Connection) -> None:
    """The work of the other process, until the pipe is closed."""
    os.nice(_NICE_INCREMENT)
    lengths, markers, ends = json.loads(pipe.recv_bytes())
    text = io.BytesIO(pipe.recv_bytes())
    vocabulary = Vocabulary(
        [text.read(length) for length in lengths], markers, end_tokens=ends, encode=_encode_nothing
    ).to_llguidance()
    pipe.send_bytes(b"")
    _limit_memory()
    while True:
        try:
            source = pipe.recv_bytes().decode()
        except EOFError:
            return
        # Ends the process, should nobody be there any more to do so.
        signal.alarm(2 * math.ceil(_COMPILE_TIMEOUT_SECONDS))
        fault = _check_grammar(vocabulary, source)
        signal.alarm(0)
        pipe.send_bytes(fault.encode())


def _encode_nothing(text: str) -> list[int]:
    """Nothing is spelt here: tokens are drawn from masks."""
    return []


def _limit_memory() -> None:
    """Let this process have little more than it has by now, where the system tells how much that is."""
    told = Path("/proc/self/statm")
    if told.exists():
        most = int(told.read_text().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _check_grammar(vocabulary: LLTokenizer, source: str) -> str:
    matcher = LLMatcher(
        vocabulary, LLMatcher.grammar_from_lark(source + NO_FORCING), limits=LIMITS, log_level=LOG_LEVEL
    )
    chance = random.Random(0)
    # The first mask builds most of the lexer, and counts as compiling.
    token = _random_token(matcher.compute_bitmask(), chance)
    for _ in range(_SAMPLED_TOKENS):
        if token is None or matcher.is_error():
            break
        began = time.thread_time()
        matcher.consume_token(token)
        token = _random_token(matcher.compute_bitmask(), chance)
        if time.thread_time() - began > _MAX_STEP_SECONDS:
            return STEP_LIMIT_EXCEEDED
    # What it refuses itself, it refuses in the asking process too, and in words.
    return ""


def _random_token(mask: bytes, chance: random.Random) -> int | None:
    """One of the tokens of a mask; None: it has none."""
    start = chance.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    zeros = len(turned) - len(turned.lstrip(b"\0"))
    if zeros == len(mask):
        return None
    byte = turned[zeros]
    return (start + zeros) % len(mask) * 8 + chance.choice([bit for bit in range(8) if byte >> bit & 1])


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
