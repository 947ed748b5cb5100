"""Runs a decoder of the common shape over the spans of one forward in one native call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.attention import (
    FORMATS,
    REACHES,
    KernelBuffer,
    address,
    kernel_buffer,
    kv_buffer_fields,
    segment_table,
    write_segments,
)
from engine.model.encoder_mask import EncoderMask
from engine.model.runner import PackedRunner
from engine.native.attention import rotary_angles, switched_rotary_angles
from engine.native.decoder import AttentionSpec, DecoderSpec, RotarySpec
from engine.native.description import (
    describe_embedding,
    describe_layers,
    describe_linear,
    describe_norm,
    describe_rotary,
    recurrence_fields,
)
from engine.native.draft_loop import (
    DraftLoopInput,
    describe_draft_loop,
    draw_spec_table,
    has_native_filters,
    is_native_draw,
)
from engine.native.recurrent_states import RecurrentStates
from engine.native.sampler import SamplingCall
from engine.native.step_library import CellsFields, LayerFields, RotaryFields, StepFields, StepLibrary
from engine.sample.logprobs import at_least_float32
from engine.sample.sampler import SamplingContext, modified_logits, sample_tokens
from kvcache.attention_group import AttentionGroup
from kvcache.forward import Forward
from kvcache.kv_buffer import LayerKV


@dataclass(frozen=True, slots=True)
class _OutputBuffers:
    """Where a step writes, with the addresses: logits [rows, vocabulary], and states of as many rows or more."""

    rows: int
    logits: Tensor
    states: Tensor
    logits_address: int
    states_address: int

    @classmethod
    def allocate(cls, wanted: int, kept: int, vocabulary: int, width: int) -> _OutputBuffers:
        """Room for the logits of `wanted` rows, and the states of `kept`."""
        logits, states = torch.empty(wanted, vocabulary), torch.empty(kept, width)
        return cls(wanted, logits, states, logits.data_ptr(), states.data_ptr())


class NativeRunner(PackedRunner):
    """As the runner that it stands for, a few roundings apart. What the native step cannot do, that one does.

    Belongs to the engine thread.
    """

    def __init__(
        self,
        plain: PackedRunner,
        decoder: DecoderSpec,
        library: StepLibrary,
        *,
        rounds: bool = True,
        extended: DecoderSpec | None = None,
    ) -> None:
        """Raises UnsupportedArchitecture where a matrix is stored in a way that the step does not read.

        rounds    whether rows may be rounded to bfloat16 to meet weights, keys and values in it, where the processor is
                  faster so
        extended  the decoder as it turns beyond the original length, if the model's rotary factors change
        """
        super().__init__(plain._model, plain.layers, plain._mla, plain._attend)
        self.switch, self.extended_layers = plain.switch, plain.extended_layers
        self._decoder, self._library = decoder, library
        self.has_hidden_states = True
        self._watched = plain._model.get_decoder()
        ways = [attention.mixer for attention, _ in decoder.layers]
        turns = _turns(decoder)
        self._turns = tuple(dict.fromkeys(turns))
        self._extended = {} if extended is None else dict(zip(turns, _turns(extended), strict=True))
        layers = describe_layers(decoder, self._turns)
        self._fields = (LayerFields * len(layers))(*layers)
        # Those that store cells, in the order of the cache, and those that keep states.
        pairs = list(zip(ways, self._fields, strict=True))
        self._storing = [own for way, own in pairs if isinstance(way, AttentionSpec)]
        self._recurring = [
            (way, recurrence_fields(way, own)) for way, own in pairs if not isinstance(way, AttentionSpec)
        ]
        self._head = describe_linear(decoder.output_head.head)
        self._common = self._describe_common(decoder, rounds)
        # Of the cache that was read last: its groups and the first layer of each, and for each way to turn the angles
        # of all positions. Those take less than a hundredth of what the cells of as many tokens do.
        self._settled: tuple[AttentionGroup, ...] | None = None
        self._firsts: list[int] = []
        self._cells = (CellsFields * 0)()
        self._angles: list[tuple[Tensor, Tensor]] = []
        self._places = array("q")
        # The segments of steps of so many spans, by groups.
        self._spans = 0
        self._tables: list[array[int]] = []
        # Where logits go that nobody but `tell` sees, and what draws from them.
        self._unseen = self._output(0, 0)
        self._drawing = self._drawn(self._unseen)

    def run(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> Tensor:
        """Logits [wanted, vocabulary] after an open forward's rows, see Runner."""
        if not self.supports(forward, encoder_masks):
            return super().run(forward, tokens, logit_rows, encoder_masks)
        output = self._output(len(logit_rows), len(logit_rows))
        self._take(forward, tokens, logit_rows, (), output)
        return self._bounded(output.logits)

    def run_with_hidden_states(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        hidden_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """As `run`, and the states [pooled, width] of rows as they enter the output layer; both ascending."""
        if not self.supports(forward, encoder_masks):
            return super().run_with_hidden_states(forward, tokens, logit_rows, hidden_rows, encoder_masks)
        output = self._output(len(logit_rows), len(logit_rows) + len(hidden_rows))
        self._take(forward, tokens, logit_rows, hidden_rows, output)
        return self._bounded(output.logits), output.states[len(logit_rows) :]

    def run_and_sample(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None],
        draws: Sequence[SamplingContext],
    ) -> list[int | None]:
        """As `sample` after `run`, without a tensor that torch makes: behind a step its code is in no cache of the
        processor any more, so the first of them takes it 60 microseconds.
        """
        if not (self.supports(forward, encoder_masks) and all(map(is_native_draw, draws))):
            return super().run_and_sample(forward, tokens, logit_rows, encoder_masks, draws)
        if self._unseen.rows < len(logit_rows):
            # What was never written is no memory yet, and what is new becomes it page by page, in the midst of a step.
            room = 1 << (len(logit_rows) - 1).bit_length()
            self._unseen = self._output(room, room)
            self._drawing = self._drawn(self._unseen)
        # What can be done before the step is: behind it every line of Python comes from memory again.
        self._drawing.describe(draws)
        self._take(forward, tokens, logit_rows, (), self._unseen)
        if not self._decoder.output_head.is_linear:
            self._bounded(self._unseen.logits[: len(logit_rows)])
        self._library.sample(self._drawing.fields)
        return self._drawing.tokens

    def sample(self, logits: Tensor, draws: Sequence[SamplingContext]) -> list[int | None]:
        """What `emit` says, in one native call where that knows how. A row is drawn alike whatever is beside it."""
        known = [
            row
            for row, draw in enumerate(draws)
            if is_native_draw(draw) or (has_native_filters(draw) and not draw.greedy)
        ]
        if all(map(is_native_draw, draws)):
            return self._choose(logits, draws)
        said: list[int | None] = [None] * len(draws)
        for row in set(range(len(draws))).difference(known):
            (said[row],) = sample_tokens(logits[row : row + 1], [draws[row]])
        if known:
            shaped = torch.stack([modified_logits(at_least_float32(logits[row]), draws[row]) for row in known])
            for row, token in zip(known, self._choose(shaped, [draws[row] for row in known]), strict=True):
                said[row] = token
        return said

    def _choose(self, logits: Tensor, draws: Sequence[SamplingContext]) -> list[int | None]:
        whole = at_least_float32(logits).contiguous()
        drawing = SamplingCall(len(draws), whole.data_ptr(), whole.shape[1])
        drawing.describe(draws)
        self._library.sample(drawing.fields)
        return drawing.tokens

    def run_draft_loop(self, forward: Forward, links: Sequence[DraftLoopInput], choices: int) -> list[list[int]]:
        """What each link says, from the first so many tokens: fewer than asked for where logits are not finite.

        forward  open, with a span of `rows` for each link; whether it runs here can be asked of `chains`
        """
        assert self.supports_draft_loop(forward), "whether it runs here was not asked"
        deepest = max(link.count for link in links)
        said = array("q", bytes(8 * len(links) * deepest))
        tokens = array("q", [token for link in links for token in link.tokens])
        table, step = draw_spec_table(links), self._describe(forward)
        self._library.run_draft_loop(describe_draft_loop(self._decoder, step, table, tokens, choices, said))
        rows = [said[at * deepest : (at + 1) * deepest] for at in range(len(links))]
        return [[token for token in own if token >= 0] for own in rows]

    def supports_draft_loop(self, forward: Forward) -> bool:
        """Whether `say` computes this: what it takes back are cells, not states."""
        return not self._recurring and self.supports(forward)

    def supports(self, forward: Forward, sights: Sequence[EncoderMask | None] = ()) -> bool:
        """Whether the step computes this: nothing is looked at but earlier tokens, and nobody watches the modules."""
        looks = any(sights) or any([span.bidirectional for span in forward.spans])
        # What is hooked into the model's own modules, such as a draft head's ear, hears nothing of a native step.
        return not looks and not self._watched._forward_hooks and self._reads(forward)

    def _reads(self, forward: Forward) -> bool:
        """Whether it reads cells as these are stored."""
        if forward.groups is self._settled:
            return True
        return not self._storing or all(map(kernel_buffer, forward.layer_kv(0)))

    def _describe_common(self, decoder: DecoderSpec, rounds: bool) -> StepFields:
        """What all steps have in common; each fills in the rest."""
        return StepFields(
            width=decoder.embedding.shape[1],
            embedding=describe_embedding(decoder),
            layers=self._fields,
            layer_count=len(self._fields),
            last=describe_norm(decoder.output_head.norm),
            head=self._head,
            rounds=rounds,
        )

    def _output(self, wanted: int, kept: int) -> _OutputBuffers:
        return _OutputBuffers.allocate(wanted, kept, self._head.outputs, self._common.width)

    def _drawn(self, output: _OutputBuffers) -> SamplingCall:
        return SamplingCall(output.rows, output.logits_address, self._head.outputs)

    def _take(
        self,
        forward: Forward,
        tokens: Sequence[int],
        wanted: Sequence[int],
        pooled: Sequence[int],
        output: _OutputBuffers,
    ) -> None:
        """Compute the step, with the logits of the rows `wanted`, and the states of these and behind them `pooled`."""
        # Whatever the step reads by its address must live until it is over.
        read, kept, step = array("q", tokens), array("q", (*wanted, *pooled)), self._describe(forward)
        step.tokens, step.kept = address(read), address(kept)
        step.kept_count, step.wanted_count = len(kept), len(wanted)
        step.kept_states, step.logits = output.states_address, output.logits_address
        states = self._open(forward, step) if self._recurring else None
        self._library.run_step(step)
        if states is not None:
            states.commit()

    def _open(self, forward: Forward, step: StepFields) -> RecurrentStates:
        """Let the layers that keep states name those of a forward."""
        states = RecurrentStates(forward)
        for way, fields in self._recurring:
            states.bind(way, fields)
        step.pieces, step.piece_count = states.fields, len(states.fields)
        return states

    def _bounded(self, logits: Tensor) -> Tensor:
        """Logits of what the head makes, which is overwritten."""
        scale, cap = self._decoder.output_head.scale, self._decoder.output_head.softcap
        scaled = logits if scale == 1.0 else logits.mul_(scale)
        return scaled if cap == 0.0 else scaled.div_(cap).tanh_().mul_(cap)

    def _describe(self, forward: Forward) -> StepFields:
        """The step but for what its rows are and who asks for them, of an open forward that `supports` has seen."""
        # The planes of a cache stay where they are.
        if forward.groups is not self._settled:
            self._settle(forward)
        if len(forward.spans) != self._spans:
            self._lay_tables(forward)
        for at, table in zip(self._firsts, self._tables, strict=True):
            write_segments(table, forward.segments(at))
        step = self._common
        step.angles = self._place_angles(forward)
        step.rows, step.threads = forward.batch_tokens, torch.get_num_threads()
        return step

    def _lay_tables(self, forward: Forward) -> None:
        """Let all steps of as many spans have their segments at one place."""
        self._spans = len(forward.spans)
        self._tables = [segment_table(forward.segments(at)) for at in self._firsts]
        for cells, table in zip(self._cells, self._tables, strict=True):
            cells.segments, cells.count = address(table), self._spans

    def _settle(self, forward: Forward) -> None:
        """Let all layers name the planes of a cache, and the cells that they share with others."""
        shared: dict[int, int] = {}
        self._firsts = []
        for at, fields in enumerate(self._storing):
            self._place(forward, at)
            segments = id(forward.segments(at))
            if segments not in shared:
                shared[segments] = len(shared)
                self._firsts.append(at)
            fields.cells = shared[segments]
        self._cells = (CellsFields * len(self._firsts))(*[_cells(forward, at) for at in self._firsts])
        self._spans = 0
        self._common.cells, self._common.cells_count = self._cells, len(self._firsts)
        positions = torch.arange(forward.capacity)
        self._angles = [self._angles_of(turn, positions) for turn in self._turns]
        self._common.turns = (RotaryFields * len(self._turns))(*map(describe_rotary, self._turns, self._angles))
        self._settled = forward.groups

    def _angles_of(self, turn: RotarySpec, positions: Tensor) -> tuple[Tensor, Tensor]:
        extended = self._extended.get(turn)
        if self.switch is None or extended is None:
            return rotary_angles(turn, positions)
        return switched_rotary_angles(turn, extended, positions, self.switch.original_length)

    def _place_angles(self, forward: Forward) -> int | None:
        """The address of the rows' places in the tables of angles; None where these are their positions."""
        if self.switch is None or not any([span.long_factors for span in forward.spans]):
            return None
        starts = [(span.start + forward.capacity * span.long_factors, span.length) for span in forward.spans]
        self._places = array("q", [at for start, length in starts for at in range(start, start + length)])
        return address(self._places)

    def _place(self, forward: Forward, at: int) -> None:
        """Let a layer's fields name its planes."""
        keys, values = map(_stored, forward.layer_kv(at))
        fields, reach = self._storing[at], forward.attention_range(at)
        fields.key_plane, fields.value_plane = kv_buffer_fields(keys), kv_buffer_fields(values)
        fields.reach, fields.reach_size = REACHES[reach.kind], reach.size
        self._common.format = FORMATS[keys.numbers.dtype]


def _turns(decoder: DecoderSpec) -> list[RotarySpec]:
    """How the layers that store cells turn, in order."""
    ways = (attention.mixer for attention, _ in decoder.layers)
    return [way.rotary for way in ways if isinstance(way, AttentionSpec)]


def _cells(forward: Forward, at: int) -> CellsFields:
    """The cells of a layer's group, with no rows yet."""
    return CellsFields(cells=_stored(forward.layer_kv(at)[0]).numbers.shape[1])


def _stored(stored: LayerKV) -> KernelBuffer:
    """The keys or values of a layer, in a format that `_reads` has seen."""
    rows = kernel_buffer(stored)
    assert rows is not None, "a format that the step does not read"
    return rows
