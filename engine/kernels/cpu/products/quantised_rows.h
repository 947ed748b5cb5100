// Rows quantised to 8 bits, with a scale for each group of 32 numbers, for products with quantised matrices.
//
// Rows are stored in tiles (quantised_matrices.h):
//
//     codes   [tile][group][word: 8][row of the tile][byte: 4]
//     scales  [tile][group][row of the tile]           a number is code * scale
//     starts  [tile][group][row of the tile]           initial value of the sums of a group, which corrects for the zero of
//                                                      8-bit weight codes: -128 times the sum of the row's codes
//     halves  [tile][group][half: 2][row of the tile]  the same of half groups, where a matrix needs them
//     sums    [tile][group][row of the tile]           sums of the numbers, where a matrix needs them
//
// Each row is quantised alone, so its codes do not depend on the batch.
#pragma once

#include <math.h>
#include <omp.h>

#include "products/dot.h"
#include "vector/memory.h"
#include "vector/vector.h"
#include "products/weight_formats.h"

namespace {

constexpr int64_t WORDS = GROUP / 4, VECTORS = GROUP / LANES;
// Groups quantised at once, to overlap the latency of their scales.
constexpr int64_t GROUPS_AT_ONCE = 16;
// With fewer tiles a thread, tiles are cut for an even distribution.
constexpr int64_t TILES_PER_THREAD = 4;
// Bytes of rows that are multiplied by all outputs before the next rows. More than an L2 cache: rows are read from L3 fast
// enough, and weights less often (measured: 256 rows of 8192 columns are 2 % faster than with 512 KB).
constexpr int64_t CACHED_BYTES = 3 * 1024 * 1024;
// The inverse of a smaller scale is infinite: such a group is zero.
constexpr float MIN_NORMAL = 1.17549435e-38f;

// Sums of codes that some weight formats need.
struct RowSums {
    bool halves = false, numbers = false;

    void include(WeightFormat format) {
        halves = halves || layout_of(format).has_halves();
        numbers = numbers || layout_of(format).has_minimums();
    }
};

// The quantised rows of a call.
struct QuantisedRows {
    int64_t rows, groups, tile;  // rows of a tile, the last one may have fewer
    Format format;               // of the outputs
    RowSums needed;
    int8_t *codes;
    float *scales;
    int32_t *starts, *halves;
    float *sums;

    static int64_t size(int64_t rows, int64_t groups) {
        return rows * groups * (GROUP_SIZE + (int64_t)(2 * sizeof(int32_t) + sizeof(float)));
    }
    QuantisedRows(int64_t rows, int64_t groups, Format format, RowSums needed, char *memory)
        : rows(rows),
          groups(groups),
          tile(rows > ROWS_ALONE ? ceil_div(rows, ceil_div(rows, ROWS_PER_TILE)) : ROWS_ALONE),
          format(format),
          needed(needed),
          codes((int8_t *)memory),
          scales((float *)(memory + rows * groups * GROUP)),
          starts((int32_t *)(scales + rows * groups)),
          halves(starts + rows * groups),
          sums((float *)(halves + 2 * rows * groups)) {}

    // Rows that fit CACHED_BYTES, in whole tiles.
    int64_t step() const { return larger(CACHED_BYTES / (tile * groups * GROUP_SIZE), 1) * tile; }

  private:
    // Bytes of a group with scale and start.
    static constexpr int64_t GROUP_SIZE = GROUP + (int64_t)(sizeof(float) + sizeof(int32_t));
};

// Rows [first, last) of a call, in whole tiles but for the last one of the call.
struct RowRange {
    int64_t first, last;
};

inline void write_row(float *to, const float *from, int64_t count) { memcpy(to, from, count * sizeof(float)); }

// Round to nearest even; NaN stays NaN.
inline void write_row(bfloat16 *to, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = read<uint32_t>(from + i), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        to[i].bits = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

typedef int8_t Codes __attribute__((vector_size(LANES)));

// Fold LANES vectors to one: lane i is the reduction of vector i by `join`. Overwrites the vectors.
template <int STEP, class Join, std::size_t... I>
inline Integers fold(Integers a, Integers b, Join join, std::index_sequence<I...>) {
    return join(SHUFFLE(a, b, folded_from(I, STEP)...), SHUFFLE(a, b, (folded_from(I, STEP) + STEP)...));
}
template <int STEP = 1, class Join>
inline Integers folded(Integers *vectors, Join join) {
    for (int i = 0; i < LANES / (2 * STEP); ++i)
        vectors[i] = fold<STEP>(vectors[2 * i], vectors[2 * i + 1], join, std::make_index_sequence<LANES>());
    if constexpr (2 * STEP < LANES) return folded<2 * STEP>(vectors, join);
    return vectors[0];
}

// Compared as integers, so that NaN is the largest.
inline Integers top(Integers a, Integers b) { return a > b ? a : b; }

// The largest absolute value in each lane of a group.
inline Integers sizes(const Vector *numbers) {
    Integers largest = {};
    for (int64_t i = 0; i < VECTORS; ++i) largest = top(largest, (Integers)numbers[i] & 0x7fffffff);
    return largest;
}

// Writes the codes of a group; `first` are partial sums of those of its first half. Returns partial sums of all.
inline Integers encode(const Vector *numbers, float inverse, int8_t *to, Integers &first) {
    // Adding 1.5 * 2^23 rounds to integers in the low bits; the product must be rounded to float32 before.
    const Vector magic = spread(12582912.0f);
    Integers sum = {};
    for (int64_t i = 0; i < VECTORS; ++i) {
        if (i == VECTORS / 2) first = sum;
        const Integers code = (Integers)(in_register(numbers[i] * inverse) + magic) - (Integers)magic;
        const Codes narrow = __builtin_convertvector(code, Codes);
        memcpy(to + i * LANES, &narrow, sizeof narrow);
        sum += code;
    }
    return sum;
}

// Rows of float32 or bfloat16 numbers.
template <class Number>
struct FloatRows {
    const Number *input;
    int64_t stride, columns;

    // A group of a row, padded with zeros.
    void fetch(int64_t row, int64_t group, Vector *to) const {
        const Number *from = input + row * stride + group * GROUP;
        const int64_t left = columns - group * GROUP;
        left < GROUP ? fetch_part(from, left, to) : widen(from, to);
    }

  private:
    static void widen(const Number *from, Vector *to) {
        for (int64_t i = 0; i < VECTORS; ++i) to[i] = wide(from + i * LANES);
    }
    static __attribute__((noinline)) void fetch_part(const Number *from, int64_t left, Vector *to) {
        Number part[GROUP] = {};
        memcpy(part, from, left * sizeof(Number));
        widen(part, to);
    }
};

// Initial sums from partial sums of the codes of GROUPS_AT_ONCE groups. Overwrites the partial sums.
inline void write_starts(Integers *sums, int32_t *to) {
    for (int64_t i = 0; i < GROUPS_AT_ONCE; i += LANES) {
        const Integers sum = -128 * folded(sums + i, [](Integers a, Integers b) { return a + b; });
        memcpy(to + i, &sum, sizeof sum);
    }
}

// Quantise groups [first, last) of a row of a source, at most GROUPS_AT_ONCE.
template <class Source>
void quantise_some(const Source &source, int64_t row, int64_t first, int64_t last, const QuantisedRows &to) {
    Vector numbers[GROUPS_AT_ONCE][VECTORS];
    Integers lanes[GROUPS_AT_ONCE], sums[GROUPS_AT_ONCE], first_sums[GROUPS_AT_ONCE];
    alignas(64) float scales[GROUPS_AT_ONCE], inverses[GROUPS_AT_ONCE];
    alignas(64) int32_t starts[GROUPS_AT_ONCE], first_starts[GROUPS_AT_ONCE];
    const int64_t count = last - first;
    for (int64_t i = 0; i < count; ++i) {
        source.fetch(row, first + i, numbers[i]);
        lanes[i] = sizes(numbers[i]);
    }
    for (int64_t i = count; i < GROUPS_AT_ONCE; ++i) lanes[i] = sums[i] = first_sums[i] = Integers{};
    for (int64_t i = 0; i < GROUPS_AT_ONCE; i += LANES) {
        const Vector scale = (Vector)folded(lanes + i, top) / 127.0f;
        store(scales + i, scale);
        store(inverses + i, (scale >= MIN_NORMAL) & (scale < INFINITY) ? 1.0f / scale : Vector{});
    }
    const int64_t start = row / to.tile * to.tile, rows = lesser(to.rows - start, to.tile);
    const int64_t place = start * to.groups + first * rows + row - start;
    int8_t *codes = to.codes + (start * to.groups + first * rows) * GROUP + (row - start) * 4;
    for (int64_t i = 0; i < count; ++i) {
        alignas(32) int8_t bytes[GROUP];
        // The scale of a group with infinity or NaN makes all outputs of its row NaN.
        if (inverses[i] > 0)
            sums[i] = encode(numbers[i], inverses[i], bytes, first_sums[i]);
        else
            sums[i] = first_sums[i] = Integers{}, memset(bytes, 0, sizeof bytes);
        for (int64_t word = 0; word < WORDS; ++word, codes += 4 * rows) memcpy(codes, bytes + 4 * word, 4);
    }
    write_starts(sums, starts);
    if (to.needed.halves) write_starts(first_sums, first_starts);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t entry = place + i * rows;
        to.scales[entry] = scales[i];
        to.starts[entry] = starts[i];
        if (to.needed.numbers) to.sums[entry] = scales[i] * (float)(starts[i] / -128);
        if (!to.needed.halves) continue;
        int32_t *const halves = to.halves + 2 * (place - row + start + i * rows) + row - start;
        halves[0] = first_starts[i], halves[rows] = starts[i] - first_starts[i];
    }
}

// Quantise groups [first, last) of a row.
template <class Source>
void quantise_row(const Source &source, int64_t row, int64_t first, int64_t last, const QuantisedRows &to) {
    const int64_t count = last - first, groups_at_once = count > 0 ? ceil_div(count, ceil_div(count, GROUPS_AT_ONCE)) : 0;
    for (; first < last; first += groups_at_once) quantise_some(source, row, first, lesser(first + groups_at_once, last), to);
}

// Quantise all rows. Called by all threads of a team, with a barrier at the end. Few tiles are cut across the columns: rows of
// a tile share cache lines, which threads would contend for.
template <class Source>
void quantise(const Source &source, const QuantisedRows &to) {
    const int64_t threads = omp_get_num_threads(), tiles = ceil_div(to.rows, to.tile);
    const int64_t pieces = tiles < TILES_PER_THREAD * threads ? threads : 1, groups = ceil_div(to.groups, pieces);
#pragma omp for schedule(static) collapse(2)
    for (int64_t tile = 0; tile < tiles; ++tile)
        for (int64_t piece = 0; piece < pieces; ++piece)
            for (int64_t row = tile * to.tile; row < lesser((tile + 1) * to.tile, to.rows); ++row)
                quantise_row(source, row, piece * groups, lesser((piece + 1) * groups, to.groups), to);
}

}  // namespace
