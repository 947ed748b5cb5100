"""Whether a kernel of this package agrees with torch on a device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from triton.errors import TritonError

# Errors of compilers and drivers.
_FAILURES = (TritonError, RuntimeError, OSError, subprocess.CalledProcessError)


def disagreement(measure_error: Callable[[], float], limit: float) -> str | None:
    """Why a kernel cannot be used: it fails, or its measured error exceeds the limit. None: it agrees."""
    try:
        error = measure_error()
    except _FAILURES as failure:
        reason = str(failure).strip().partition("\n")[0]
        return f"{type(failure).__name__}: {reason}"
    # Also NaN.
    if not error <= limit:
        return f"its output differs by {error:.2g} from that of torch, more than {limit:.2g}"
    return None
