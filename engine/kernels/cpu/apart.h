// Pairs of bfloat16 numbers multiplied apart, as numbers of float32: bit for bit what processors make of them as pairs.
//
// Intel's take as long for a vector of pairs as for four vectors of float32 numbers (measured: 83 and 170 GFLOP/s a core).
// What they add to a sum is the product of a pair's second numbers, and then that of its first: exact products, each sum
// rounded. Numbers too small to be normal are zero to them, as the processor can be told for float32 numbers too.
#pragma once

#include <immintrin.h>

#include "vector.h"

namespace {

// Whether this processor is one of those, and multiplies pairs at all.
#if defined(__AVX512BF16__)
inline bool takes_apart() { return __builtin_cpu_is("intel"); }
#else
constexpr bool takes_apart() { return false; }
#endif

// While it lives, numbers too small to be normal are zero. What it is to hold for must be called, not inlined.
class Flushed {
  public:
    Flushed() : before(_mm_getcsr()) { _mm_setcsr(before | FLUSH_RESULTS | FLUSH_NUMBERS); }
    Flushed(const Flushed &) = delete;
    ~Flushed() { _mm_setcsr(before); }

  private:
    static constexpr unsigned FLUSH_RESULTS = 0x8000, FLUSH_NUMBERS = 0x40;
    const unsigned before;
};

// The first numbers of a vector of pairs, and the second ones.
inline Vector firsts(Vector pairs) { return (Vector)((Unsigned)pairs << 16); }
inline Vector seconds(Vector pairs) { return (Vector)((Unsigned)pairs & 0xffff0000u); }

}  // namespace
