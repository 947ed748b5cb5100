"""The kernels of a device that read and write cells, as one object: they share tables of the batch on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.attention_input import AttentionInput, RowAttentionInput
from engine.kernels.latent import LatentProjection
from engine.types.request import MlaMode
from kvcache.forward import Segment
from kvcache.kv_buffer import CellIndex, LayerKV
from kvcache.spec import GroupSpec


class KernelUnavailable(Exception):
    """Kernels that this machine cannot compile or run, or that compute something else than the reference."""


class CellKernels(ABC):
    """An AttentionFunction with its latent attention and its store."""

    @abstractmethod
    def __call__(self, inputs: AttentionInput) -> Tensor:
        """See reference.attend."""

    @abstractmethod
    def attend_latent(self, inputs: AttentionInput, projection: LatentProjection, *, mode: MlaMode = "auto") -> Tensor:
        """See latent.attend."""

    @abstractmethod
    def attend_rows(self, inputs: RowAttentionInput) -> Tensor:
        """See row_attention.attend_rows."""

    @abstractmethod
    def attend_latent_rows(self, inputs: RowAttentionInput, projection: LatentProjection) -> Tensor:
        """See row_attention.attend_latent_rows."""

    @abstractmethod
    def store(self, keys: LayerKV, values: LayerKV, cells: CellIndex, key_rows: Tensor, value_rows: Tensor) -> None:
        """See kvcache.kv_buffer.store_rows."""

    @abstractmethod
    def batch_arrays(self, groups: Iterable[tuple[GroupSpec, Sequence[Segment]]], rows: int) -> list[NDArray[np.int32]]:
        """Tables of the segments of a batch with `rows` rows, for the device; see `set_batch_arrays`.

        An earlier batch had the same layers. Tables of other layers are copied when a layer needs them.
        """

    @abstractmethod
    def set_batch_arrays(self, arrays: Sequence[Tensor]) -> None:
        """Use the copies of the last `batch_arrays` on the device."""
