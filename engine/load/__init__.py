"""Loading: checkpoint, memory plan, self-test and the choice of the native step."""
