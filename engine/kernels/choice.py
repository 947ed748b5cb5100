"""Who computes attention on a CPU: the C++ kernel where this machine can run or build it, else torch."""

from __future__ import annotations

import logging
from functools import cache

import torch

from engine.kernels import reference
from engine.kernels.cpu import build
from engine.kernels.cpu.native import FORMATS, Native
from engine.kernels.reference import Attend

log = logging.getLogger("cellar.engine")


def fastest(dtype: torch.dtype, stored: torch.dtype) -> Attend:
    """What attends fastest on this machine's processor. May build the kernel, which takes seconds, once a machine.

    dtype   in which the model computes
    stored  in which its keys and values are kept
    """
    known = dtype != torch.float64 and stored in FORMATS
    return chosen() if known else reference.attend


@cache
def chosen() -> Attend:
    """The kernel; without one torch, and one line in the log, however many models ask and however often."""
    try:
        return native()
    except build.NoLibrary as error:
        log.warning("attention takes about twice the processor time, in torch instead of C++: %s", error.reason)
        return reference.attend


def native() -> Attend:
    """The C++ kernel. Raises NoLibrary."""
    variant = build.variants()[0]
    if variant == "generic":
        # Measured: without wide vectors it takes longer than torch.
        raise build.NoLibrary("the C++ kernel needs AVX2 or AVX-512, which this processor has not")
    library = build.library(variant)
    try:
        return Native(library).attend
    except OSError as error:
        raise build.NoLibrary(f"the library cannot be loaded: {error}") from error
