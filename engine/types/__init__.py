"""Values that cross the border of the engine: requests in, events and status out."""
