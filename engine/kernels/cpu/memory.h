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

// What some memory, aligned to 64 bytes, is cut into: one slice behind the other, each aligned like the first.
class Slices {
  public:
    explicit Slices(char *start) : next(start) {}

    // The next slice, for so many of a type.
    template <class T>
    T *take(int64_t count) {
        T *const own = (T *)next;
        next += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
        return own;
    }

  private:
    char *next;
};

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
// How many parts of a size make up a whole, the last of which may be smaller.
inline int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

}  // namespace
