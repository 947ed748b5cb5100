"""Runs a function of a model in slices of time, between which another thread uses the processor."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor, nn

# Rows of the input that a linear layer computes between two pauses: 10 ms of a layer 768 x 3072 on one slow core.
_BLOCK_ROWS = 128

Result = TypeVar("Result")


class CallFailed(Exception):
    """The function raised an exception, the cause of this one."""


class _Closed(BaseException):
    """Ends the function of a closed call."""


class SlicedCall(Generic[Result]):
    """A call in its own thread, which computes only during `advance`: one thread computes at any time.

    It pauses before each of `modules` and between blocks of rows of the linear layers among them. The blocks do not
    depend on time, so that slices of any length have the same result. Its thread ends with the function, or by `close`.
    """

    def __init__(self, function: Callable[[], Result], modules: Collection[nn.Module]) -> None:
        self._function, self._modules = function, modules
        self._resumed, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="sliced call", daemon=True)
        self._deadline = 0.0
        self._is_closed = self._has_ended = False
        self._results: list[Result] = []
        self._error: Exception | None = None

    @property
    def result(self) -> Result:
        """What the function returned."""
        return self._results[0]

    def advance(self, seconds: float) -> bool:
        """Compute for about `seconds`; whether the function has returned. Raises CallFailed."""
        if not self._results:
            self._deadline = time.perf_counter() + seconds
            self._resume()
        if self._error is not None:
            raise CallFailed from self._error
        return bool(self._results)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        if self._thread.ident is not None:
            if not self._has_ended:
                self._resume()
            self._thread.join()

    def _resume(self) -> None:
        """Let the thread compute until its next pause or its end."""
        if self._thread.ident is None:
            self._thread.start()
        self._resumed.release()
        self._paused.acquire()

    def _pause(self) -> None:
        if threading.current_thread() is not self._thread or time.perf_counter() < self._deadline:
            return
        self._paused.release()
        self._resumed.acquire()
        if self._is_closed:
            raise _Closed

    def _run(self) -> None:
        self._resumed.acquire()
        try:
            with self._pausing():
                self._results.append(self._function())
        except Exception as error:
            self._error = error
        except _Closed:
            pass
        self._has_ended = True
        self._paused.release()

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Inside the block, the modules pause."""
        with ExitStack() as undo:
            for module in self._modules:
                if type(module) is nn.Linear:
                    module.forward = partial(self._compute_in_blocks, module)  # type: ignore[method-assign]
                    undo.callback(delattr, module, "forward")
                undo.enter_context(module.register_forward_pre_hook(lambda *_: self._pause()))
            yield

    def _compute_in_blocks(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """The output of a layer, in blocks of rows."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= _BLOCK_ROWS:
            return nn.functional.linear(x, layer.weight, layer.bias)
        output = rows.new_empty(len(rows), layer.out_features)
        for start in range(0, len(rows), _BLOCK_ROWS):
            self._pause()
            block = slice(start, start + _BLOCK_ROWS)
            output[block] = nn.functional.linear(rows[block], layer.weight, layer.bias)
        return output.view(*x.shape[:-1], -1)
