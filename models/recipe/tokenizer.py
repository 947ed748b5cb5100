"""The byte-level BPE tokenizer of both models, trained on the dialogues themselves.

Words keep one space in front, digits and runs of punctuation stand alone. Some of the standard library's
documentation is mixed in, so that ordinary English does not fall to pieces.
"""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics as python_topics
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.recipe.conversation import render
from models.recipe.dialogues.topics import converse
from models.recipe.plan import POSITIONS, VOCABULARY

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Not special: a server that skips special tokens must still show a tool call as text.
MARKS = ("<tool_call>", "</tool_call>")
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ROWS = 20_000
PYTHON_CHARACTERS = 200_000
TEMPLATE = Path(__file__).with_name("template.jinja")


def train() -> PreTrainedTokenizerFast:
    """A tokenizer with its chat template."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=3,
        special_tokens=[*SPECIAL, *(AddedToken(mark, special=False) for mark in MARKS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(_texts(), trainer)
    bare.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bare,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text(encoding="utf-8").rstrip("\n"),
    )


def load(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `train` saved."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _texts() -> Iterator[str]:
    random = Random(7)
    for _ in range(ROWS):
        yield "".join(segment.text for segment in render(converse(random)))
    yield "\n".join(python_topics.values())[:PYTHON_CHARACTERS]
