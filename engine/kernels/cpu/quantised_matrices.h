// Products of quantised rows (quantised_rows.h) and quantised matrices (linear.h).
//
// Few rows are multiplied by one block of outputs at a time, all rows at once. Many rows are computed in tiles, which are
// multiplied by several blocks at once, as many as there are registers for sums. All tiles of a range of rows are multiplied by
// the same blocks, which stay in the cache like the rows.
//
// The sums of a group are integers, and groups are added up in order: a row has the same bits for any batch, any tile and any
// number of threads.
#pragma once

#include <utility>

#include "quantised_rows.h"

namespace {

// Prefetch distance of a tile, and of a tile that is bound by memory.
constexpr int64_t BYTES_AHEAD = 2048, FAR_AHEAD = 4096;
template <int ROWS, int BLOCKS>
constexpr bool MEMORY_BOUND = ROWS <= 2 && BLOCKS == 1;
// A tile that is bound by arithmetic prefetches twice: into the L2 and into the L1 cache (measured on an Intel processor: 3 to
// 8 rows with 4 bits take 8 to 10 % less time than with one prefetch, 4 rows with 8 bits 4 %).
constexpr int64_t FIRST_AHEAD = 16384, SECOND_AHEAD = 1024;
template <int ROWS, int BLOCKS>
constexpr bool PREFETCHES_TWICE = ROWS > 2 && BLOCKS == 1;

template <int BITS>
constexpr int64_t GROUP_BYTES = GROUP * OUTPUTS * BITS / 8;

// Rows [first, last) of a call, in whole tiles but for the last one of the call.
struct RowRange {
    int64_t first, last;
};

// Codes that a tile prefetches: `lines` cache lines with each group.
struct Prefetch {
    const uint8_t *start;
    int64_t lines;
};

inline void write_row(float *to, const float *from, int64_t count) { memcpy(to, from, count * sizeof(float)); }

// Round to nearest even; NaN stays NaN.
inline void write_row(bfloat16 *to, const float *from, int64_t count) {
    for (int64_t at = 0; at < count; ++at) {
        const uint32_t bits = read<uint32_t>(from + at), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[at].bits = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

// A group of BLOCKS blocks, `stride` bytes apart, times a group of ROWS rows. Fully unrolled: sums indexed by a loop variable
// would be in memory.
template <int BITS, int ROWS, int BLOCKS>
inline __attribute__((always_inline)) void multiply_group(const uint8_t *codes, int64_t stride, const int8_t *numbers,
                                                          Sums (&sums)[ROWS][BLOCKS]) {
#pragma GCC unroll 8
    for (int64_t at = 0; at < GROUP_BYTES<BITS>; at += 64) {
        if (MEMORY_BOUND<ROWS, BLOCKS>) __builtin_prefetch(codes + at + FAR_AHEAD, 0, 3);
        if (PREFETCHES_TWICE<ROWS, BLOCKS>) {
            __builtin_prefetch(codes + at + FIRST_AHEAD, 0, 2);
            __builtin_prefetch(codes + at + SECOND_AHEAD, 0, 3);
        }
        Words stored[BLOCKS];
#pragma GCC unroll 2
        for (int block = 0; block < BLOCKS; ++block) stored[block] = fetch(codes + block * stride + at);
#pragma GCC unroll 2
        for (int half = 0; half < 8 / BITS; ++half) {
            Words words[BLOCKS];
#pragma GCC unroll 2
            for (int block = 0; block < BLOCKS; ++block)
                words[block] = BITS == 8 ? stored[block] : half == 0 ? low(stored[block]) : high(stored[block]);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row, numbers += 4)
#pragma GCC unroll 2
                for (int block = 0; block < BLOCKS; ++block)
                    sums[row][block] = dot<BITS>(sums[row][block], words[block], numbers);
        }
    }
}

// Prefetch the memory of the outputs.
template <int ROWS, int BLOCKS>
inline void prefetch_output(const QuantisedMatrix &matrix, Format format, int64_t row, int64_t block) {
    const float *const to = (const float *)matrix.output + row * matrix.outputs + block * OUTPUTS;
    for (int at = 0; at < ROWS * BLOCKS && format == FLOAT32; ++at)
        __builtin_prefetch(to + at / BLOCKS * matrix.outputs + at % BLOCKS * OUTPUTS, 1, 3);
}

// Write the totals of some rows and blocks: whole blocks of float32 directly to the output.
template <int ROWS, int BLOCKS>
inline void write_totals(const QuantisedMatrix &matrix, Format format, int64_t row, int64_t block,
                         const Totals (&totals)[ROWS][BLOCKS]) {
    constexpr int64_t WIDTH = BLOCKS * OUTPUTS;
    const int64_t start = row * matrix.outputs + block * OUTPUTS, width = lesser(matrix.outputs - block * OUTPUTS, WIDTH);
    const bool whole = format == FLOAT32 && width == WIDTH;
    alignas(64) float values[ROWS * WIDTH];
    float *const to = whole ? (float *)matrix.output + start : values;
    const int64_t stride = whole ? matrix.outputs : WIDTH;
#pragma GCC unroll 16
    for (int at = 0; at < ROWS * BLOCKS; ++at)
        write(to + at / BLOCKS * stride + at % BLOCKS * OUTPUTS, totals[at / BLOCKS][at % BLOCKS]);
    if (whole) return;
    for (int at = 0; at < ROWS; ++at) {
        if (format == BFLOAT16)
            write_row((bfloat16 *)matrix.output + start + at * matrix.outputs, values + at * WIDTH, width);
        else
            write_row((float *)matrix.output + start + at * matrix.outputs, values + at * WIDTH, width);
    }
}

// BLOCKS blocks of outputs times the tile of ROWS rows from `first` on.
template <int BITS, int ROWS, int BLOCKS>
void multiply_tile(const QuantisedMatrix &matrix, int64_t block, const QuantisedRows &rows, int64_t first, Prefetch ahead) {
    constexpr int64_t BYTES = GROUP_BYTES<BITS>;
    constexpr bool prefetches = MEMORY_BOUND<ROWS, BLOCKS> || PREFETCHES_TWICE<ROWS, BLOCKS>;
    const int64_t groups = rows.groups, start = first * groups;
    const uint8_t *codes = matrix.codes + block * groups * BYTES;
    const uint16_t *scales = matrix.scales + block * groups * OUTPUTS;
    if (BLOCKS > 1) prefetch_output<ROWS, BLOCKS>(matrix, rows.format, first, block);
    Totals totals[ROWS][BLOCKS];
#pragma GCC unroll 16
    for (int at = 0; at < ROWS * BLOCKS; ++at) totals[at / BLOCKS][at % BLOCKS] = nothing();
    for (int64_t group = 0; group < groups; ++group) {
        // Codes that all tiles prefetch together are not needed at once: into the L2 cache.
        for (int64_t line = 0; line < ahead.lines && !prefetches; ++line, ahead.start += 64)
            __builtin_prefetch(ahead.start, 0, BLOCKS == 1 ? 3 : 2);
        const int64_t at = start + group * ROWS;
        Sums sums[ROWS][BLOCKS];
#pragma GCC unroll 16
        for (int own = 0; own < ROWS * BLOCKS; ++own)
            sums[own / BLOCKS][own % BLOCKS] = begin<BITS>(rows.starts[at + own / BLOCKS]);
        multiply_group<BITS>(codes + group * BYTES, groups * BYTES, rows.codes + at * GROUP, sums);
#pragma GCC unroll 2
        for (int own = 0; own < BLOCKS; ++own) {
            const Totals wide = scales_at(scales + (own * groups + group) * OUTPUTS);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
                totals[row][own] = add(totals[row][own], sums[row][own], wide, rows.scales[at + row]);
        }
    }
    write_totals(matrix, rows.format, first, block, totals);
}

typedef void Tile(const QuantisedMatrix &, int64_t, const QuantisedRows &, int64_t, Prefetch);

// The instantiation for a number of rows.
template <int BITS, int BLOCKS, std::size_t... I>
inline Tile *tile_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr Tile *tiles[] = {multiply_tile<BITS, I + 1, BLOCKS>...};
    return tiles[rows - 1];
}

// BLOCKS blocks of outputs times a range of rows, in tiles of at most MOST.
template <int BITS, int BLOCKS, int MOST>
void multiply_some(const QuantisedMatrix &matrix, int64_t block, const QuantisedRows &rows, RowRange range) {
    constexpr int64_t LINES = BLOCKS * GROUP_BYTES<BITS> / 64;
    const auto multiply = [&](int64_t first, int64_t count, Prefetch ahead) {
        tile_of<BITS, BLOCKS>(count, std::make_index_sequence<MOST>())(matrix, block, rows, first, ahead);
    };
    const int64_t count = range.last - range.first, bytes = rows.groups * GROUP_BYTES<BITS>;
    const uint8_t *const codes = matrix.codes + block * bytes;
    // A single tile prefetches its own codes. Several tiles each prefetch a part of the next blocks.
    if (count <= rows.tile) return multiply(range.first, count, {codes + BYTES_AHEAD, LINES});
    const int64_t lines = ceil_div(LINES, ceil_div(count, rows.tile));
    const uint8_t *next = codes + BLOCKS * bytes, *const end = next + BLOCKS * bytes;
    const int64_t scales = BLOCKS * rows.groups * OUTPUTS, after = block * rows.groups * OUTPUTS + scales;
    for (int64_t at = after; at < after + scales; at += 32) __builtin_prefetch(matrix.scales + at, 0, 2);
    for (int64_t first = range.first; first < range.last; first += rows.tile, next += rows.groups * lines * 64)
        multiply(first, lesser(range.last - first, rows.tile), {next, next < end ? lines : 0});
}

// Up to BLOCKS_AT_ONCE blocks of a matrix from `first` on.
template <int BITS>
void multiply_blocks(const QuantisedMatrix &matrix, int64_t first, const QuantisedRows &rows, RowRange range) {
    constexpr int MOST = ROWS_ALONE > ROWS_PER_TILE ? ROWS_ALONE : ROWS_PER_TILE;
    const int64_t last = lesser(first + BLOCKS_AT_ONCE, ceil_div(matrix.outputs, OUTPUTS));
    if (rows.rows > ROWS_ALONE && last - first == BLOCKS_AT_ONCE)
        return multiply_some<BITS, BLOCKS_AT_ONCE, ROWS_PER_TILE>(matrix, first, rows, range);
    for (int64_t block = first; block < last; ++block) multiply_some<BITS, 1, MOST>(matrix, block, rows, range);
}

}  // namespace
