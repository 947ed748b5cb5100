// The C interface of the attention kernel. attention.py mirrors these structures and compares sizes and offsets with `cellar_layout` when it loads the library.
//
// One call is the attention of one layer for a packed batch. The rows of a segment are at the end of its cells:
//
//     position   first ... start ... start + rows
//     cells      [0]   ...
//     rows                 [row] ... [row + rows)
#pragma once

#include "vector/format.h"

enum AttentionRangeKind : int64_t { FULL, WINDOW, CHUNK };

struct Segment {
    int64_t row, rows;     // of the batch: [row, row + rows)
    int64_t start;         // position of the first row
    int64_t first;         // position of the first cell
    int64_t first_cell;    // the first cell, where the cells are contiguous
    const int64_t *cells;  // the cells of positions [first, start + rows); null where they are contiguous
};

// The K or V storage of one layer: [key_heads][cells][width]. Strides are in elements.
struct KVBuffer {
    const void *data;
    const float *scales;  // [key_heads][cells][parts], of INT8 only: a value is its code times the scale of its part
    int64_t width, head_stride, cell_stride, scale_head_stride, scale_cell_stride;
    int64_t part_width;  // columns of the first part; all others are the second one
};

struct AttentionCall {
    const float *query;  // [heads][rows][key width]
    int64_t query_head_stride, query_row_stride;
    float *output;       // [rows][heads][value width], contiguous
    const float *sinks;  // [heads], or null
    const Segment *segments;
    int64_t segment_count, heads, key_heads, cells;
    KVBuffer keys, values;
    Format format;
    AttentionRangeKind attention_range;
    int64_t attention_range_size;
    float scale, softcap;        // softcap 0: none
    int64_t rounds_to_bfloat16;  // whether queries and weights may be rounded to bfloat16 for products with bfloat16 keys and
                                 // values
    int64_t threads;
};

extern "C" int64_t cellar_attend(const AttentionCall *call);
