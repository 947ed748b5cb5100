// How a head's key or value is stored in a cell (kvcache/kv_buffer.py): in float32, rounded to bfloat16, or as int8 codes and a
// scale. int8 keys are stored behind a Hadamard transform (kvcache/hadamard.py), and queries that meet them are transformed.
#pragma once

#include <math.h>

#include "attention.h"
#include "quantised.h"
#include "vector.h"

namespace {

// Below that a scale's inverse is no number.
constexpr float LEAST_SCALE = 1.17549435e-38f;

// The orthonormal Walsh-Hadamard transform of every block of a row, in place. A block is as wide as the largest power of two
// that divides the width.
inline void transform(float *row, int64_t width) {
    const int64_t block = width & -width;
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t start = 0; start < width; start += 2 * half)
            for (int64_t at = start; at < start + half; ++at) {
                const float first = row[at], second = row[at + half];
                row[at] = first + second, row[at + half] = first - second;
            }
    const float by = sqrtf((float)block);
    for (int64_t at = 0; at < width; ++at) row[at] /= by;
}

// The largest absolute value. Compared as whole numbers: so a NaN is larger than all numbers, and is not lost.
inline float largest(const float *row, int64_t width) {
    int32_t most = 0;
    for (int64_t at = 0; at < width; ++at) {
        const int32_t size = read<int32_t>(row + at) & 0x7fffffff;
        most = size > most ? size : most;
    }
    return read<float>(&most);
}

// A row as multiples of its scale, which is a 127th of its largest number.
inline void put_codes(int8_t *to, float *scale, const float *row, int64_t width) {
    const float whole = largest(row, width) / 127.0f;
    *scale = whole < LEAST_SCALE ? LEAST_SCALE : whole;
    // With a number that is not finite all codes are zero, times a scale that is not finite: the row reads back as NaN.
    const bool finite = *scale < INFINITY;
    for (int64_t at = 0; at < width; ++at) to[at] = finite ? (int8_t)nearbyintf(row[at] / *scale) : 0;
}

// Store a head's row in a cell of a plane.
template <class Element>
inline void put_cell(const Plane &plane, int64_t head, int64_t cell, const float *row, int64_t width) {
    Element *const to = (Element *)plane.data + head * plane.head_stride + cell * plane.cell_stride;
    if constexpr (std::is_same_v<Element, int8_t>)
        put_codes(to, (float *)plane.scales + head * plane.scale_stride + cell, row, width);
    else
        put(to, row, width);
}

}  // namespace
