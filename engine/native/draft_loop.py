"""A draft loop: several steps in one native call, each of which samples a token for every sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import pointer

from engine.kernels.cpu.attention.attention import address
from engine.native.decoder import DecoderSpec
from engine.native.sampler import write_context
from engine.native.step_library import SAMPLING_CONTEXT, DraftLoopFields, StepFields
from engine.run.runner import DraftLoopInput


def describe_draft_loop(
    decoder: DecoderSpec,
    step: StepFields,
    contexts: array[int],
    tokens: array[int],
    sampled: array[int],
) -> DraftLoopFields:
    """The fields of a draft loop, valid as long as the arguments.

    step      with the segments of all steps, and a head with the outputs that are sampled
    contexts  of context_table
    sampled   [sequences, largest count], to be written
    """
    count = len(contexts) * contexts.itemsize // SAMPLING_CONTEXT.size
    return DraftLoopFields(
        step=pointer(step),
        contexts=address(contexts),
        sequence_count=count,
        tokens=address(tokens),
        logits_scale=decoder.output_head.scale,
        softcap=decoder.output_head.softcap,
        vocabulary=min(step.embedding.count, step.head.outputs),
        max_count=len(sampled) // count,
        sampled=address(sampled),
    )


def context_table(inputs: Sequence[DraftLoopInput]) -> array[int]:
    """The SamplingContext (step.h) of each sequence."""
    table = array("q", bytes(SAMPLING_CONTEXT.size * len(inputs)))
    for index, sequence in enumerate(inputs):
        write_context(table, index, sequence.context, length=len(sequence.tokens), count=sequence.count)
    return table
