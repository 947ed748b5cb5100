// The formats of quantised weights (engine/kernels/formats.py): a weight is scale * value(code) + minimum, a value is
// code - zero or an entry of a lookup table.
#pragma once

#include "products/linear.h"

namespace {

constexpr int64_t SUPERBLOCK = 8;  // groups

// The structure of scales (linear.h). Those of unpacked blocks are float32, one or two for each group and output.
enum ScaleKind {
    BFLOAT16_SCALES,
    FLOAT16_SCALES,
    FLOAT16_MINIMUMS,
    SUPERBLOCK_MINIMUMS,
    SUPERBLOCK_HALVES,
    UNPACKED_SCALES,
    UNPACKED_MINIMUM_SCALES,
    UNPACKED_HALF_SCALES,
};

// Values of 4-bit codes, plus 128.
enum Lookup { NO_LOOKUP, MXFP4_LOOKUP, IQ4_LOOKUP };
alignas(16) constexpr uint8_t LOOKUP_VALUES[][16] = {
    {},
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
};

struct WeightLayout {
    int bits;        // of a stored code
    int value_bits;  // of a value plus zero
    int zero;        // a power of two; 0: values are the codes
    ScaleKind scales;
    Lookup lookup;

    constexpr bool has_minimums() const {
        return scales == FLOAT16_MINIMUMS || scales == SUPERBLOCK_MINIMUMS || scales == UNPACKED_MINIMUM_SCALES;
    }
    // Half groups have scales of their own.
    constexpr bool has_halves() const { return scales == SUPERBLOCK_HALVES || scales == UNPACKED_HALF_SCALES; }
    // Bytes of a group of a block, without scales.
    constexpr int64_t group_bytes() const { return GROUP * OUTPUTS * bits / 8; }
    // Groups of a record of scales, and its bytes.
    constexpr int64_t record_groups() const {
        return scales == SUPERBLOCK_MINIMUMS || scales == SUPERBLOCK_HALVES ? SUPERBLOCK : 1;
    }
    constexpr int64_t record_bytes() const {
        switch (scales) {
            case FLOAT16_MINIMUMS: return 4 * OUTPUTS;
            case SUPERBLOCK_MINIMUMS: return (4 + 2 * SUPERBLOCK) * OUTPUTS;
            case SUPERBLOCK_HALVES: return (2 + 2 * SUPERBLOCK) * OUTPUTS;
            case UNPACKED_SCALES: return 4 * OUTPUTS;
            case UNPACKED_MINIMUM_SCALES:
            case UNPACKED_HALF_SCALES: return 8 * OUTPUTS;
            default: return 2 * OUTPUTS;
        }
    }
    constexpr int64_t scale_bytes(int64_t groups) const {
        return (groups + record_groups() - 1) / record_groups() * record_bytes();
    }
};

constexpr WeightLayout layout_of(WeightFormat format) {
    switch (format) {
        case WEIGHTS_INT8: return {8, 8, 128, BFLOAT16_SCALES, NO_LOOKUP};
        case WEIGHTS_INT4: return {4, 4, 8, BFLOAT16_SCALES, NO_LOOKUP};
        case WEIGHTS_Q8_0: return {8, 8, 128, FLOAT16_SCALES, NO_LOOKUP};
        case WEIGHTS_Q4_0: return {4, 4, 8, FLOAT16_SCALES, NO_LOOKUP};
        case WEIGHTS_Q5_0: return {5, 5, 16, FLOAT16_SCALES, NO_LOOKUP};
        case WEIGHTS_Q4_1: return {4, 4, 0, FLOAT16_MINIMUMS, NO_LOOKUP};
        case WEIGHTS_Q5_1: return {5, 5, 0, FLOAT16_MINIMUMS, NO_LOOKUP};
        case WEIGHTS_Q4_K: return {4, 4, 0, SUPERBLOCK_MINIMUMS, NO_LOOKUP};
        case WEIGHTS_Q5_K: return {5, 5, 0, SUPERBLOCK_MINIMUMS, NO_LOOKUP};
        case WEIGHTS_Q6_K: return {6, 6, 32, SUPERBLOCK_HALVES, NO_LOOKUP};
        case WEIGHTS_IQ4_NL: return {4, 8, 128, FLOAT16_SCALES, IQ4_LOOKUP};
        case WEIGHTS_IQ4_XS: return {4, 8, 128, SUPERBLOCK_HALVES, IQ4_LOOKUP};
        case WEIGHTS_MXFP4: return {4, 8, 128, BFLOAT16_SCALES, MXFP4_LOOKUP};
        case UNPACKED_GROUPS: return {8, 8, 128, UNPACKED_SCALES, NO_LOOKUP};
        case UNPACKED_MINIMUMS: return {8, 8, 0, UNPACKED_MINIMUM_SCALES, NO_LOOKUP};
        case UNPACKED_HALVES: return {8, 8, 128, UNPACKED_HALF_SCALES, NO_LOOKUP};
        default: return {};
    }
}

// Calls a function with the format as a compile-time constant.
template <class Function>
inline void with_format(WeightFormat format, Function &&function) {
#define WITH(FORMAT) \
    case FORMAT: return function(std::integral_constant<WeightFormat, FORMAT>());
    switch (format) {
        WITH(WEIGHTS_INT8)
        WITH(WEIGHTS_INT4)
        WITH(WEIGHTS_Q8_0)
        WITH(WEIGHTS_Q4_0)
        WITH(WEIGHTS_Q5_0)
        WITH(WEIGHTS_Q4_1)
        WITH(WEIGHTS_Q5_1)
        WITH(WEIGHTS_Q4_K)
        WITH(WEIGHTS_Q5_K)
        WITH(WEIGHTS_Q6_K)
        WITH(WEIGHTS_IQ4_NL)
        WITH(WEIGHTS_IQ4_XS)
        WITH(WEIGHTS_MXFP4)
        default: return;
    }
#undef WITH
}

}  // namespace
