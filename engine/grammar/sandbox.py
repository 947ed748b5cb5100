"""A subprocess that compiles each grammar first, and matches some tokens.

llguidance limits most costs of a grammar, but some grammars take minutes or gigabytes, or crash the process; here they
end the subprocess only. It imports this file, which therefore imports nothing but llguidance.
"""

from __future__ import annotations

import io
import json
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.sandbox import SandboxProcess, limit_memory, limited_time

# A state of the lexer takes 1 to 2 kB; usual grammars reach a few hundred. The time of a parser row grows with
# the square of its items: 2,000 (the default) keep a mask near 100 ms, 10,000 took 12 s.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    # Less than the default, with which nested repetitions compute for seconds.
    initial_lexer_fuel=400_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
LOG_LEVEL = 0
# For one mask, llguidance would compute all of an endless forced text, as of /a+/ "a". The last declaration counts.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

# Processor time of a check: elapsed time depends on the other work of the machine.
_MAX_COMPILE_SECONDS = 5.0
# Processor time of one mask and one token.
_MAX_STEP_SECONDS = 0.2
_MEMORY_BYTES = 256 * 2**20
# Tokens of a random text that are matched.
_SAMPLED_TOKENS = 16
_NICE_INCREMENT = 5
# Wait of a grammar for a subprocess in the background: a busy machine may leave it without a processor.
_BACKGROUND_SECONDS = 1.0

COMPILE_LIMIT_EXCEEDED = "it takes too long or too much memory to compile"
STEP_LIMIT_EXCEEDED = "it takes too long to match"


class GrammarVocabulary:
    """A tokenizer in the interface of `llguidance.TokenizerWrapper`.

    tokens   the bytes of each token; empty for ids without a token, which are never permitted
    markers  special tokens, which are never part of a text
    encode   the canonical tokens of a text
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
        """Build the vocabulary of llguidance without slices; holds the GIL, 0.5 s with 262,000 tokens."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self.end_tokens, slices=[])


def with_slices(vocabulary: LLTokenizer) -> LLTokenizer:
    """Add the slices that speed up masks; holds the GIL, 0.6 s with 262,000 tokens."""
    return vocabulary.with_slices(LLTokenizer.general_slices())


# Of a check whose subprocess is killed, as by a machine without memory.
_ATTEMPTS = 2


class GrammarSandbox:
    """The subprocess, started on demand. For one thread at a time."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        lengths = [len(token) for token in vocabulary.tokens]
        numbers = json.dumps([lengths, vocabulary.special_token_ids, vocabulary.end_tokens])
        self._vocabulary = numbers.encode(), b"".join(vocabulary.tokens)
        self._process = SandboxProcess(__name__)
        self._is_ready = self._in_background = False

    def check(self, source: str) -> str:
        """Why the grammar must not be compiled in this process, or "". Raises TimeoutError without an answer.

        A subprocess that another process killed is replaced once.
        """
        for _ in range(_ATTEMPTS):
            try:
                pipe = self._wait_ready()
                pipe.send_bytes(source.encode())
                return self._process.receive().decode()
            except (EOFError, BrokenPipeError, ConnectionResetError):
                was_killed = self._process.was_killed()
                self.close()
                if not was_killed:
                    return COMPILE_LIMIT_EXCEEDED
        raise TimeoutError("the sandbox of grammars was killed")

    def close(self) -> None:
        """End the subprocess; the next check starts another one."""
        self._process.close()

    def start(self, *, in_background: bool = False) -> Connection:
        """Start the subprocess if it does not run, without a wait for its vocabulary.

        in_background  whether the vocabulary is built in time that no other process needs
        """
        pipe, is_new = self._process.connect(_MAX_COMPILE_SECONDS, int(in_background))
        if is_new:
            self._is_ready, self._in_background = False, in_background
            for part in self._vocabulary:
                pipe.send_bytes(part)
        return pipe

    def _wait_ready(self) -> Connection:
        pipe = self.start()
        if not self._is_ready:
            if self._in_background and not pipe.poll(_BACKGROUND_SECONDS):
                # Its priority cannot be raised.
                self.close()
                pipe = self.start()
            self._process.receive()
            self._is_ready = True
        return pipe


def serve(pipe: Connection, max_seconds: str, in_background: str) -> None:
    """The main loop of the subprocess, until the pipe is closed or a check takes `max_seconds` of processor time."""
    os.nice(_NICE_INCREMENT)
    lengths, markers, end_tokens = json.loads(pipe.recv_bytes())
    text = io.BytesIO(pipe.recv_bytes())
    tokens = [text.read(length) for length in lengths]
    vocabulary = GrammarVocabulary(tokens, markers, end_tokens=end_tokens, encode=_encode_nothing)
    with ThreadPoolExecutor(1, initializer=_yield_processor if int(in_background) else None) as thread:
        sliced = thread.submit(lambda: with_slices(vocabulary.to_llguidance())).result()
    pipe.send_bytes(b"")
    limit_memory(_MEMORY_BYTES)
    while True:
        try:
            source = pipe.recv_bytes().decode()
        except EOFError:
            return
        with limited_time(float(max_seconds)):
            fault = _check_grammar(sliced, source)
        pipe.send_bytes(fault.encode())


def _yield_processor() -> None:
    """Run the calling thread in time that no other thread of the machine needs (Linux only)."""
    if sys.platform == "linux":
        # A container may forbid it.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _encode_nothing(text: str) -> list[int]:
    """The sandbox samples tokens from masks and encodes no text."""
    return []


def _check_grammar(vocabulary: LLTokenizer, source: str) -> str:
    matcher = LLMatcher(
        vocabulary, LLMatcher.grammar_from_lark(source + NO_FORCING), limits=LIMITS, log_level=LOG_LEVEL
    )
    generator = random.Random(0)
    # The first mask builds most of the lexer, and counts as compilation.
    token = _random_token(matcher.compute_bitmask(), generator)
    for _ in range(_SAMPLED_TOKENS):
        if token is None or matcher.is_error():
            break
        began = time.thread_time()
        matcher.consume_token(token)
        token = _random_token(matcher.compute_bitmask(), generator)
        if time.thread_time() - began > _MAX_STEP_SECONDS:
            return STEP_LIMIT_EXCEEDED
    # Errors of llguidance occur in the parent process too, which reports them.
    return ""


def _random_token(mask: bytes, generator: random.Random) -> int | None:
    """A token of a bitmask; None for an empty one."""
    start = generator.randrange(len(mask))
    rotated = mask[start:] + mask[:start]
    zeros = len(rotated) - len(rotated.lstrip(b"\0"))
    if zeros == len(mask):
        return None
    byte = rotated[zeros]
    return (start + zeros) % len(mask) * 8 + generator.choice([bit for bit in range(8) if byte >> bit & 1])
