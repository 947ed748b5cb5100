// Rows as codes of 8 bits, to be multiplied by quantised matrices: each group of 32 numbers has a scale of its own.
//
// Rows stand in tiles, of which all are met at once (quantised.h):
//
//     codes   [tile][group][word: 8][row of the tile][byte: 4]
//     scales  [tile][group][row of the tile]           a number is code * scale
//     starts  [tile][group][row of the tile]           where a group's sums begin, to make up for the zero of the weights'
//                                                      codes of 8 bits: minus 128 times the sum of the row's own
//
// A row's numbers are quantised alone, so its codes do not depend on the rows beside it.
#pragma once

#include <math.h>
#include <omp.h>

#include "dot.h"
#include "linear.h"
#include "memory.h"
#include "vector.h"

namespace {

constexpr int64_t WORDS = GROUP / 4, VECTORS = GROUP / LANES;
// Groups that are quantised at a time: while one waits for its scale, others are computed.
constexpr int64_t GROUPS_AT_ONCE = 16;
// Fewer tiles than that are no even work for threads.
constexpr int64_t TILES_A_THREAD = 4;
// Bytes of rows that all outputs meet at a time. More than a core's own cache holds: rows come from the shared one as fast as
// they are met, and weights are read less often (measured: 256 rows of 8192 columns are 2 % faster than with 512 KB).
constexpr int64_t CACHED_BYTES = 3 * 1024 * 1024;
// Below that a scale's inverse is no number: such a group is zero.
constexpr float SMALLEST = 1.17549435e-38f;

// The quantised rows of a call.
struct Rows {
    int64_t rows, groups, tile;  // rows of a tile, the last one may hold fewer
    Format format;               // of what is made of them
    int8_t *codes;
    float *scales;
    int32_t *starts;

    static int64_t size(int64_t rows, int64_t groups) {
        return rows * groups * (GROUP + (int64_t)sizeof(float) + (int64_t)sizeof(int32_t));
    }
    Rows(int64_t rows, int64_t groups, Format format, char *memory)
        : rows(rows),
          groups(groups),
          tile(rows > ROWS_ALONE ? parts(rows, parts(rows, ROWS_A_TILE)) : ROWS_ALONE),
          format(format),
          codes((int8_t *)memory),
          scales((float *)(memory + rows * groups * GROUP)),
          starts((int32_t *)(scales + rows * groups)) {}

    // Rows that are best met at a time, in whole tiles.
    int64_t step() const { return larger(CACHED_BYTES / size(tile, groups), 1) * tile; }
};

typedef int8_t Codes __attribute__((vector_size(LANES)));

// LANES vectors are folded into one: lane i holds what an operation brings the lanes of number i to. They are overwritten.
template <int STEP, class Join, std::size_t... I>
inline Integers fold(Integers a, Integers b, Join join, std::index_sequence<I...>) {
    return join(SHUFFLE(a, b, folded_from(I, STEP)...), SHUFFLE(a, b, (folded_from(I, STEP) + STEP)...));
}
template <int STEP = 1, class Join>
inline Integers folded(Integers *vectors, Join join) {
    for (int at = 0; at < LANES / (2 * STEP); ++at)
        vectors[at] = fold<STEP>(vectors[2 * at], vectors[2 * at + 1], join, std::make_index_sequence<LANES>());
    if constexpr (2 * STEP < LANES) return folded<2 * STEP>(vectors, join);
    return vectors[0];
}

// Compared as whole numbers: so a NaN is greater than all numbers, and is not lost.
inline Integers top(Integers a, Integers b) { return a > b ? a : b; }

// The largest sizes that lanes of a group have.
inline Integers sizes(const Vector *numbers) {
    Integers most = {};
    for (int64_t at = 0; at < VECTORS; ++at) most = top(most, (Integers)numbers[at] & 0x7fffffff);
    return most;
}

// The codes of a group, and sums of them.
inline Integers encode(const Vector *numbers, float inverse, int8_t *to) {
    // Adding 1.5 * 2^23 rounds to whole numbers and leaves them in the low bits. What is added to is rounded before.
    const Vector magic = spread(12582912.0f);
    Integers sum = {};
    for (int64_t at = 0; at < VECTORS; ++at) {
        const Integers code = (Integers)(kept(numbers[at] * inverse) + magic) - (Integers)magic;
        const Codes narrow = __builtin_convertvector(code, Codes);
        memcpy(to + at * LANES, &narrow, sizeof narrow);
        sum += code;
    }
    return sum;
}

// Rows as they lie in memory.
template <class Number>
struct Numbers {
    const Number *input;
    int64_t stride, columns;

    // A group of a row; zeros behind its last number.
    void fetch(int64_t row, int64_t group, Vector *to) const {
        const Number *from = input + row * stride + group * GROUP;
        const int64_t left = columns - group * GROUP;
        left < GROUP ? fetch_part(from, left, to) : widen(from, to);
    }

  private:
    static void widen(const Number *from, Vector *to) {
        for (int64_t at = 0; at < VECTORS; ++at) to[at] = wide(from + at * LANES);
    }
    static __attribute__((noinline)) void fetch_part(const Number *from, int64_t left, Vector *to) {
        Number part[GROUP] = {};
        memcpy(part, from, left * sizeof(Number));
        widen(part, to);
    }
};

// Groups [first, last) of a row, GROUPS_AT_ONCE at most, of a source that fetches them.
template <class Source>
void quantise_some(const Source &source, int64_t row, int64_t first, int64_t last, const Rows &to) {
    Vector numbers[GROUPS_AT_ONCE][VECTORS];
    Integers lanes[GROUPS_AT_ONCE], sums[GROUPS_AT_ONCE];
    alignas(64) float scales[GROUPS_AT_ONCE], inverses[GROUPS_AT_ONCE];
    alignas(64) int32_t starts[GROUPS_AT_ONCE];
    const int64_t count = last - first;
    for (int64_t at = 0; at < count; ++at) {
        source.fetch(row, first + at, numbers[at]);
        lanes[at] = sizes(numbers[at]);
    }
    for (int64_t at = count; at < GROUPS_AT_ONCE; ++at) lanes[at] = sums[at] = Integers{};
    for (int64_t at = 0; at < GROUPS_AT_ONCE; at += LANES) {
        const Vector scale = (Vector)folded(lanes + at, top) / 127.0f;
        store(scales + at, scale);
        store(inverses + at, (scale >= SMALLEST) & (scale < INFINITY) ? 1.0f / scale : Vector{});
    }
    const int64_t start = row / to.tile * to.tile, rows = lesser(to.rows - start, to.tile);
    const int64_t place = start * to.groups + first * rows + row - start;
    int8_t *codes = to.codes + (start * to.groups + first * rows) * GROUP + (row - start) * 4;
    for (int64_t at = 0; at < count; ++at) {
        alignas(32) int8_t own[GROUP];
        // A group that holds an infinity or a NaN is zero times that: no output of its row will be a number.
        if (inverses[at] > 0)
            sums[at] = encode(numbers[at], inverses[at], own);
        else
            sums[at] = Integers{}, memset(own, 0, sizeof own);
        for (int64_t word = 0; word < WORDS; ++word, codes += 4 * rows) memcpy(codes, own + 4 * word, 4);
    }
    for (int64_t at = 0; at < GROUPS_AT_ONCE; at += LANES) {
        const Integers sum = -128 * folded(sums + at, [](Integers a, Integers b) { return a + b; });
        memcpy(starts + at, &sum, sizeof sum);
    }
    for (int64_t at = 0; at < count; ++at) {
        to.scales[place + at * rows] = scales[at];
        to.starts[place + at * rows] = starts[at];
    }
}

// Groups [first, last) of a row.
template <class Source>
void quantise_row(const Source &source, int64_t row, int64_t first, int64_t last, const Rows &to) {
    const int64_t count = last - first, some = count > 0 ? parts(count, parts(count, GROUPS_AT_ONCE)) : 0;
    for (; first < last; first += some) quantise_some(source, row, first, lesser(first + some, last), to);
}

// All rows. To be called by all threads of a team, which meet behind it. Few tiles are cut across, into a piece for each
// thread: rows of one tile share lines of memory, which threads would take from each other word by word.
template <class Source>
void quantise(const Source &source, const Rows &to) {
    const int64_t threads = omp_get_num_threads(), tiles = parts(to.rows, to.tile);
    const int64_t pieces = tiles < TILES_A_THREAD * threads ? threads : 1, groups = parts(to.groups, pieces);
#pragma omp for schedule(static) collapse(2)
    for (int64_t tile = 0; tile < tiles; ++tile)
        for (int64_t piece = 0; piece < pieces; ++piece)
            for (int64_t row = tile * to.tile; row < lesser((tile + 1) * to.tile, to.rows); ++row)
                quantise_row(source, row, piece * groups, lesser((piece + 1) * groups, to.groups), to);
}

}  // namespace
