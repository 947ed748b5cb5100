"""The value between the scheduler and the runners: all that one forward computes, and what it returns."""
