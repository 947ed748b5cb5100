"""Files and batches: many requests from a file, computed in the background."""
