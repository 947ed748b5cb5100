// The C interface of the linear kernel. linear.py and row_invariant.py mirror these structures and compare sizes and offsets with `cellar_layout` when they load the library.
//
// One call multiplies the same rows by one or several quantised matrices. A matrix [outputs][columns] is stored in blocks of
// 16 outputs, a block in groups of 32 columns, a group in words: the codes of 16 outputs for a few columns, so that a vector of
// 64 bytes continues 16 sums. The layout of engine/kernels/packing.py:
//
//     codes   [block][group][word][output: 16][byte: 4]
//
//     8 bits, 8 words:  a byte is the code of column 4 * word + byte
//     4 bits, 4 words:  the low half of a byte is the code of column 8 * word + byte, the high half that of the column 4 further
//     5 bits, 5 words:  4 words of low halves as with 4 bits; bit i of a byte of the last word is the fifth bit of the code of
//                       column 4 * i + byte
//     6 bits, 6 words:  the same with two last words of 2 bits each: bits 2 * i of the first one belong to column 4 * i + byte,
//                       those of the second one to columns 16 further
//
// A weight is scale * value(code) + minimum (weight_formats.h). Scales are stored in records of 16 outputs:
//
//     bfloat16            [block][group][output]
//     float16             [block][group][output]
//     float16_minimum     [block][group][scale, minimum][output]                    float16
//     superblock_minimum  [block][superblock], a superblock of up to 8 groups:      [super-scale, super-minimum][output] float16,
//                                                                                   [group: 8][scale, minimum][output] uint8
//     superblock_half     [block][superblock]:                                      [output] float16 super-scales,
//                                                                                   [group: 8][half: 2][output] int8
//
// Columns need not fill their last superblock: codes have as many groups as there are columns for, scales whole superblocks.
#pragma once

#include "vector/format.h"

constexpr int64_t GROUP = 32, OUTPUTS = 16;

struct QuantisedMatrix {
    const uint8_t *codes;   // aligned to 64 bytes
    const uint8_t *scales;  // aligned to 32 bytes
    WeightFormat format;
    int64_t outputs;  // the last block is padded
    void *output;     // [rows][outputs], contiguous
};

struct LinearCall {
    const void *input;  // [rows][columns], `stride` numbers from row to row
    Format format;      // of the input and all outputs
    int64_t stride, rows, columns;
    const QuantisedMatrix *matrices;
    int64_t count, threads;
};

extern "C" int64_t cellar_multiply(const LinearCall *product);

// Some blocks of a matrix times quantised rows: the products of the native step, in which they are not compiled again.
// `first_block` is a multiple of the blocks of a unit of work; matrix and rows are a QuantisedMatrix and QuantisedRows
// (quantised_rows.h), rows [first, last) a RowRange.
typedef void MultiplyBlocks(const void *matrix, int64_t first_block, const void *rows, int64_t first, int64_t last);
extern "C" void cellar_multiply_blocks(const void *matrix, int64_t first_block, const void *rows, int64_t first, int64_t last);

// Products of float32 rows and weights that are not quantised: output[batch][row][output] = rows[batch][row] .
// weights[batch][output]. Strides are in elements; columns are contiguous.
struct PlainLinearCall {
    const float *rows;
    const void *weights;
    float *output;  // contiguous
    Format format;  // of the weights: FLOAT32 or BFLOAT16
    int64_t batch, count, outputs, columns;
    int64_t row_stride, row_batch_stride, weight_stride, weight_batch_stride;
    int64_t threads;
};

// Repacks the blocks of a matrix from a GGUF file (block_packing.h) without loss.
struct BlockCall {
    const uint8_t *blocks;  // [outputs][bytes of a row]
    uint8_t *codes, *scales;
    int64_t type;              // of the file
    int64_t outputs, columns;  // columns of whole blocks
    int64_t threads;
};

// DONE, or BAD_SCALE for scales that are infinite or NaN.
extern "C" int64_t cellar_pack_blocks(const BlockCall *call);

// The weights of blocks as float32 numbers [outputs][columns].
struct UnpackCall {
    const uint8_t *blocks;
    float *numbers;
    int64_t type, outputs, columns, threads;
};

extern "C" int64_t cellar_unpack_blocks(const UnpackCall *call);

// Not in the generic variant.
extern "C" int64_t cellar_multiply_plain(const PlainLinearCall *product);
