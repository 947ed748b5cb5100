// Products of quantised rows (quantised_rows.h) and quantised matrices (linear.h).
//
// Few rows are multiplied by one block of outputs at a time, all rows at once. Many rows are computed in tiles, which are
// multiplied by several blocks at once, as many as there are registers for sums. All tiles of a range of rows are multiplied by
// the same blocks, which stay in the cache like the rows. Most formats are unpacked once (unpacked_blocks.h).
//
// The sums of a group are integers, and groups are added up in order: a row has the same bits for any batch, any tile and any
// number of threads.
#pragma once

#include <utility>

#include "products/quantised_rows.h"
#include "products/unpacked_blocks.h"

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

// Codes that a tile prefetches: `lines` cache lines with each group.
struct Prefetch {
    const uint8_t *start;
    int64_t lines;
};

// The line of a group that is prefetched with a word: nibbles with every second one, planes of high bits with the others.
template <int BITS>
constexpr int line_of(int word) {
    return BITS == 8 ? word : word % 2 == 0 ? word / 2 : word / 2 < BITS - 4 ? 4 + word / 2 : -1;
}

template <int BITS, int PART, int WORD, bool IS_LAST, int ROWS, int BLOCKS>
inline __attribute__((always_inline)) void add_products(const Words (&words)[BLOCKS], const int8_t *numbers,
                                                        Sums (&sums)[ROWS][BLOCKS]) {
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int block = 0; block < BLOCKS; ++block) {
            sums[row][block] = dot<BITS, PART>(sums[row][block], words[block], numbers, WORD * ROWS + row);
            widen<BITS, PART, WORD, IS_LAST>(sums[row][block]);
        }
}

template <WeightFormat FORMAT, int ROWS, int BLOCKS, int WORD, bool IS_LAST>
inline __attribute__((always_inline)) void multiply_word(const uint8_t *codes, int64_t stride, const int8_t *numbers,
                                                         Sums (&sums)[ROWS][BLOCKS]) {
    constexpr WeightLayout OWN = layout_of(FORMAT);
    constexpr int BITS = OWN.value_bits, LINE = line_of<OWN.bits>(WORD);
    if constexpr (LINE >= 0) {
        if (MEMORY_BOUND<ROWS, BLOCKS>) __builtin_prefetch(codes + 64 * LINE + FAR_AHEAD, 0, 3);
        if (PREFETCHES_TWICE<ROWS, BLOCKS>) {
            __builtin_prefetch(codes + 64 * LINE + FIRST_AHEAD, 0, 2);
            __builtin_prefetch(codes + 64 * LINE + SECOND_AHEAD, 0, 3);
        }
    }
    Words words[BLOCKS];
#pragma GCC unroll 2
    for (int block = 0; block < BLOCKS; ++block) words[block] = values_of<FORMAT, WORD>(codes + block * stride);
    add_products<BITS, 0, WORD, IS_LAST>(words, numbers, sums);
    if constexpr (PARTS<BITS> > 1) add_products<BITS, 1, WORD, IS_LAST>(words, numbers, sums);
}

// Words of a group of BLOCKS blocks, `stride` bytes apart, times a group of ROWS rows. Fully unrolled: sums indexed by a loop
// variable would be in memory.
template <WeightFormat FORMAT, int ROWS, int BLOCKS, int FIRST, std::size_t... WORD>
inline __attribute__((always_inline)) void multiply_words(const uint8_t *codes, int64_t stride, const int8_t *numbers,
                                                          Sums (&sums)[ROWS][BLOCKS], std::index_sequence<WORD...>) {
    (multiply_word<FORMAT, ROWS, BLOCKS, FIRST + (int)WORD, WORD + 1 == sizeof...(WORD)>(codes, stride, numbers, sums), ...);
}

// Prefetch the memory of the outputs.
template <int ROWS, int BLOCKS>
inline void prefetch_output(const QuantisedMatrix &matrix, Format format, int64_t row, int64_t block) {
    const float *const to = (const float *)matrix.output + row * matrix.outputs + block * OUTPUTS;
    for (int i = 0; i < ROWS * BLOCKS && format == FLOAT32; ++i)
        __builtin_prefetch(to + i / BLOCKS * matrix.outputs + i % BLOCKS * OUTPUTS, 1, 3);
}

// Write the first `width` of `stride` values of some rows. Not inlined: it would be a quarter of the code of each tile.
inline __attribute__((noinline)) void write_part(const QuantisedMatrix &matrix, Format format, int64_t start,
                                                 const float *values, int64_t rows, int64_t width, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row, start += matrix.outputs, values += stride) {
        if (format == BFLOAT16)
            write_row((bfloat16 *)matrix.output + start, values, width);
        else
            write_row((float *)matrix.output + start, values, width);
    }
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
    for (int i = 0; i < ROWS * BLOCKS; ++i)
        write(to + i / BLOCKS * stride + i % BLOCKS * OUTPUTS, totals[i / BLOCKS][i % BLOCKS]);
    if (!whole) write_part(matrix, format, start, values, ROWS, width, WIDTH);
}

// Codes and scales of neighbouring blocks, in their format or unpacked.
struct Blocks {
    const uint8_t *codes, *scales;
};

// The sums of a group or, for HALF 0 and 1, of half a group.
template <WeightFormat FORMAT, int ROWS, int BLOCKS, int HALF = -1>
inline __attribute__((always_inline)) void sum_group(const uint8_t *codes, int64_t stride, const QuantisedRows &rows,
                                                     int64_t i, Sums (&sums)[ROWS][BLOCKS]) {
    constexpr WeightLayout OWN = layout_of(FORMAT);
    const int32_t *const starts = HALF < 0 ? rows.starts + i : rows.halves + 2 * i + HALF * ROWS;
#pragma GCC unroll 16
    for (int index = 0; index < ROWS * BLOCKS; ++index)
        sums[index / BLOCKS][index % BLOCKS] = begin<OWN.value_bits, OWN.zero>(starts[index / BLOCKS]);
    multiply_words<FORMAT, ROWS, BLOCKS, HALF == 1 ? GROUP_WORDS / 2 : 0>(
        codes, stride, rows.codes + i * GROUP, sums, std::make_index_sequence<HALF < 0 ? GROUP_WORDS : GROUP_WORDS / 2>());
}

// A group of formats with a scale for each half.
template <WeightFormat FORMAT, int ROWS, int BLOCKS>
inline __attribute__((always_inline)) void add_halves(const uint8_t *codes, int64_t stride, const QuantisedRows &rows,
                                                      int64_t i, const GroupScales (&scales)[BLOCKS],
                                                      Totals (&totals)[ROWS][BLOCKS]) {
    Sums sums[ROWS][BLOCKS];
    Totals both[ROWS][BLOCKS];
    sum_group<FORMAT, ROWS, BLOCKS, 0>(codes, stride, rows, i, sums);
#pragma GCC unroll 16
    for (int index = 0; index < ROWS * BLOCKS; ++index)
        both[index / BLOCKS][index % BLOCKS] = multiply(sums[index / BLOCKS][index % BLOCKS], scales[index % BLOCKS].first);
    sum_group<FORMAT, ROWS, BLOCKS, 1>(codes, stride, rows, i, sums);
#pragma GCC unroll 16
    for (int index = 0; index < ROWS * BLOCKS; ++index) {
        const int row = index / BLOCKS, block = index % BLOCKS;
        both[row][block] = add(both[row][block], sums[row][block], scales[block].second);
        totals[row][block] = add(totals[row][block], both[row][block], rows.scales[i + row]);
    }
}

// BLOCKS blocks of outputs times the tile of ROWS rows from `first` on.
template <WeightFormat FORMAT, int ROWS, int BLOCKS>
void multiply_tile(const QuantisedMatrix &matrix, int64_t block, Blocks blocks, const QuantisedRows &rows, int64_t first,
                   Prefetch ahead) {
    constexpr WeightLayout OWN = layout_of(FORMAT);
    constexpr int64_t BYTES = OWN.group_bytes();
    constexpr bool prefetches = MEMORY_BOUND<ROWS, BLOCKS> || PREFETCHES_TWICE<ROWS, BLOCKS>;
    const int64_t groups = rows.groups, start = first * groups;
    if (BLOCKS > 1) prefetch_output<ROWS, BLOCKS>(matrix, rows.format, first, block);
    Totals totals[ROWS][BLOCKS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS * BLOCKS; ++i) totals[i / BLOCKS][i % BLOCKS] = nothing();
    ScaleReader<FORMAT> readers[2] = {ScaleReader<FORMAT>(blocks.scales),
                                      ScaleReader<FORMAT>(blocks.scales + OWN.scale_bytes(groups))};
    for (int64_t group = 0; group < groups; ++group) {
        // Codes that all tiles prefetch together are not needed at once: into the L2 cache.
        for (int64_t line = 0; line < ahead.lines && !prefetches; ++line, ahead.start += 64)
            __builtin_prefetch(ahead.start, 0, BLOCKS == 1 ? 3 : 2);
        const int64_t i = start + group * ROWS;
        const uint8_t *const codes = blocks.codes + group * BYTES;
        if constexpr (OWN.has_halves()) {
            GroupScales scales[BLOCKS];
#pragma GCC unroll 2
            for (int index = 0; index < BLOCKS; ++index) scales[index] = readers[index].read(group);
            add_halves<FORMAT>(codes, groups * BYTES, rows, i, scales, totals);
            continue;
        }
        Sums sums[ROWS][BLOCKS];
        sum_group<FORMAT>(codes, groups * BYTES, rows, i, sums);
#pragma GCC unroll 2
        for (int index = 0; index < BLOCKS; ++index) {
            const GroupScales scales = readers[index].read(group);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                totals[row][index] = add(totals[row][index], sums[row][index], scales.first, rows.scales[i + row]);
                if constexpr (OWN.has_minimums())
                    totals[row][index] = add(totals[row][index], scales.second, rows.sums[i + row]);
            }
        }
    }
    write_totals(matrix, rows.format, first, block, totals);
}

typedef void Tile(const QuantisedMatrix &, int64_t, Blocks, const QuantisedRows &, int64_t, Prefetch);

// The instantiation for a number of rows.
template <WeightFormat FORMAT, int BLOCKS, std::size_t... I>
inline Tile *tile_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr Tile *tiles[] = {multiply_tile<FORMAT, I + 1, BLOCKS>...};
    return tiles[rows - 1];
}

// BLOCKS blocks of outputs times a range of rows, in tiles of at most MOST. Several tiles each prefetch a part of the next
// blocks, `next` with `lines` cache lines for each group.
template <WeightFormat FORMAT, int BLOCKS, int MOST>
void multiply_tiles(const QuantisedMatrix &matrix, int64_t block, Blocks blocks, const QuantisedRows &rows, RowRange range,
                    const uint8_t *next, int64_t lines) {
    const int64_t tiles = ceil_div(range.last - range.first, rows.tile), own_lines = ceil_div(lines, tiles);
    const uint8_t *const end = next + rows.groups * lines * 64;
    for (int64_t first = range.first; first < range.last; first += rows.tile, next += rows.groups * own_lines * 64) {
        const int64_t count = lesser(range.last - first, rows.tile);
        tile_of<FORMAT, BLOCKS>(count, std::make_index_sequence<MOST>())(matrix, block, blocks, rows, first,
                                                                         {next, next < end ? own_lines : 0});
    }
}

inline void prefetch_bytes(const uint8_t *start, int64_t count) {
    for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(start + i, 0, 2);
}

// BLOCKS blocks of outputs times a range of rows, in tiles of at most MOST.
template <WeightFormat FORMAT, int BLOCKS, int MOST>
void multiply_some(const QuantisedMatrix &matrix, int64_t block, const QuantisedRows &rows, RowRange range) {
    constexpr int64_t BYTES = layout_of(FORMAT).group_bytes(), LINES = BLOCKS * BYTES / 64;
    const int64_t count = range.last - range.first, bytes = rows.groups * BYTES;
    const int64_t scale_bytes = layout_of(FORMAT).scale_bytes(rows.groups);
    const Blocks blocks = {matrix.codes + block * bytes, matrix.scales + block * scale_bytes};
    // A single tile prefetches its own codes.
    if (count <= rows.tile)
        return tile_of<FORMAT, BLOCKS>(count, std::make_index_sequence<MOST>())(matrix, block, blocks, rows, range.first,
                                                                                {blocks.codes + BYTES_AHEAD, LINES});
    prefetch_bytes(blocks.scales + BLOCKS * scale_bytes, BLOCKS * scale_bytes);
    multiply_tiles<FORMAT, BLOCKS, MOST>(matrix, block, blocks, rows, range, blocks.codes + BLOCKS * bytes, LINES);
}

// BLOCKS_AT_ONCE blocks, unpacked once, times a range of rows; false without memory for that.
template <WeightFormat FORMAT>
bool multiply_unpacked(const QuantisedMatrix &matrix, int64_t block, const QuantisedRows &rows, RowRange range) {
    constexpr WeightFormat TO = unpacked_format(FORMAT);
    constexpr int64_t BYTES = layout_of(FORMAT).group_bytes(), LINES = BLOCKS_AT_ONCE * BYTES / 64;
    static thread_local UnpackedMemory memory;
    const int64_t groups = rows.groups, bytes = groups * BYTES, scale_bytes = layout_of(FORMAT).scale_bytes(groups);
    const int64_t unpacked_bytes = groups * layout_of(TO).group_bytes(), unpacked_scales = layout_of(TO).scale_bytes(groups);
    uint8_t *const codes = memory.reserve(BLOCKS_AT_ONCE * (unpacked_bytes + unpacked_scales));
    if (!codes) return false;
    uint8_t *const scales = codes + BLOCKS_AT_ONCE * unpacked_bytes;
    for (int index = 0; index < BLOCKS_AT_ONCE; ++index)
        unpack_block<FORMAT>(matrix.codes + (block + index) * bytes, matrix.scales + (block + index) * scale_bytes, groups,
                             codes + index * unpacked_bytes, scales + index * unpacked_scales);
    prefetch_bytes(matrix.scales + (block + BLOCKS_AT_ONCE) * scale_bytes, BLOCKS_AT_ONCE * scale_bytes);
    multiply_tiles<TO, BLOCKS_AT_ONCE, ROWS_PER_TILE>(matrix, block, {codes, scales}, rows, range,
                                                      matrix.codes + (block + BLOCKS_AT_ONCE) * bytes, LINES);
    return true;
}

// Up to BLOCKS_AT_ONCE blocks of a matrix from `first` on.
template <WeightFormat FORMAT>
void multiply_blocks(const QuantisedMatrix &matrix, int64_t first, const QuantisedRows &rows, RowRange range) {
    constexpr int MOST = ROWS_ALONE > ROWS_PER_TILE ? ROWS_ALONE : ROWS_PER_TILE;
    const int64_t last = lesser(first + BLOCKS_AT_ONCE, ceil_div(matrix.outputs, OUTPUTS));
    if (rows.rows > ROWS_ALONE && last - first == BLOCKS_AT_ONCE) {
        const bool unpacks = ceil_div(range.last - range.first, rows.tile) >= min_unpacked_tiles(FORMAT);
        if constexpr (min_unpacked_tiles(FORMAT) < INT64_MAX)
            if (unpacks && multiply_unpacked<FORMAT>(matrix, first, rows, range)) return;
        if constexpr (has_tiles_of_blocks(FORMAT))
            return multiply_some<FORMAT, BLOCKS_AT_ONCE, ROWS_PER_TILE>(matrix, first, rows, range);
    }
    for (int64_t block = first; block < last; ++block) multiply_some<FORMAT, 1, MOST>(matrix, block, rows, range);
}

// The same for a format that is known at run time.
inline void multiply_blocks(const QuantisedMatrix &matrix, int64_t first, const QuantisedRows &rows, RowRange range) {
    with_format(matrix.format, [&](auto format) { multiply_blocks<decltype(format)::value>(matrix, first, rows, range); });
}

}  // namespace
