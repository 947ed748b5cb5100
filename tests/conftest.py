"""What holds for all tests."""

import gc

from engine.load.preload import limit_spinning

# Modules and collected tests live to the end: the collector would visit their two million objects again and again.
gc.disable()

# Two threads on a busy machine would wait for each other for minutes. The processes that tests start inherit it.
limit_spinning()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
