// The C interface of the attention kernel. engine/kernels/cpu/attention.py mirrors these structures field by field.
//
// One call is one layer of a packed batch. A segment's rows stand at the end of its cells:
//
//     position   first ... start ... start + rows
//     cells      [0]   ...
//     rows                 [row] ... [row + rows)
#pragma once

#include "format.h"

enum Kind : int64_t { FULL, WINDOW, CHUNK };

struct Segment {
    int64_t row, rows;     // of the batch: [row, row + rows)
    int64_t start;         // position of the first row
    int64_t first;         // position of the first cell
    int64_t run;           // the first cell, where the cells are one run
    const int64_t *cells;  // the cells of positions [first, start + rows); null where they are one run
};

// The keys or the values of one layer's pool: [key_heads][cells][width]. Strides are in elements.
struct Plane {
    const void *data;
    const float *scales;  // [key_heads][cells], of INT8 only: an element is worth its number times its cell's scale
    int64_t width, head_stride, cell_stride, scale_stride;
};

struct Call {
    const float *query;  // [heads][rows][key width]
    int64_t query_head_stride, query_row_stride;
    float *output;       // [rows][heads][value width], without gaps
    const float *sinks;  // [heads], or null
    const Segment *segments;
    int64_t segment_count, heads, key_heads, cells;
    Plane keys, values;
    Format format;
    Kind reach;
    int64_t reach_size;
    float scale, softcap;  // softcap 0: none
    int64_t rounds;         // whether queries and weights may be rounded to bfloat16 to meet keys and values in it
    int64_t threads;
};

extern "C" int64_t cellar_attend(const Call *call);
