"""One small tokenizer of every kind of decoder, and the expected text of token streams.

`python -W ignore -m tests.engine.kit.tokenizers 100000` compares as many random streams.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from os.path import commonprefix
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from engine.output.text import TextStream
from engine.text.tokenizer import Tokenizer
from engine.types.events import TokenLogprob

BROKEN = "\ufffd"
SPECIAL = ["<s>", "</s>", "<pad>"]
ADDED = ["<tool>", "<é>"]
WHOLE = [*"abcdxyzäß世🦙.,!'", *'{}":01', "ab", "世界", "'s", BROKEN]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# A placeholder for invalid bytes, which the tokenizers library decodes differently.
HIDDEN = "\ue000"
SIZE = 400


@cache
def letters() -> dict[int, str]:
    """The letters of bytes in byte-level BPE: printable bytes as themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def byte_pieces() -> list[str]:
    """All bytes, and some longer pieces: whole characters, and parts of two neighbours."""
    table = letters()
    longer = ["ab", " a", "世界", "🦙", "é"]
    parts = [b"\xb8\x96", b"\x96a\xe4", b"a\xf0\x9f", b"\x99\xf0\x9f\xa6"]
    return [*table.values(), *("".join(table[byte] for byte in raw) for raw in (*map(str.encode, longer), *parts))]


def spaced(mark: str, *, behind: bool = False) -> list[str]:
    """Pieces, some with a mark for a space at the start or the end."""
    marked = [piece + mark if behind else mark + piece for piece in WHOLE]
    return [mark, mark * 2, *WHOLE, *marked] if not behind else [*WHOLE, *marked]


def split_before(folder: Path, expression: str) -> None:
    """Split texts by a regular expression before the pre-tokenizer of the folder's tokenizer."""
    file = folder / "tokenizer.json"
    backend = Backend.from_file(str(file))
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    backend.save(str(file))


class Letters(PreTrainedTokenizer):
    """A Python tokenizer that writes bytes as letters, as for tiktoken."""

    def __init__(self, **settings: Any) -> None:
        self._pieces = [*SPECIAL, *self.own_pieces()]
        self._table = {letter: bytes([byte]) for byte, letter in letters().items()}
        super().__init__(bos_token="<s>", eos_token="</s>", pad_token="<pad>", **settings)

    def own_pieces(self) -> list[str]:
        """Tokens without special ones."""
        return byte_pieces()

    @property
    def vocab_size(self) -> int:
        """Tokens without added ones."""
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        """All tokens."""
        return {piece: number for number, piece in enumerate(self._pieces)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [letters()[byte] for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return self._pieces.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces."""
        raw = (
            token.encode() if token in (*SPECIAL, *ADDED) else b"".join(self._table[letter] for letter in token)
            for token in tokens
        )
        return b"".join(raw).decode(errors="replace")


class Stripped(Letters):
    """A Python tokenizer that strips both ends of a text, as transformers does for SentencePiece."""

    def own_pieces(self) -> list[str]:
        """Tokens without special ones."""
        return spaced("\u2581")

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [letter for letter in text.replace(" ", "\u2581") if letter in self._pieces]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces."""
        return "".join(tokens).replace("\u2581", " ").strip()


class Joined(Stripped):
    """A Python tokenizer that joins tokens with spaces, the default of transformers."""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces."""
        return " ".join(tokens)


def _sequence(*parts: Any) -> Any:
    return decoders.Sequence(list(parts))


_SPACE = decoders.Replace("\u2581", " ")
_FALLBACK = (decoders.ByteFallback(), decoders.Fuse())
_LEADING = decoders.Strip(content=" ", left=1, right=0)
# In Python, because the library (tokenizers 0.23) crashes when it strips the end of an empty text.
_TWICE = decoders.Strip(content=" ", left=2, right=0)
_PIECES = spaced("\u2581")
# By kind: the tokens without special ones, and the decoder.
FAST: dict[str, tuple[list[str], Any]] = {
    "byte-level BPE": (byte_pieces(), decoders.ByteLevel()),
    "byte-level BPE in a sequence": (byte_pieces(), _sequence(decoders.ByteLevel(), decoders.Fuse())),
    "byte fallback, Llama 2": (_PIECES + BYTES, _sequence(_SPACE, *_FALLBACK, _LEADING)),
    "byte fallback, Gemma": (_PIECES + BYTES, _sequence(_SPACE, *_FALLBACK)),
    "Unigram, Metaspace": (_PIECES, decoders.Metaspace()),
    "Unigram, byte fallback": (_PIECES + BYTES, _sequence(decoders.ByteFallback(), decoders.Metaspace())),
    "WordPiece": (WHOLE + ["##" + piece for piece in WHOLE], decoders.WordPiece(cleanup=False)),
    "WordPiece, cleaned up": (WHOLE + ["##" + piece for piece in WHOLE], decoders.WordPiece(cleanup=True)),
    "BPEDecoder": (spaced("</w>", behind=True), decoders.BPEDecoder(suffix="</w>")),
    "CTC": ([*WHOLE, "|"], decoders.CTC(pad_token="<pad>", cleanup=False)),
    "Replace, Strip": (_PIECES, _sequence(_SPACE, decoders.Replace("x", "--"), decoders.Fuse(), _TWICE)),
    "Replace by expression": (_PIECES, _sequence(decoders.Replace(Regex("[\u2581y]"), " "), decoders.Fuse())),
}
SLOW: dict[str, type[PreTrainedTokenizer]] = {
    "Python, bytes": Letters,
    "Python, stripped": Stripped,
    "Python, joined": Joined,
}
KINDS = [*FAST, *SLOW]


@cache
def tokenizer_of(kind: str) -> Any:
    """A tokenizer of transformers, with special tokens and added tokens."""
    if kind in SLOW:
        slow = SLOW[kind]()
        slow.add_tokens(ADDED[:1])
        return slow
    pieces, decoder = FAST[kind]
    backend = Backend(models.WordLevel({piece: at for at, piece in enumerate([*SPECIAL, *pieces])}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(ADDED)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@cache
def served(kind: str) -> Tokenizer:
    """The engine's tokenizer of a kind."""
    return Tokenizer(tokenizer_of(kind), vocabulary_size=SIZE, context=1000)


@cache
def vocabulary(kind: str) -> dict[str, int]:
    """The ids of all pieces."""
    known: dict[str, int] = tokenizer_of(kind).get_vocab()
    return known


def whole(kind: str, tokens: Sequence[int], *, special: bool) -> str:
    """The text of all tokens at once; invalid ids have no text.

    The tokenizers library decodes all bytes of an invalid run to U+FFFD. Such runs are decoded as in SentencePiece:
    valid characters stay, and each other byte becomes one U+FFFD.
    """
    reader = tokenizer_of(kind)
    hidden = set() if special else set(reader.all_special_ids)
    pieces = reader.convert_ids_to_tokens([token for token in tokens if token not in hidden])
    pieces = [piece for piece in pieces if piece is not None]
    if "fallback" not in kind:
        return str(reader.decode([vocabulary(kind)[piece] for piece in pieces], clean_up_tokenization_spaces=False))
    shown, runs = _without_broken_runs(pieces)
    text = reader.backend_tokenizer.decoder.decode(shown)
    for run in runs:
        text = text.replace(HIDDEN, run, 1)
    return str(text)


def _without_broken_runs(pieces: Sequence[str]) -> tuple[list[str], list[str]]:
    """The pieces with a placeholder for each invalid run of bytes beyond ASCII, and the texts of the runs."""
    shown: list[str] = []
    runs: list[str] = []
    for part in re.findall(r"(?:<0x[89A-F].>)+|<.*?>|[^<]+", "\x00".join(pieces).replace(">\x00<0x", "><0x")):
        if re.match("<0x[89A-F]", part):
            raw = bytes.fromhex(re.sub("<0x|>", "", part))
            try:
                raw.decode()
            except UnicodeDecodeError:
                text = raw.decode(errors="surrogateescape")
                runs.append(re.sub("[\udc80-\udcff]", BROKEN, text))
                shown.append(HIDDEN)
                continue
            shown += re.findall("<0x..>", part)
        else:
            shown += [piece for piece in part.split("\x00") if piece]
    return shown, runs


def expected(kind: str, prompt: Sequence[int], tokens: Sequence[int], *, special: bool) -> str:
    """The text after a prompt: the text of all tokens without its common prefix with the text of the prompt."""
    before, text = (whole(kind, some, special=special) for some in (prompt, [*prompt, *tokens]))
    return text[len(commonprefix((before, text))) :]


def streamed(kind: str, prompt: Sequence[int], tokens: Sequence[int], *, special: bool) -> list[str]:
    """The text token by token, and the flushed end."""
    decoder = served(kind).detokenizer(prompt, special=special)
    return [*map(decoder.push, tokens), decoder.flush()]


def random_stream(kind: str, chance: Random) -> tuple[list[int], list[int]]:
    """A prompt and tokens after it: pieces, characters in bytes, invalid bytes and special tokens in any order."""
    known = vocabulary(kind)
    numbers = sorted(known.values())
    rare = [known[piece] for piece in (*SPECIAL, *ADDED) if piece in known]

    def some() -> list[int]:
        way = chance.random()
        if way < 0.5:
            raw = chance.choice("é世🦙ß界a ").encode()
            raw = raw[: chance.randrange(1, len(raw) + 1)] if chance.random() < 0.2 else raw
            names = [BYTES[byte] if "fallback" in kind else letters()[byte] for byte in raw]
            return [known[name] for name in names if name in known]
        return [chance.choice(rare if way < 0.6 else numbers)]

    tokens = [token for _ in range(chance.randrange(24)) for token in some()]
    cut = chance.choice([0, 0, chance.randrange(len(tokens) + 1)])
    return tokens[:cut], tokens[cut:]


def faults(kind: str, seed: int) -> list[str]:
    """The errors of one random stream; usually none."""
    chance = Random(f"{kind} {seed}")
    special = chance.random() < 0.5
    prompt, tokens = random_stream(kind, chance)
    text = expected(kind, prompt, tokens, special=special)
    parts = streamed(kind, prompt, tokens, special=special)
    found = []
    if text != "".join(parts):
        found.append(f"{kind} {seed}: {prompt} {tokens} {special}: {text!r} != {parts}")
    if text and not found:
        start = chance.randrange(len(text))
        stop = text[start : start + chance.randrange(1, 4)]
        said = _until(kind, prompt, tokens, stop, special=special)
        if said != text[: text.index(stop)]:
            found.append(f"{kind} {seed}: {prompt} {tokens} {special}: stop {stop!r}: {said!r} of {text!r}")
    return found


def _until(kind: str, prompt: Sequence[int], tokens: Sequence[int], stop: str, *, special: bool) -> str:
    """The text of a stream before a stop string."""
    stream = TextStream(served(kind).detokenizer(prompt, special=special), (stop,))
    deltas = []
    for token in tokens:
        deltas.append(stream.push(token, TokenLogprob(served(kind).describe_token(token, 0.0), ())))
        if stream.stop is not None:
            break
    else:
        deltas.append(stream.flush())
    return "".join(delta.text for delta in deltas if delta)


def main(count: int) -> None:
    """Print a table: the streams of each kind, and the number of errors."""
    wrong: Counter[str] = Counter()
    for kind in KINDS:
        for seed in range(count // len(KINDS) + 1):
            if found := faults(kind, seed):
                wrong[kind] += 1
                if wrong[kind] <= 3:
                    print(*found, sep="\n", file=sys.stderr)
        print(json.dumps({"kind": kind, "streams": count // len(KINDS) + 1, "differ": wrong[kind]}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
