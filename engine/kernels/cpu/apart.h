// The arithmetic of pairs.h, bit for bit, with products of float32: for processors that are faster so.
//
// Intel's take as long for a vector of pairs as for four vectors of float32 numbers (measured: 83 and 170 GFLOP/s a core).
// What they add to a sum is the product of a pair's second numbers, and then that of its first: exact products, each sum
// rounded. Numbers too small to be normal are zero to them, as the processor can be told for float32 numbers too.
//
//     keys     [16 positions][column][position]
//     values   [position][column]
//     queries  [line][column]
//     weights  [line][which of a pair: 2][pair of positions]
#pragma once

#include "pairs.h"

namespace {

// Whether this processor is one of those.
inline bool takes_apart() { return __builtin_cpu_is("intel"); }

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

// Lay out 16 keys.
inline void lay_keys_apart(const bfloat16 *const *keys, int64_t width, float *to) {
    for (int64_t at = 0; at < width; at += PAIR * LANES) {
        Vector rows[LANES];
        take_turned(keys, at, width, rows);
#pragma GCC unroll 16
        for (int pair = 0; pair < LANES; ++pair) {
            store(to + (at + PAIR * pair) * LANES, firsts(rows[pair]));
            store(to + (at + PAIR * pair + 1) * LANES, seconds(rows[pair]));
        }
    }
}

// Lay out a value, or a query that has been rounded; none is zeros, and so is what pads the last vector.
inline void lay_row_apart(const bfloat16 *row, int64_t width, float *to) {
    for (int64_t at = 0; at < width; at += LANES) {
        const int64_t left = width - at;
        const __mmask16 own = left < LANES ? (__mmask16)((1u << left) - 1) : (__mmask16)0xffff;
        const __m256i some = row ? _mm256_maskz_loadu_epi16(own, row + at) : __m256i{};
        store(to + at, (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16));
    }
}

// Of each score of GROUPS times 16 keys the sum of pairs FIRST, FIRST + 4, ...
template <int LINES, int GROUPS, int FIRST>
inline __attribute__((always_inline)) void sum_apart(const float *queries, int64_t stride, const float *keys,
                                                     int64_t group_stride, int64_t pairs, Vector (&sums)[LINES][GROUPS]) {
#pragma GCC unroll 16
    for (int at = 0; at < LINES * GROUPS; ++at) sums[at / GROUPS][at % GROUPS] = Vector{};
    for (int64_t pair = FIRST; pair < pairs; pair += 4)
#pragma GCC unroll 2
        for (int64_t column = PAIR * pair + 1; column >= PAIR * pair; --column) {
            Vector key[GROUPS];
#pragma GCC unroll 4
            for (int group = 0; group < GROUPS; ++group)
                key[group] = kept(load(keys + group * group_stride + column * LANES));
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line) {
                const Vector query = kept(spread(queries[line * stride + column]));
#pragma GCC unroll 4
                for (int group = 0; group < GROUPS; ++group) sums[line][group] += query * key[group];
            }
        }
}

// The scores of GROUPS times 16 keys, added up as `score_laid` does.
template <int LINES, int GROUPS>
inline void score_apart(const float *queries, int64_t stride, const float *keys, int64_t group_stride, int64_t width,
                        float scale, float *scores, int64_t scores_stride) {
    const int64_t pairs = (width + 1) / PAIR;
    const auto each = [&](auto function) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int at = 0; at < LINES * GROUPS; ++at) function(at / GROUPS, at % GROUPS);
    };
    Vector even[LINES][GROUPS], odd[LINES][GROUPS], own[LINES][GROUPS];
    sum_apart<LINES, GROUPS, 0>(queries, stride, keys, group_stride, pairs, even);
    sum_apart<LINES, GROUPS, 2>(queries, stride, keys, group_stride, pairs, own);
    each([&](int line, int group) { even[line][group] += own[line][group]; });
    sum_apart<LINES, GROUPS, 1>(queries, stride, keys, group_stride, pairs, odd);
    sum_apart<LINES, GROUPS, 3>(queries, stride, keys, group_stride, pairs, own);
    each([&](int line, int group) {
        const Vector sum = even[line][group] + (odd[line][group] + own[line][group]);
        store(scores + line * scores_stride + group * LANES, sum * scale);
    });
}

// Add the values of pairs [from, to) of positions, weighted, to VECTORS vectors of columns of the lines' sums.
template <int LINES, int VECTORS>
inline void mix_apart(const float *weights, int64_t stride, const float *values, int64_t from, int64_t to, int64_t at,
                      float *sums, int64_t width) {
    Vector own[LINES][VECTORS];
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) own[line][i] = load(sums + line * width + at + i * LANES);
    for (int64_t pair = from; pair < to; ++pair)
#pragma GCC unroll 2
        for (int64_t which = 1; which >= 0; --which) {
            Vector value[VECTORS];
            const float *const row = values + (PAIR * pair + which) * width + at;
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; ++i) value[i] = kept(load(row + i * LANES));
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line) {
                const Vector weight = kept(spread(weights[(line * PAIR + which) * stride + pair]));
#pragma GCC unroll 8
                for (int i = 0; i < VECTORS; ++i) own[line][i] += weight * value[i];
            }
        }
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) store(sums + line * width + at + i * LANES, own[line][i]);
}

}  // namespace
