// The C interface of the linear kernel. engine/kernels/cpu/linear.py mirrors these structures field by field.
//
// One call multiplies the same rows by one matrix or by several. A matrix [outputs][columns] lies in blocks of 16 outputs,
// a block in groups of 32 columns, and a group in words: all 16 outputs' codes of a few columns side by side, so that one
// vector of 64 bytes goes on with 16 sums at once. engine/kernels/packing.py makes this:
//
//     codes   [block][group][word][output: 16][byte: 4]
//     scales  [block][group][output: 16]               bfloat16; a weight is (code - zero) * scale
//
//     8 bits, zero 128, 8 words:    a byte is the code of column     4 * word + byte
//     4 bits, zero 8, 4 words:      its low half is that of column   8 * word + byte, its high half that of the column
//                                   4 further
#pragma once

#include "format.h"

constexpr int64_t GROUP = 32, OUTPUTS = 16;

struct Matrix {
    const uint8_t *codes;    // aligned to 64 bytes
    const uint16_t *scales;  // aligned to 32 bytes
    int64_t bits;            // 8 or 4
    int64_t outputs;         // as many as there are, the last block may hold fewer
    void *output;            // [rows][outputs], without gaps
};

struct Product {
    const void *input;  // [rows][columns], `stride` numbers from row to row
    Format format;      // of the input and all outputs
    int64_t stride, rows, columns;
    const Matrix *matrices;
    int64_t count, threads;
};

extern "C" int64_t cellar_multiply(const Product *product);

// Products of float32 rows and plain weights: output[batch][row][output] = rows[batch][row] . weights[batch][output]. Strides
// are in elements, columns lie side by side.
struct PlainProduct {
    const float *rows;
    const void *weights;
    float *output;  // without gaps
    Format format;  // of the weights: FLOAT32 or BFLOAT16
    int64_t batch, count, outputs, columns;
    int64_t row_stride, row_batch_stride, weight_stride, weight_batch_stride;
    int64_t threads;
};

// Not in the generic variant.
extern "C" int64_t cellar_multiply_plain(const PlainProduct *product);
