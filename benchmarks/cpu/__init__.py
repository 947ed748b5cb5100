"""The processor: kernels, steps and drafts in this process."""
