// Memory for one call.
#pragma once

#include <stdlib.h>

#include <cstdint>

namespace {

// Aligned to 64 bytes; null where there is none.
struct Memory {
    char *start;
    explicit Memory(int64_t bytes) : start((char *)aligned_alloc(64, (bytes + 64) / 64 * 64)) {}
    Memory(const Memory &) = delete;
    ~Memory() { free(start); }
};

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace
