"""Tensor parallelism: rank 0 is the whole engine; workers, one process a rank, repeat its forwards on their heads."""
