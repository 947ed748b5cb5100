"""The runners of a model: packed, one sequence at a time, on a device, recorded."""
