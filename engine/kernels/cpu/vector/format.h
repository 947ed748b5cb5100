// Number formats and results of all kernels; attention/attention.py and products/linear.py have the same numbers.
#pragma once

#include <cstdint>

enum Format : int64_t { FLOAT32, BFLOAT16, INT8 };
// Of weights; those from WEIGHTS_INT8 on are quantised (weight_formats.h).
enum WeightFormat : int64_t {
    WEIGHTS_FLOAT32,
    WEIGHTS_BFLOAT16,
    WEIGHTS_INT8,
    WEIGHTS_INT4,
    WEIGHTS_Q8_0,
    WEIGHTS_Q4_0,
    WEIGHTS_Q5_0,
    WEIGHTS_Q4_1,
    WEIGHTS_Q5_1,
    WEIGHTS_Q4_K,
    WEIGHTS_Q5_K,
    WEIGHTS_Q6_K,
    WEIGHTS_IQ4_NL,
    WEIGHTS_IQ4_XS,
    WEIGHTS_MXFP4,
    // Unpacked blocks, within a product only (unpacked_blocks.h).
    UNPACKED_GROUPS,
    UNPACKED_MINIMUMS,
    UNPACKED_HALVES,
};
enum Outcome : int64_t { DONE, NO_MEMORY, BAD_CELL, BAD_TOKEN, BAD_SCALE };
