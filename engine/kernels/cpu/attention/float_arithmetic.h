// The arithmetic of attention in float32: lines and one tile of keys and values. A line has the same bits among any others.
#pragma once

#include "attention/softmax_state.h"
#include "attention/query_lines.h"

namespace {

// Keys, and vectors of columns, computed at once: with up to 3 lines their sums fill the registers.
constexpr int KEYS = LANES == 16 ? 8 : 4, COLUMNS = LANES == 16 ? 8 : 4;
constexpr int TRANSPOSED_LINES = REGISTERS == 32 ? 4 : 2;  // lines scored at once against transposed keys

// Scores of KEYS keys for some lines: scores[line][key] = query[line] . key.
template <int COUNT, class Number>
inline void score(const float *queries, const Number *const *keys, int64_t width, float *scores) {
    Vector products[COUNT][KEYS];
#pragma GCC unroll 4
    for (int line = 0; line < COUNT; ++line)
#pragma GCC unroll 8
        for (int key = 0; key < KEYS; ++key) products[line][key] = Vector{};
    for (int64_t i = 0; i < width; i += LANES) {
        Vector query[COUNT];
#pragma GCC unroll 4
        for (int line = 0; line < COUNT; ++line) query[line] = load(queries + line * width + i);
#pragma GCC unroll 8
        for (int key = 0; key < KEYS; ++key) {
            const Vector column = in_register(wide(keys[key] + i));
#pragma GCC unroll 4
            for (int line = 0; line < COUNT; ++line) products[line][key] += query[line] * column;
        }
    }
#pragma GCC unroll 4
    for (int line = 0; line < COUNT; ++line) {
        const Vector result = sums<KEYS>(products[line]);
        memcpy(scores + line * TILE, &result, KEYS * sizeof(float));
    }
}

// Transpose LANES keys: transposed[column][key].
inline void transpose(const float *const *keys, int64_t width, float *transposed) {
    for (int64_t i = 0; i < width; i += LANES) {
        Vector block[LANES];
        for (int key = 0; key < LANES; ++key) block[key] = load(keys[key] + i);
        transpose(block);
        memcpy(transposed + i * LANES, block, sizeof block);
    }
}

// Lanes [LANE, LANE + SIZE) of the products in `score`, added up in the same order.
template <int COUNT, int LANE, int SIZE>
inline void score_lanes(const float *queries, const float *transposed, int64_t width, Vector *result) {
    if constexpr (SIZE > 4) {
        Vector other[COUNT];
        score_lanes<COUNT, LANE, SIZE / 2>(queries, transposed, width, result);
        score_lanes<COUNT, LANE + SIZE / 2, SIZE / 2>(queries, transposed, width, other);
        for (int line = 0; line < COUNT; ++line) result[line] += other[line];
    } else {
        Vector products[COUNT][4] = {};
        for (int64_t i = LANE; i < width; i += LANES)
#pragma GCC unroll 4
            for (int lane = 0; lane < 4; ++lane) {
                const Vector column = in_register(load(transposed + (i + lane) * LANES));
                for (int line = 0; line < COUNT; ++line)
                    products[line][lane] += spread(queries[line * width + i + lane]) * column;
            }
        for (int line = 0; line < COUNT; ++line)
            result[line] = (products[line][0] + products[line][1]) + (products[line][2] + products[line][3]);
    }
}

// The bits of `score` for LANES transposed keys: faster with many lines.
template <int COUNT>
inline void score_transposed(const float *queries, const float *transposed, int64_t width, float *scores) {
    Vector result[COUNT];
    score_lanes<COUNT, 0, LANES>(queries, transposed, width, result);
    for (int line = 0; line < COUNT; ++line) store(scores + line * TILE, result[line]);
}

// Add the weighted values [from, to) of a tile to the sums of COUNT lines; WIDE vectors of columns.
template <int COUNT, int WIDE, class Number>
inline void add_values(const float *weights, const Number *const *values, int64_t from, int64_t to, int64_t begin, float *sums,
                       int64_t width) {
    Vector total[COUNT][WIDE];
    for (int line = 0; line < COUNT; ++line)
        for (int column = 0; column < WIDE; ++column) total[line][column] = load(sums + line * width + begin + column * LANES);
    for (int64_t key = from; key < to; ++key) {
        const Number *value = values[key] + begin;
        Vector weight[COUNT];
        for (int line = 0; line < COUNT; ++line) weight[line] = spread(weights[line * TILE + key]);
#pragma GCC unroll 8
        for (int column = 0; column < WIDE; ++column) {
            const Vector part = in_register(wide(value + column * LANES));
            for (int line = 0; line < COUNT; ++line) total[line][column] += weight[line] * part;
        }
    }
    for (int line = 0; line < COUNT; ++line)
        for (int column = 0; column < WIDE; ++column) store(sums + line * width + begin + column * LANES, total[line][column]);
}

template <int COUNT, class Number>
inline void add_value_columns(const float *weights, const Number *const *values, int64_t from, int64_t to, float *sums,
                              int64_t width) {
    int64_t begin = 0;
    for (; begin + COLUMNS * LANES <= width; begin += COLUMNS * LANES)
        add_values<COUNT, COLUMNS>(weights, values, from, to, begin, sums, width);
    for (; begin + COLUMNS / 2 * LANES <= width; begin += COLUMNS / 2 * LANES)
        add_values<COUNT, COLUMNS / 2>(weights, values, from, to, begin, sums, width);
    for (; begin < width; begin += LANES) add_values<COUNT, 1>(weights, values, from, to, begin, sums, width);
}

// function(line, count) for all lines, up to 3 at a time; count is a compile-time constant.
template <class Function>
inline void for_line_groups(int64_t lines, Function work) {
    int64_t line = 0;
    while (lines - line == 3 || lines - line > 4) work(line, std::integral_constant<int, 3>()), line += 3;
    while (lines - line >= 2) work(line, std::integral_constant<int, 2>()), line += 2;
    if (lines - line == 1) work(line, std::integral_constant<int, 1>());
}

}  // namespace
