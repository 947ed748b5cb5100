"""The kernels for arm64 under qemu-user, which needs neither an arm64 machine nor, for most of it, an arm64 system."""
