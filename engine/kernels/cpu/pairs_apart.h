// The arithmetic of pairs.h, bit for bit, with pairs taken apart (apart.h).
//
//     keys     [16 positions][column][position]
//     values   [position][column]
//     queries  [line][column]
//     weights  [line][which of a pair: 2][pair of positions]
#pragma once

#include "apart.h"
#include "pairs.h"

namespace {

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

// Numbers [at, at + 16) of a row, zeros behind its width.
inline Vector take_wide(const bfloat16 *row, int64_t at, int64_t width) {
    if (at + LANES <= width) return wide(row + at);
    return wide((Halves)_mm256_maskz_loadu_epi16((__mmask16)((1u << (width - at)) - 1), row + at));
}

// Lay out a value, or a query that has been rounded; none is zeros, and so is what pads the last vector.
inline void lay_row_apart(const bfloat16 *row, int64_t width, float *to) {
    for (int64_t at = 0; at < width; at += LANES) store(to + at, row ? take_wide(row, at, width) : Vector{});
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

// Values of a tile as they lie. Rows may be null, and are left out. With each another row, `ahead`, is asked for.
struct RowsApart {
    const bfloat16 *const *rows, *const *ahead;
    int64_t width;

    bool has(int64_t position) const { return rows[position]; }
    // Columns of a position, from `at` on.
    template <int VECTORS>
    __attribute__((always_inline)) void take(int64_t position, int64_t at, Vector (&to)[VECTORS]) const {
        const bfloat16 *const row = rows[position];
        ask_for<VECTORS>(ahead[position] + at);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) to[i] = kept(take_wide(row, at + i * LANES, width));
    }
};

// Values of a tile that have been laid out.
struct LaidApart {
    const float *numbers;
    int64_t width;

    static bool has(int64_t) { return true; }
    template <int VECTORS>
    __attribute__((always_inline)) void take(int64_t position, int64_t at, Vector (&to)[VECTORS]) const {
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) to[i] = kept(load(numbers + position * width + at + i * LANES));
    }
};

// Add the values of pairs [from, to) of positions, weighted, to VECTORS vectors of columns of the lines' sums.
template <int LINES, int VECTORS, class Values>
inline void mix_apart(const float *weights, int64_t stride, const Values &values, int64_t from, int64_t to, int64_t at,
                      float *sums, int64_t width) {
    Vector own[LINES][VECTORS];
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) own[line][i] = load(sums + line * width + at + i * LANES);
    for (int64_t pair = from; pair < to; ++pair)
#pragma GCC unroll 2
        for (int64_t which = 1; which >= 0; --which) {
            if (!values.has(PAIR * pair + which)) continue;
            Vector value[VECTORS];
            values.take(PAIR * pair + which, at, value);
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
