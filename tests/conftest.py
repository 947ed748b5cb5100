"""What holds for all tests."""

from server.cli import let_threads_sleep

# Two threads on a busy machine would wait for each other for minutes. The processes that tests start inherit it.
let_threads_sleep()
