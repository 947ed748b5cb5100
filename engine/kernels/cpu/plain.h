// Rows times a matrix of plain numbers, as it lies: to[row][output] = row . weights[output].
//
// Rows of float32 meet float32 or bfloat16 weights one number a lane (Singles). Where the processor multiplies bfloat16
// numbers in pairs, rows are rounded to bfloat16 for weights in it (Pairs): twice as many numbers at once.
//
// A product is summed in LANES parts, each in the order of the columns, and these in one order: so it comes out the same
// bit for bit, whatever rows stand beside its own.
#pragma once

#include "vector.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// Rows and outputs that are multiplied at once: their sums fill the registers.
constexpr int ROWS_AT_ONCE = LANES == 16 ? 6 : 3, OUTPUTS_AT_ONCE = 4;
// Bytes of rows that stay in a core's cache while all outputs meet them.
constexpr int64_t ROW_BYTES = 512 * 1024;

struct Singles {
    typedef Vector Own;
    static constexpr int64_t COLUMNS = LANES;

    template <class Number>
    static Own take(const Number *from) {
        return wide(from);
    }
    // The first `count` numbers, and zeros.
    template <class Number>
    static Own take(const Number *from, int64_t count) {
        Number part[LANES] = {};
        memcpy(part, from, count * sizeof(Number));
        return wide(part);
    }
    static Vector add(Vector sum, Own row, Own weight) { return sum + row * weight; }
};

#if defined(__AVX512BF16__)

struct Pairs {
    typedef Vector Own;
    static constexpr int64_t COLUMNS = 2 * LANES;

    static Own take(const bfloat16 *from) { return read<Vector>(from); }
    static Own take(const bfloat16 *from, int64_t count) {
        return (Vector)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
    }
    static Vector add(Vector sum, Own row, Own weight) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)weight);
    }
};

// Whether rows are rounded to bfloat16 to meet weights in it.
constexpr bool ROUNDS = true;
template <class Row>
using Arithmetic = std::conditional_t<std::is_same_v<Row, bfloat16>, Pairs, Singles>;

#else

constexpr bool ROUNDS = false;
template <class Row>
using Arithmetic = Singles;

#endif

template <int ROWS, int OUTPUTS, class Row, class Number>
inline void dot(const Row *rows, int64_t row_stride, const Number *weights, int64_t stride, int64_t columns, float *to,
                int64_t to_stride) {
    using Way = Arithmetic<Row>;
    Vector products[ROWS][OUTPUTS] = {};
    int64_t at = 0;
    for (; at + Way::COLUMNS <= columns; at += Way::COLUMNS) {
        typename Way::Own weight[OUTPUTS];
#pragma GCC unroll 4
        for (int output = 0; output < OUTPUTS; ++output) weight[output] = kept(Way::take(weights + output * stride + at));
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            const auto own = Way::take(rows + row * row_stride + at);
#pragma GCC unroll 4
            for (int output = 0; output < OUTPUTS; ++output)
                products[row][output] = Way::add(products[row][output], own, weight[output]);
        }
    }
    // Unrolled too, for sums that are counted through would lie in memory all the while.
    if (at < columns)
#pragma GCC unroll 6
        for (int row = 0; row < ROWS; ++row) {
            const auto own = Way::take(rows + row * row_stride + at, columns - at);
#pragma GCC unroll 4
            for (int output = 0; output < OUTPUTS; ++output)
                products[row][output] =
                    Way::add(products[row][output], own, Way::take(weights + output * stride + at, columns - at));
        }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; ++row) {
        if constexpr (OUTPUTS == 1) {
            to[row * to_stride] = sum(products[row][0]);
        } else {
            const Vector result = sums<OUTPUTS>(products[row]);
            memcpy(to + row * to_stride, &result, OUTPUTS * sizeof(float));
        }
    }
}

template <int OUTPUTS, class Row, class Number>
inline void dot_rows(const Row *rows, int64_t count, int64_t row_stride, const Number *weights, int64_t stride,
                     int64_t columns, float *to, int64_t to_stride) {
    const auto some = [&](int64_t row, auto rows_at_once) {
        dot<rows_at_once(), OUTPUTS>(rows + row * row_stride, row_stride, weights, stride, columns, to + row * to_stride,
                                     to_stride);
    };
    int64_t row = 0;
    for (; row + ROWS_AT_ONCE <= count; row += ROWS_AT_ONCE) some(row, std::integral_constant<int, ROWS_AT_ONCE>());
    for (; row + 2 <= count; row += 2) some(row, std::integral_constant<int, 2>());
    if (row < count) some(row, std::integral_constant<int, 1>());
}

// The outputs [first, last) of all rows.
template <class Row, class Number>
void multiply_plain(const Row *rows, int64_t count, int64_t row_stride, const Number *weights, int64_t stride,
                    int64_t columns, int64_t first, int64_t last, float *to, int64_t to_stride) {
    const int64_t fit = ROW_BYTES / (columns * (int64_t)sizeof(Row)) / ROWS_AT_ONCE * ROWS_AT_ONCE;
    const int64_t step = fit > ROWS_AT_ONCE ? fit : ROWS_AT_ONCE;
    for (int64_t row = 0; row < count; row += step) {
        const int64_t some = count - row < step ? count - row : step;
        const Row *from = rows + row * row_stride;
        float *place = to + row * to_stride;
        int64_t output = first;
        for (; output + OUTPUTS_AT_ONCE <= last; output += OUTPUTS_AT_ONCE)
            dot_rows<OUTPUTS_AT_ONCE>(from, some, row_stride, weights + output * stride, stride, columns, place + output,
                                      to_stride);
        for (; output < last; ++output)
            dot_rows<1>(from, some, row_stride, weights + output * stride, stride, columns, place + output, to_stride);
    }
}

}  // namespace
