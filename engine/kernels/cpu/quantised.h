// Rows times quantised matrices (linear.h): how rows are quantised, and one block of outputs.
//
// Rows are quantised first, each group of 32 numbers by a scale of its own, into tiles of up to ROWS_A_TILE rows:
//
//     codes   [tile][group][word: 8][row of the tile][byte: 4]
//     scales  [tile][group][row of the tile]            a number is code * scale
//     excess  [tile][group][row of the tile]            what codes of 8 bits add to a group's sums by their zero: 128 times
//                                                      the sum of the row's codes
//
// Then every block of outputs meets all tiles, one after the other, while its codes lie in the processor's cache: they
// come from memory once, however many rows there are.
//
// A row's numbers are quantised alone, the sums of a group are whole numbers, and groups are added up in their order: so
// a row comes out the same bit for bit, whatever stands beside it, in whatever tile, with any threads.
#pragma once

#include <math.h>

#include <utility>

#include "dot.h"
#include "linear.h"
#include "memory.h"
#include "vector.h"

namespace {

constexpr int64_t ROWS_A_TILE = 8, WORDS = GROUP / 4;
// Bytes of codes that are asked for before their turn.
constexpr int64_t BYTES_AHEAD = 2048;
// Below that a scale's inverse is no number: such a group is zero.
constexpr float SMALLEST = 1.17549435e-38f;

inline int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

// The quantised rows of a call.
struct Rows {
    int64_t rows, groups;
    int8_t *codes;
    float *scales;
    int32_t *excess;

    static int64_t size(int64_t rows, int64_t groups) {
        return rows * groups * (GROUP + (int64_t)sizeof(float) + (int64_t)sizeof(int32_t));
    }
    Rows(int64_t rows, int64_t groups, char *memory)
        : rows(rows),
          groups(groups),
          codes((int8_t *)memory),
          scales((float *)(memory + rows * groups * GROUP)),
          excess((int32_t *)(scales + rows * groups)) {}
};

struct Group {
    alignas(32) int8_t code[GROUP];
    float scale;
    int32_t excess;
};

// Compared as whole numbers: so a NaN is greater than all numbers, and is not lost.
inline float greatest(const float *numbers) {
    int32_t top = 0;
    for (int64_t at = 0; at < GROUP; ++at) {
        int32_t bits;
        memcpy(&bits, numbers + at, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float number;
    memcpy(&number, &top, sizeof number);
    return number;
}

// A group that holds an infinity or a NaN is zero times that: no output of its row will be a number.
inline Group quantise(const float *numbers) {
    Group group;
    group.scale = greatest(numbers) / 127.0f;
    const float inverse = group.scale >= SMALLEST && group.scale < INFINITY ? 1.0f / group.scale : 0;
    int32_t sum = 0;
    for (int64_t at = 0; at < GROUP; ++at) {
        const int32_t code = inverse > 0 ? (int32_t)rintf(numbers[at] * inverse) : 0;
        group.code[at] = (int8_t)code;
        sum += code;
    }
    group.excess = 128 * sum;
    return group;
}

template <class Number>
void quantise_row(const Product &product, int64_t row, const Rows &to) {
    const int64_t first = row / ROWS_A_TILE * ROWS_A_TILE, rows = lesser(to.rows - first, ROWS_A_TILE), place = row - first;
    const Number *from = (const Number *)product.input + row * product.stride;
    for (int64_t number = 0; number < to.groups; ++number, from += GROUP) {
        alignas(64) float numbers[GROUP] = {};
        const int64_t left = product.columns - number * GROUP;
        if (left < GROUP)
            for (int64_t at = 0; at < left; ++at) numbers[at] = ::number(from[at]);
        else
            for (int64_t at = 0; at < GROUP; ++at) numbers[at] = ::number(from[at]);
        const Group group = quantise(numbers);
        const int64_t at = first * to.groups + number * rows;
        to.scales[at + place] = group.scale;
        to.excess[at + place] = group.excess;
        for (int64_t word = 0; word < WORDS; ++word)
            memcpy(to.codes + at * GROUP + (word * rows + place) * 4, group.code + 4 * word, 4);
    }
}

inline void put(float *to, const float *from, int64_t count) { memcpy(to, from, count * sizeof(float)); }

// To the nearest, to even ones of two, and a NaN to a NaN.
inline void put(bfloat16 *to, const float *from, int64_t count) {
    for (int64_t at = 0; at < count; ++at) {
        const uint32_t bits = read<uint32_t>(from + at), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[at].bits = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

// One block of outputs times ROWS rows, the tile that begins with row `first`.
template <class Number, int BITS, int ROWS>
inline void multiply_tile(const Matrix &matrix, int64_t block, const Rows &rows, int64_t first) {
    constexpr int64_t BYTES = GROUP * OUTPUTS * BITS / 8;
    const int64_t groups = rows.groups, start = first * groups;
    const uint8_t *codes = matrix.codes + block * groups * BYTES;
    const uint16_t *scales = matrix.scales + block * groups * OUTPUTS;
    const int8_t *numbers = rows.codes + start * GROUP;
    const float *row_scales = rows.scales + start;
    const int32_t *excess = rows.excess + start;
    Totals totals[ROWS];
    for (Totals &one : totals) one = nothing();
    for (int64_t group = 0; group < groups; ++group) {
        Sums sums[ROWS];
        for (int row = 0; row < ROWS; ++row) sums[row] = begin<BITS>(excess[row]);
#pragma GCC unroll 8
        for (int64_t at = 0; at < BYTES; at += 64) {
            __builtin_prefetch(codes + at + BYTES_AHEAD, 0, 3);
            const Words stored = fetch(codes + at);
            if constexpr (BITS == 8) {
                for (int row = 0; row < ROWS; ++row, numbers += 4) sums[row] = dot<BITS>(sums[row], stored, numbers);
            } else {
                const Words first_half = low(stored), second_half = high(stored);
                for (int row = 0; row < ROWS; ++row, numbers += 4) sums[row] = dot<BITS>(sums[row], first_half, numbers);
                for (int row = 0; row < ROWS; ++row, numbers += 4) sums[row] = dot<BITS>(sums[row], second_half, numbers);
            }
        }
        const Totals wide = scales_at(scales);
        for (int row = 0; row < ROWS; ++row) totals[row] = add(totals[row], sums[row], wide, row_scales[row]);
        codes += BYTES, scales += OUTPUTS, row_scales += ROWS, excess += ROWS;
    }
    const int64_t output = block * OUTPUTS, width = lesser(matrix.outputs - output, OUTPUTS);
    for (int row = 0; row < ROWS; ++row) {
        alignas(64) float numbers[OUTPUTS];
        write(numbers, totals[row]);
        put((Number *)matrix.output + (first + row) * matrix.outputs + output, numbers, width);
    }
}

typedef void Tile(const Matrix &, int64_t, const Rows &, int64_t);

template <class Number, int BITS, std::size_t... I>
inline void multiply_rest(const Matrix &matrix, int64_t block, const Rows &rows, int64_t first, std::index_sequence<I...>) {
    constexpr Tile *tiles[] = {multiply_tile<Number, BITS, I + 1>...};
    tiles[rows.rows - first - 1](matrix, block, rows, first);
}

template <class Number, int BITS>
void multiply_block(const Matrix &matrix, int64_t block, const Rows &rows) {
    int64_t first = 0;
    for (; first + ROWS_A_TILE <= rows.rows; first += ROWS_A_TILE) multiply_tile<Number, BITS, ROWS_A_TILE>(matrix, block, rows, first);
    if (first < rows.rows) multiply_rest<Number, BITS>(matrix, block, rows, first, std::make_index_sequence<ROWS_A_TILE - 1>());
}

}  // namespace
