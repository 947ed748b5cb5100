"""Values that cross the boundary of the engine thread: frozen dataclasses without tensors."""
