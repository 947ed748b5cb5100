"""Runs a decoder of the common shape over the spans of one forward in one native call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.cpu.native import FORMATS, REACHES, Rows, SegmentFields, plane_fields, segment_fields
from engine.native.attention import angles
from engine.native.decoder import Decoder, Turn
from engine.native.description import describe_layers, describe_linear, describe_norm
from engine.native.library import CellsFields, LayerFields, Library, StepFields, TurnFields
from engine.runner import Runner
from engine.sight import Sight
from kvcache.forward import Forward, Segment
from kvcache.planes import FloatPlane, Plane, Stored


class NativeRunner(Runner):
    """As the runner that it stands for, a few roundings apart. What the native step cannot do, that one does.

    Belongs to the engine thread.
    """

    def __init__(self, plain: Runner, decoder: Decoder, library: Library, *, rounds: bool = True) -> None:
        """Raises NoShape where a matrix is stored in a way that the step does not read.

        rounds  whether rows may be rounded to bfloat16 to meet weights in it, where the processor is faster so
        """
        super().__init__(plain._model, plain.layers, plain._mla, plain._attend)
        self._decoder, self._library, self._rounds = decoder, library, rounds
        self.has_states = True
        self._watched = plain._model.get_decoder()
        self._turns = tuple(dict.fromkeys(attention.way.turn for attention, _ in decoder.layers))
        layers = describe_layers(decoder, self._turns)
        self._fields = (LayerFields * len(layers))(*layers)
        self._planes: list[Plane | None] = [None] * len(layers)
        self._format = FORMATS[torch.float32]
        self._last, self._head = describe_norm(decoder.ending.norm), describe_linear(decoder.ending.head)

    def run(
        self, forward: Forward, tokens: Sequence[int], wanted: Sequence[int], sights: Sequence[Sight | None] = ()
    ) -> Tensor:
        """Logits [wanted, vocabulary] after an open forward's rows, see Runner."""
        if not self._can(forward, sights):
            return super().run(forward, tokens, wanted, sights)
        return self._take(forward, tokens, wanted, ())[0]

    def run_with_states(
        self,
        forward: Forward,
        tokens: Sequence[int],
        wanted: Sequence[int],
        pooled: Sequence[int],
        sights: Sequence[Sight | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """As `run`, and the states [pooled, width] of rows as they enter the output layer; both ascending."""
        if not self._can(forward, sights):
            return super().run_with_states(forward, tokens, wanted, pooled, sights)
        return self._take(forward, tokens, wanted, pooled)

    def _can(self, forward: Forward, sights: Sequence[Sight | None]) -> bool:
        """Whether the step computes this: nothing is looked at but earlier tokens, and nobody watches the modules."""
        looks = any(sights) or any(span.mutual for span in forward.spans)
        keys, _ = forward.stored(0)
        stored = isinstance(keys.plane, FloatPlane) and keys.plane.rows.dtype in FORMATS
        # What is hooked into the model's own modules, such as a draft head's ear, hears nothing of a native step.
        return stored and not looks and not self._watched._forward_hooks

    def _take(
        self, forward: Forward, tokens: Sequence[int], wanted: Sequence[int], pooled: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            # The rows [rows, width] that the first layer takes; they are overwritten.
            states = self._decoder.embedding[self._tensor(tokens)].float() * self._decoder.scale
            kept = self._tensor([*wanted, *pooled])
            kept_states = states.new_empty(len(kept), states.shape[1])
            logits = states.new_empty(len(wanted), self._head.outputs)
            positions = self._tensor([at for span in forward.spans for at in range(span.start, span.stop)])
            turns = [angles(turn, positions) for turn in self._turns]
            # Whatever the step reads by its address must live until it is over.
            step = self._describe(forward, turns)
            step.states, (step.rows, step.width) = states.data_ptr(), states.shape
            step.kept, step.kept_count, step.wanted_count = kept.data_ptr(), len(kept), len(wanted)
            step.kept_states, step.logits = kept_states.data_ptr(), logits.data_ptr()
            self._library.take(step)
            return self._bounded(logits), kept_states[len(wanted) :]

    def _bounded(self, logits: Tensor) -> Tensor:
        """Logits of what the head makes, which is overwritten."""
        scale, cap = self._decoder.ending.scale, self._decoder.ending.softcap
        scaled = logits if scale == 1.0 else logits.mul_(scale)
        return scaled if cap == 0.0 else scaled.div_(cap).tanh_().mul_(cap)

    def _describe(self, forward: Forward, turns: Sequence[tuple[Tensor, Tensor]]) -> StepFields:
        """The step but for its rows; the forward holds the tables that it reads."""
        cells: dict[int, CellsFields] = {}
        # The planes of a cache stay where they are.
        if forward.stored(0)[0].plane is not self._planes[0]:
            for at in range(len(self._fields)):
                self._place(forward, at)
        for at, fields in enumerate(self._fields):
            segments = forward.segments(at)
            if id(segments) not in cells:
                cells[id(segments)] = _cells(segments, forward.stored(at)[0])
            fields.cells = list(cells).index(id(segments))
        return StepFields(
            layers=self._fields,
            layer_count=len(self._fields),
            turns=(TurnFields * len(turns))(*map(_turn, self._turns, turns)),
            cells=(CellsFields * len(cells))(*cells.values()),
            cells_count=len(cells),
            format=self._format,
            last=self._last,
            head=self._head,
            rounds=self._rounds,
            threads=torch.get_num_threads(),
        )

    def _place(self, forward: Forward, at: int) -> None:
        """Let a layer's fields name its planes."""
        keys, values = forward.stored(at)
        assert isinstance(keys.plane, FloatPlane)
        assert isinstance(values.plane, FloatPlane)
        fields, reach = self._fields[at], forward.reach(at)
        fields.key_plane = plane_fields(Rows(keys.plane.rows[keys.layer]))
        fields.value_plane = plane_fields(Rows(values.plane.rows[values.layer]))
        fields.reach, fields.reach_size = REACHES[reach.kind], reach.size
        self._planes[at], self._format = keys.plane, FORMATS[keys.plane.rows.dtype]


def _cells(segments: Sequence[Segment], keys: Stored) -> CellsFields:
    assert isinstance(keys.plane, FloatPlane)
    described = (SegmentFields * len(segments))(*map(segment_fields, segments))
    return CellsFields(described, len(segments), keys.plane.rows.shape[2])


def _turn(turn: Turn, angles: tuple[Tensor, Tensor]) -> TurnFields:
    cosine, sine = angles
    rotation = turn.rotation
    return TurnFields(
        cosine.data_ptr(), sine.data_ptr(), cosine.shape[1], rotation.offset, rotation.layout == "interleaved"
    )
