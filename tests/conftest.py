"""What holds for all tests."""

from engine.load.preload import limit_spinning

# Two threads on a busy machine would wait for each other for minutes. The processes that tests start inherit it.
limit_spinning()
