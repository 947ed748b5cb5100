// How a key or value is stored in a cell (kvcache/kv_buffer.py): float32, bfloat16, or int8 codes with a scale. int8 keys
// are stored after a Hadamard transform (kvcache/kv_buffer.py), and their queries are transformed too.
#pragma once

#include <math.h>

#include "attention/attention.h"
#include "products/quantised_rows.h"
#include "vector/vector.h"

namespace {

// The inverse of a smaller scale is infinite.
constexpr float MIN_SCALE = 1.17549435e-38f;

// The orthonormal Walsh-Hadamard transform of every block of a row, in place. The block size is the largest power of two that
// divides the width.
inline void transform(float *row, int64_t width) {
    const int64_t block = width & -width;
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t start = 0; start < width; start += 2 * half)
            for (int64_t i = start; i < start + half; ++i) {
                const float first = row[i], second = row[i + half];
                row[i] = first + second, row[i + half] = first - second;
            }
    const float by = sqrtf((float)block);
    for (int64_t i = 0; i < width; ++i) row[i] /= by;
}

// The largest absolute value; NaN if there is one, because the bits are compared as integers.
inline float largest(const float *row, int64_t width) {
    int32_t largest_bits = 0;
    for (int64_t i = 0; i < width; ++i) {
        const int32_t size = read<int32_t>(row + i) & 0x7fffffff;
        largest_bits = size > largest_bits ? size : largest_bits;
    }
    return read<float>(&largest_bits);
}

// A row as codes in [-127, 127] times a scale.
inline void write_codes(int8_t *to, float *scale, const float *row, int64_t width) {
    const float whole = largest(row, width) / 127.0f;
    *scale = whole < MIN_SCALE ? MIN_SCALE : whole;
    // A row with a non-finite number gets zero codes and a non-finite scale: it reads back as NaN.
    const bool finite = *scale < INFINITY;
    for (int64_t i = 0; i < width; ++i) to[i] = finite ? (int8_t)nearbyintf(row[i] / *scale) : 0;
}

// Store the row of a head in a cell.
template <class Element>
inline void write_cell(const KVBuffer &buffer, int64_t head, int64_t cell, const float *row, int64_t width) {
    Element *const to = (Element *)buffer.data + head * buffer.head_stride + cell * buffer.cell_stride;
    if constexpr (std::is_same_v<Element, int8_t>)
        write_codes(to, (float *)buffer.scales + head * buffer.scale_head_stride + cell * buffer.scale_cell_stride, row, width);
    else
        write_row(to, row, width);
}

}  // namespace
