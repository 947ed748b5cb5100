// The arithmetic of pair_arithmetic.h with the same bits, for pairs split into float32 numbers (split_pairs.h).
//
//     keys     [16 positions][column][position]
//     values   [position][column]
//     queries  [line][column]
//     weights  [line][which of a pair: 2][pair of positions]
#pragma once

#include "vector/split_pairs.h"
#include "vector/pair_arithmetic.h"

namespace {

// Pack 16 keys.
inline void pack_split_keys(const bfloat16 *const *keys, int64_t width, float *to) {
    for (int64_t i = 0; i < width; i += PAIR * LANES) {
        Vector rows[LANES];
        load_transposed(keys, i, width, rows);
#pragma GCC unroll 16
        for (int pair = 0; pair < LANES; ++pair) {
            store(to + (i + PAIR * pair) * LANES, firsts(rows[pair]));
            store(to + (i + PAIR * pair + 1) * LANES, seconds(rows[pair]));
        }
    }
}

// Numbers [at, at + 16) of a row; zeros from `width` on.
inline Vector load_wide(const bfloat16 *row, int64_t column, int64_t width) {
    if (column + LANES <= width) return wide(row + column);
    return wide((Halves)_mm256_maskz_loadu_epi16((__mmask16)((1u << (width - column)) - 1), row + column));
}

// Pack a value or a rounded query, padded with zeros; a null row is zeros.
inline void pack_split_row(const bfloat16 *row, int64_t width, float *to) {
    for (int64_t i = 0; i < width; i += LANES) store(to + i, row ? load_wide(row, i, width) : Vector{});
}

// The partial sum over pairs FIRST, FIRST + 4, ... of the scores of GROUPS times 16 keys.
template <int LINES, int GROUPS, int FIRST>
inline __attribute__((always_inline)) void sum_split(const float *queries, int64_t stride, const float *keys,
                                                     int64_t group_stride, int64_t pairs, Vector (&sums)[LINES][GROUPS]) {
#pragma GCC unroll 16
    for (int i = 0; i < LINES * GROUPS; ++i) sums[i / GROUPS][i % GROUPS] = Vector{};
    for (int64_t pair = FIRST; pair < pairs; pair += 4)
#pragma GCC unroll 2
        for (int64_t column = PAIR * pair + 1; column >= PAIR * pair; --column) {
            Vector key[GROUPS];
#pragma GCC unroll 4
            for (int group = 0; group < GROUPS; ++group)
                key[group] = in_register(load(keys + group * group_stride + column * LANES));
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line) {
                const Vector query = in_register(spread(queries[line * stride + column]));
#pragma GCC unroll 4
                for (int group = 0; group < GROUPS; ++group) sums[line][group] += query * key[group];
            }
        }
}

// The scores of GROUPS times 16 keys, with partial sums added in the order of `score_packed`.
template <int LINES, int GROUPS>
inline void score_split(const float *queries, int64_t stride, const float *keys, int64_t group_stride, int64_t width,
                        float scale, float *scores, int64_t scores_stride) {
    const int64_t pairs = (width + 1) / PAIR;
    const auto for_scores = [&](auto function) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < LINES * GROUPS; ++i) function(i / GROUPS, i % GROUPS);
    };
    Vector even[LINES][GROUPS], odd[LINES][GROUPS], products[LINES][GROUPS];
    sum_split<LINES, GROUPS, 0>(queries, stride, keys, group_stride, pairs, even);
    sum_split<LINES, GROUPS, 2>(queries, stride, keys, group_stride, pairs, products);
    for_scores([&](int line, int group) { even[line][group] += products[line][group]; });
    sum_split<LINES, GROUPS, 1>(queries, stride, keys, group_stride, pairs, odd);
    sum_split<LINES, GROUPS, 3>(queries, stride, keys, group_stride, pairs, products);
    for_scores([&](int line, int group) {
        const Vector sum = even[line][group] + (odd[line][group] + products[line][group]);
        store(scores + line * scores_stride + group * LANES, sum * scale);
    });
}

// Values of a tile in place; null rows are skipped. Prefetches the rows of `ahead`.
struct SplitRowValues {
    const bfloat16 *const *rows, *const *ahead;
    int64_t width;

    bool has(int64_t position) const { return rows[position]; }
    // Columns of a position from `column` on.
    template <int VECTORS>
    __attribute__((always_inline)) void load_columns(int64_t position, int64_t column, Vector (&to)[VECTORS]) const {
        const bfloat16 *const row = rows[position];
        prefetch<VECTORS>(ahead[position] + column);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) to[i] = in_register(load_wide(row, column + i * LANES, width));
    }
};

// Packed values of a tile.
struct PackedSplitValues {
    const float *numbers;
    int64_t width;

    static bool has(int64_t) { return true; }
    template <int VECTORS>
    __attribute__((always_inline)) void load_columns(int64_t position, int64_t column, Vector (&to)[VECTORS]) const {
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) to[i] = in_register(load(numbers + position * width + column + i * LANES));
    }
};

// Add the weighted values of pairs [from, to) of positions to VECTORS vectors of columns of the lines' sums.
template <int LINES, int VECTORS, class Values>
inline void add_split_values(const float *weights, int64_t stride, const Values &values, int64_t from, int64_t to, int64_t column,
                             float *sums, int64_t width) {
    Vector line_sums[LINES][VECTORS];
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) line_sums[line][i] = load(sums + line * width + column + i * LANES);
    for (int64_t pair = from; pair < to; ++pair)
#pragma GCC unroll 2
        for (int64_t which = 1; which >= 0; --which) {
            if (!values.has(PAIR * pair + which)) continue;
            Vector value[VECTORS];
            values.load_columns(PAIR * pair + which, column, value);
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line) {
                const Vector weight = in_register(spread(weights[(line * PAIR + which) * stride + pair]));
#pragma GCC unroll 8
                for (int i = 0; i < VECTORS; ++i) line_sums[line][i] += weight * value[i];
            }
        }
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) store(sums + line * width + column + i * LANES, line_sums[line][i]);
}

}  // namespace
