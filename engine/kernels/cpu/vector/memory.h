// Memory of one call.
#pragma once

#include <stdlib.h>

#include <cstdint>

namespace {

// Aligned to 64 bytes; null if the allocation fails.
struct Memory {
    char *start;
    explicit Memory(int64_t bytes) : start((char *)aligned_alloc(64, (bytes + 64) / 64 * 64)) {}
    Memory(const Memory &) = delete;
    ~Memory() { free(start); }
};

// Allocates from one block of memory; each allocation is aligned to 64 bytes.
class Arena {
  public:
    explicit Arena(char *start) : next(start) {}

    template <class T>
    T *allocate(int64_t count) {
        T *const numbers = (T *)next;
        next += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
        return numbers;
    }

  private:
    char *next;
};

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

}  // namespace
