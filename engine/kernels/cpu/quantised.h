// Rows times quantised matrices (linear.h), whose rows are codes too (codes.h).
//
// Few rows meet one block of outputs after the other, all of them at once. Many come in tiles, which meet some blocks at
// once: what is loaded is then multiplied as often as there are registers for sums. All tiles of some rows meet the same
// blocks before the next ones' turn. So these lie in the processor's cache, and the rows too, of which a call takes some at
// a time.
//
// The sums of a group are whole numbers, and groups are added up in their order: so a row comes out the same bit for bit,
// whatever stands beside it, in whatever tile, with any threads.
#pragma once

#include <utility>

#include "codes.h"

namespace {

// Bytes of codes that one tile asks for before their turn, and one that does nothing but wait for memory.
constexpr int64_t BYTES_AHEAD = 2048, FAR_AHEAD = 4096;
template <int ROWS, int BLOCKS>
constexpr bool WAITS = ROWS <= 2 && BLOCKS == 1;
// One that computes meanwhile asks twice: so far ahead for the larger cache, and so far for the nearest (measured on an Intel
// processor: 3 to 8 rows of 4 bits take 8 to 10 % less time so than where they ask once, 4 rows of 8 bits 4 %).
constexpr int64_t FIRST_AHEAD = 16384, SECOND_AHEAD = 1024;
template <int ROWS, int BLOCKS>
constexpr bool ASKS_TWICE = ROWS > 2 && BLOCKS == 1;

template <int BITS>
constexpr int64_t GROUP_BYTES = GROUP * OUTPUTS * BITS / 8;

// Rows [first, last) of a call, whole tiles but for its last one.
struct Some {
    int64_t first, last;
};

// Codes that a tile asks for before their turn: so many lines of 64 bytes with each group.
struct Ahead {
    const uint8_t *start;
    int64_t lines;
};

inline void put(float *to, const float *from, int64_t count) { memcpy(to, from, count * sizeof(float)); }

// To the nearest, to even ones of two, and a NaN to a NaN.
inline void put(bfloat16 *to, const float *from, int64_t count) {
    for (int64_t at = 0; at < count; ++at) {
        const uint32_t bits = read<uint32_t>(from + at), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[at].bits = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

// A group of BLOCKS blocks, `stride` bytes from one to the other, times that of ROWS rows. All loops are unrolled, for sums
// that are counted through would lie in memory.
template <int BITS, int ROWS, int BLOCKS>
inline __attribute__((always_inline)) void multiply_group(const uint8_t *codes, int64_t stride, const int8_t *numbers,
                                                          Sums (&sums)[ROWS][BLOCKS]) {
#pragma GCC unroll 8
    for (int64_t at = 0; at < GROUP_BYTES<BITS>; at += 64) {
        if (WAITS<ROWS, BLOCKS>) __builtin_prefetch(codes + at + FAR_AHEAD, 0, 3);
        if (ASKS_TWICE<ROWS, BLOCKS>) {
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

// Ask for the memory that totals will come to lie in: they would wait for each line of it.
template <int ROWS, int BLOCKS>
inline void ask_for_output(const Matrix &matrix, Format format, int64_t row, int64_t block) {
    const float *const to = (const float *)matrix.output + row * matrix.outputs + block * OUTPUTS;
    for (int at = 0; at < ROWS * BLOCKS && format == FLOAT32; ++at)
        __builtin_prefetch(to + at / BLOCKS * matrix.outputs + at % BLOCKS * OUTPUTS, 1, 3);
}

// What rows from number `row` on make of some blocks: whole blocks of float32 come to lie where they belong at once.
template <int ROWS, int BLOCKS>
inline void put_totals(const Matrix &matrix, Format format, int64_t row, int64_t block,
                       const Totals (&totals)[ROWS][BLOCKS]) {
    constexpr int64_t WIDTH = BLOCKS * OUTPUTS;
    const int64_t start = row * matrix.outputs + block * OUTPUTS, width = lesser(matrix.outputs - block * OUTPUTS, WIDTH);
    const bool whole = format == FLOAT32 && width == WIDTH;
    alignas(64) float made[ROWS * WIDTH];
    float *const to = whole ? (float *)matrix.output + start : made;
    const int64_t stride = whole ? matrix.outputs : WIDTH;
#pragma GCC unroll 16
    for (int at = 0; at < ROWS * BLOCKS; ++at)
        write(to + at / BLOCKS * stride + at % BLOCKS * OUTPUTS, totals[at / BLOCKS][at % BLOCKS]);
    if (whole) return;
    for (int at = 0; at < ROWS; ++at) {
        if (format == BFLOAT16)
            put((bfloat16 *)matrix.output + start + at * matrix.outputs, made + at * WIDTH, width);
        else
            put((float *)matrix.output + start + at * matrix.outputs, made + at * WIDTH, width);
    }
}

// BLOCKS blocks of outputs times ROWS rows, the tile that begins with row `first`.
template <int BITS, int ROWS, int BLOCKS>
void multiply_tile(const Matrix &matrix, int64_t block, const Rows &rows, int64_t first, Ahead ahead) {
    constexpr int64_t BYTES = GROUP_BYTES<BITS>;
    constexpr bool asks = WAITS<ROWS, BLOCKS> || ASKS_TWICE<ROWS, BLOCKS>;
    const int64_t groups = rows.groups, start = first * groups;
    const uint8_t *codes = matrix.codes + block * groups * BYTES;
    const uint16_t *scales = matrix.scales + block * groups * OUTPUTS;
    if (BLOCKS > 1) ask_for_output<ROWS, BLOCKS>(matrix, rows.format, first, block);
    Totals totals[ROWS][BLOCKS];
#pragma GCC unroll 16
    for (int at = 0; at < ROWS * BLOCKS; ++at) totals[at / BLOCKS][at % BLOCKS] = nothing();
    for (int64_t group = 0; group < groups; ++group) {
        // What all tiles ask for together is not needed at once.
        for (int64_t line = 0; line < ahead.lines && !asks; ++line, ahead.start += 64)
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
    put_totals(matrix, rows.format, first, block, totals);
}

typedef void Tile(const Matrix &, int64_t, const Rows &, int64_t, Ahead);

// The function for a tile of so many rows.
template <int BITS, int BLOCKS, std::size_t... I>
inline Tile *tile_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr Tile *tiles[] = {multiply_tile<BITS, I + 1, BLOCKS>...};
    return tiles[rows - 1];
}

// BLOCKS blocks of outputs times some rows, in tiles of at most MOST.
template <int BITS, int BLOCKS, int MOST>
void multiply_some(const Matrix &matrix, int64_t block, const Rows &rows, Some some) {
    constexpr int64_t LINES = BLOCKS * GROUP_BYTES<BITS> / 64;
    const auto multiply = [&](int64_t first, int64_t count, Ahead ahead) {
        tile_of<BITS, BLOCKS>(count, std::make_index_sequence<MOST>())(matrix, block, rows, first, ahead);
    };
    const int64_t count = some.last - some.first, bytes = rows.groups * GROUP_BYTES<BITS>;
    const uint8_t *const codes = matrix.codes + block * bytes;
    // One tile asks for its own codes. Of several each asks for a part of those that all of them will meet next.
    if (count <= rows.tile) return multiply(some.first, count, {codes + BYTES_AHEAD, LINES});
    const int64_t lines = parts(LINES, parts(count, rows.tile));
    const uint8_t *next = codes + BLOCKS * bytes, *const end = next + BLOCKS * bytes;
    const int64_t scales = BLOCKS * rows.groups * OUTPUTS, after = block * rows.groups * OUTPUTS + scales;
    for (int64_t at = after; at < after + scales; at += 32) __builtin_prefetch(matrix.scales + at, 0, 2);
    for (int64_t first = some.first; first < some.last; first += rows.tile, next += rows.groups * lines * 64)
        multiply(first, lesser(some.last - first, rows.tile), {next, next < end ? lines : 0});
}

// Of a matrix the blocks from `first` on that are met at once, or as many of them as there are.
template <int BITS>
void multiply_blocks(const Matrix &matrix, int64_t first, const Rows &rows, Some some) {
    constexpr int MOST = ROWS_ALONE > ROWS_A_TILE ? ROWS_ALONE : ROWS_A_TILE;
    const int64_t last = lesser(first + BLOCKS_AT_ONCE, parts(matrix.outputs, OUTPUTS));
    if (rows.rows > ROWS_ALONE && last - first == BLOCKS_AT_ONCE)
        return multiply_some<BITS, BLOCKS_AT_ONCE, ROWS_A_TILE>(matrix, first, rows, some);
    for (int64_t block = first; block < last; ++block) multiply_some<BITS, 1, MOST>(matrix, block, rows, some);
}

}  // namespace
