"""The value between the scheduler and the runners: input and output of one forward."""
