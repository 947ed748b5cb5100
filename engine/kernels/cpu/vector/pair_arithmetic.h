// The arithmetic of attention with bfloat16 pairs: the processor multiplies two pairs of numbers a lane and adds both products.
//
// Keys and values are multiplied by numbers of a line that are broadcast over a vector. They are read in place, or packed for
// many lines:
//
//     keys    [16 positions][pair of columns][position]                  a vector: one pair of all positions
//     values  [pair of positions][column][position of the pair]          a vector: 16 pairs
//
// A key in place is read in pieces, as vectors with one of four positions each: [position / 4][pair of the piece]. A score is
// four partial sums, each over every fourth pair of columns in order; an output value is one sum over all pairs of positions in
// order. So the bits do not depend on the number of lines, positions and columns computed at once, nor on packing. Pairs of
// zeros change no sum: denormals that they could flush are flushed by earlier pairs.
#pragma once

#include <immintrin.h>

#include "vector/vector.h"

namespace {

typedef uint32_t Word;  // a pair

constexpr int64_t PAIR = 2, PIECE = 8;
// A product has a throughput of one a cycle and a latency of six: several sums must be independent.
constexpr int LINES_AT_ONCE = 4, VECTORS_AT_ONCE = 4;

inline Vector add_pairs(Vector sum, Vector a, Vector b) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

inline Vector spread_pair(const Word *from) { return (Vector)_mm512_set1_epi32((int32_t)*from); }
inline Vector spread_piece(const Word *from) { return (Vector)_mm512_broadcast_i32x4(read<__m128i>(from)); }

// Prefetch VECTORS vectors of columns of a row.
template <int VECTORS>
inline __attribute__((always_inline)) void prefetch(const bfloat16 *row) {
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i += 2) __builtin_prefetch(row + i * LANES, 0, 2);
}

// Numbers [at, at + 32) of a row; zeros from `width` on.
inline Vector load_pairs(const bfloat16 *row, int64_t column, int64_t width) {
    if (column + PAIR * LANES <= width) return read<Vector>(row + column);
    return (Vector)_mm512_maskz_loadu_epi16((__mmask32)((1u << (width - column)) - 1), row + column);
}

// Round to bfloat16; the last vector of a row is padded with zeros.
inline void round_row(const float *from, int64_t width, Word *to) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t left = width - i;
        const __mmask16 mask = left < LANES ? (__mmask16)((1u << left) - 1) : (__mmask16)0xffff;
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i));
        memcpy(to + i / PAIR, &rounded, sizeof rounded);
    }
}

// Round two vectors to one vector of bfloat16.
inline Vector round_pairs(Vector first, Vector second) { return (Vector)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }

// 2^x with a relative error of 1e-4, a twentieth of the rounding of weights; minimax polynomial on [0, 1).
inline Vector power_of_two(Vector x) {
    const Vector part = (Vector)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vector y = spread(7.802452332e-2f);
    y = y * part + 2.260671590e-1f;
    y = y * part + 6.958335367e-1f;
    y = y * part + 9.999252192e-1f;
    return (Vector)_mm512_scalef_ps((__m512)y, (__m512)x);
}

// Whether a number is greater than `bound`.
inline bool is_above(Vector numbers, float scale_and_cap) {
    return _mm512_cmp_ps_mask((__m512)numbers, _mm512_set1_ps(scale_and_cap), _CMP_GT_OQ);
}

// Pieces of columns [at, at + 32) of the keys `key`, `key` + 4, ...: a vector each. Prefetches the same columns of `ahead`.
inline void load_pieces(const bfloat16 *const *keys, const bfloat16 *const *ahead, int key, int64_t column, int64_t width,
                        Vector (&pieces)[4]) {
    // Half of four rows, two rows at a time: pieces 0 and 2, or 1 and 3.
    const auto even = [](Vector a, Vector b) { return (Vector)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88); };
    const auto odd = [](Vector a, Vector b) { return (Vector)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd); };
    Vector row[4];
    for (int i = 0; i < 4; ++i) row[i] = load_pairs(keys[key + 4 * i], column, width);
    for (int i = 0; i < 4; ++i) prefetch<PAIR>(ahead[key + 4 * i] + column);
    const Vector first = even(row[0], row[1]), second = even(row[2], row[3]);
    pieces[0] = even(first, second), pieces[2] = odd(first, second);
    const Vector third = odd(row[0], row[1]), fourth = odd(row[2], row[3]);
    pieces[1] = even(third, fourth), pieces[3] = odd(third, fourth);
}

// Columns [at, at + 32) of 16 keys, transposed: a vector has the same pair of columns of all keys.
inline __attribute__((always_inline)) void load_transposed(const bfloat16 *const *keys, int64_t column, int64_t width,
                                                           Vector (&rows)[LANES]) {
#pragma GCC unroll 16
    for (int key = 0; key < LANES; ++key) rows[key] = load_pairs(keys[key], column, width);
    transpose(rows);
}

// Pack 16 keys.
inline void pack_keys(const bfloat16 *const *keys, int64_t width, Word *to) {
    for (int64_t i = 0; i < width; i += PAIR * LANES) {
        Vector rows[LANES];
        load_transposed(keys, i, width, rows);
        memcpy(to + i / PAIR * LANES, rows, sizeof rows);
    }
}

// Add up the four partial sums of each score: scores[line][position], times `scale`.
template <int LINES>
inline void end_scores(const Vector (&sums)[LINES][4], float scale, float *scores, int64_t stride) {
    // The first or last two of each four lanes, alternating between two vectors.
    const auto first = [](Vector a, Vector b) { return (Vector)_mm512_unpacklo_ps((__m512)a, (__m512)b); };
    const auto last = [](Vector a, Vector b) { return (Vector)_mm512_unpackhi_ps((__m512)a, (__m512)b); };
    const auto two = [&](Vector a, Vector b) { return first(a, b) + last(a, b); };
    // The same for pairs of lanes.
    const auto firsts = [](Vector a, Vector b) { return (Vector)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); };
    const auto lasts = [](Vector a, Vector b) { return (Vector)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); };
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line) {
        const Vector *parts = sums[line];
        const Vector a = two(parts[0], parts[1]), b = two(parts[2], parts[3]);
        store(scores + line * stride, (firsts(a, b) + lasts(a, b)) * scale);
    }
}

// Two of the four partial sums of the scores of GROUPS times 16 packed keys, added up: over pairs FIRST, FIRST + 4, ... and
// FIRST + 2, FIRST + 6, ... Four at once, or fewer positions, would need more loads for each product.
template <int LINES, int GROUPS, int FIRST>
inline void sum_packed(const Word *queries, int64_t stride, const Word *keys, int64_t group_stride, int64_t pairs,
                       Vector (&sums)[LINES][GROUPS]) {
    Vector partial[LINES][GROUPS][2] = {};
    for (int64_t pair = FIRST; pair < pairs; pair += 4)
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            Vector key[GROUPS];
#pragma GCC unroll 2
            for (int group = 0; group < GROUPS; ++group)
                key[group] = in_register(read<Vector>(keys + group * group_stride + (pair + 2 * i) * LANES));
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line) {
                const Vector query = in_register(spread_pair(queries + line * stride + pair + 2 * i));
#pragma GCC unroll 2
                for (int group = 0; group < GROUPS; ++group)
                    partial[line][group][i] = add_pairs(partial[line][group][i], query, key[group]);
            }
        }
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 2
        for (int group = 0; group < GROUPS; ++group) sums[line][group] = partial[line][group][0] + partial[line][group][1];
}

// The scores of GROUPS times 16 packed keys; strides are in words and floats.
template <int LINES, int GROUPS>
inline void score_packed(const Word *queries, int64_t stride, const Word *keys, int64_t group_stride, int64_t width,
                         float scale, float *scores, int64_t scores_stride) {
    Vector even[LINES][GROUPS], odd[LINES][GROUPS];
    sum_packed<LINES, GROUPS, 0>(queries, stride, keys, group_stride, (width + 1) / PAIR, even);
    sum_packed<LINES, GROUPS, 1>(queries, stride, keys, group_stride, (width + 1) / PAIR, odd);
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 2
        for (int group = 0; group < GROUPS; ++group)
            store(scores + line * scores_stride + group * LANES, (even[line][group] + odd[line][group]) * scale);
}

// The same for keys in place: faster for few lines. Prefetches the rows of `ahead`.
template <int LINES>
inline void score_rows(const Word *queries, int64_t stride, const bfloat16 *const *keys, const bfloat16 *const *ahead,
                       int64_t width, float scale, float *scores, int64_t scores_stride) {
    Vector sums[LINES][4] = {};
    for (int64_t index = 0; index < width; index += PAIR * LANES) {
        Vector query[LINES][4];
#pragma GCC unroll 4
        for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) query[line][i] = spread_piece(queries + line * stride + index / PAIR + i * 4);
#pragma GCC unroll 4
        for (int key = 0; key < 4; ++key) {
            Vector pieces[4];
            load_pieces(keys, ahead, key, index, width, pieces);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
                for (int line = 0; line < LINES; ++line)
                    sums[line][key] = add_pairs(sums[line][key], query[line][i], pieces[i]);
        }
    }
    end_scores(sums, scale, scores, scores_stride);
}

// Values of a tile in place; null rows are zeros. Prefetches the rows of `ahead`.
struct RowValues {
    const bfloat16 *const *rows, *const *ahead;
    int64_t width;

    // Columns from `column` on of a pair of positions.
    template <int VECTORS>
    __attribute__((always_inline)) void load_columns(int64_t pair, int64_t column, Vector (&to)[VECTORS]) const {
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                             39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_or_si512(low, _mm512_set1_epi16(16));
        const bfloat16 *first = rows[PAIR * pair], *second = rows[PAIR * pair + 1];
        prefetch<VECTORS>(ahead[PAIR * pair] + column), prefetch<VECTORS>(ahead[PAIR * pair + 1] + column);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i += 2) {
            const Vector a = first ? load_pairs(first, column + i * LANES, width) : Vector{};
            const Vector b = second ? load_pairs(second, column + i * LANES, width) : Vector{};
            to[i] = (Vector)_mm512_permutex2var_epi16((__m512i)a, low, (__m512i)b);
            if (i + 1 < VECTORS) to[i + 1] = (Vector)_mm512_permutex2var_epi16((__m512i)a, high, (__m512i)b);
        }
    }
};

// Packed values of a tile.
struct PackedValues {
    const Word *words;
    int64_t stride;

    template <int VECTORS>
    __attribute__((always_inline)) void load_columns(int64_t pair, int64_t column, Vector (&to)[VECTORS]) const {
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) to[i] = in_register(read<Vector>(words + pair * stride + column + i * LANES));
    }
};

// Pack a pair of positions; `columns` is a multiple of LANES.
inline void pack_values(const RowValues &values, int64_t pair, int64_t columns, Word *to) {
    const auto pack_columns = [&](int64_t column, auto vectors) {
        Vector loaded[vectors()];
        values.load_columns(pair, column, loaded);
        for (int i = 0; i < vectors(); ++i) store((float *)(to + column + i * LANES), loaded[i]);
    };
    int64_t column = 0;
    for (; column + PAIR * LANES <= columns; column += PAIR * LANES) pack_columns(column, std::integral_constant<int, 2>());
    if (column < columns) pack_columns(column, std::integral_constant<int, 1>());
}

// Add the weighted values of pairs [from, to) of positions to VECTORS vectors of columns of the lines' sums.
template <int LINES, int VECTORS, class Values>
inline void add_value_pairs(const Word *weights, int64_t stride, const Values &values, int64_t from, int64_t to, int64_t column,
                            float *sums, int64_t width) {
    Vector line_sums[LINES][VECTORS];
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) line_sums[line][i] = load(sums + line * width + column + i * LANES);
    for (int64_t pair = from; pair < to; ++pair) {
        Vector value[VECTORS];
        values.load_columns(pair, column, value);
#pragma GCC unroll 4
        for (int line = 0; line < LINES; ++line) {
            const Vector weight = in_register(spread_pair(weights + line * stride + pair));
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; ++i) line_sums[line][i] = add_pairs(line_sums[line][i], weight, value[i]);
        }
    }
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line)
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) store(sums + line * width + column + i * LANES, line_sums[line][i]);
}

}  // namespace
