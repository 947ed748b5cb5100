"""Facts of the machine: devices, memory, processors, and what they mean for serving."""
