"""What holds for all tests."""

from __future__ import annotations

import os

# As `cellar serve` does it: two threads on a busy machine would wait for each other for minutes. It is read once, when
# torch is imported, and the processes that tests start inherit it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
