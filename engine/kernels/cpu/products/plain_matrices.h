// Products of rows and a matrix of float32 or bfloat16 weights: to[row][output] = row . weights[output].
//
// float32 rows are multiplied by float32 or bfloat16 weights one number a lane (Float32Ops). Where the processor multiplies
// bfloat16 pairs, rows may be rounded for bfloat16 weights: two numbers a lane (Bfloat16PairOps), or split into float32 numbers
// where that is faster (SplitPairOps): the same products, added up in the same order.
//
// Few rows are bound by memory, which is fastest when it is read sequentially: they are multiplied by one or two outputs at a
// time. More rows are computed in tiles and bound by arithmetic: a tile is multiplied by several outputs at once, as many as
// there are registers for sums. All tiles are multiplied by the same outputs, and prefetch the next ones.
//
// A product is summed in LANES partial sums, each in the order of the columns, which are added up in a fixed order: it has the
// same bits for any batch and any outputs computed with it.
#pragma once

#include "vector/split_pairs.h"
#include "vector/memory.h"
#include "vector/vector.h"

namespace {

// Rows of a tile, and outputs summed at once: they fill the registers.
constexpr int ROWS_AT_ONCE = REGISTERS == 32 ? 6 : 3, OUTPUTS_AT_ONCE = 4;
// Rows, and bytes of rows, up to which all rows are one tile (measured: 10 rows are faster as two tiles, and so are rows that
// leave no space for weights in the L1 cache).
constexpr int STREAMED_ROWS = REGISTERS == 32 ? 8 : 3;
constexpr int64_t STREAMED_BYTES = 30 * 1024;
// Outputs of such a tile at once.
template <int ROWS>
constexpr int STREAMS = ROWS <= 4 ? 1 : 2;
// Rows up to which the hardware prefetches best (measured: 28 GB/s with 2 rows, 22 with software prefetches); not on Intel
// (8 and 13).
constexpr int HARDWARE_PREFETCHED_ROWS = 2;
// Minimum distance of software prefetches.
constexpr int64_t PREFETCH_DISTANCE_BYTES = 16 * 1024;
// Bytes of rows that stay in the L2 cache for all outputs.
constexpr int64_t ROW_BYTES = 512 * 1024;

// A number of a row whose pairs are split: for each vector of pairs LANES second numbers, then LANES first numbers.
struct SplitNumber {
    float number;
};

// Multiplies COLUMNS columns of a row and of a weight, in STEPS steps.
struct Float32Ops {
    static constexpr int64_t COLUMNS = LANES;
    static constexpr int STEPS = 1;

    template <class Number>
    static Vector load(const Number *from, int) {
        return wide(from);
    }
    // The first `count` numbers, padded with zeros.
    template <class Number>
    static Vector load(const Number *from, int, int64_t count) {
        Number part[LANES] = {};
        memcpy(part, from, count * sizeof(Number));
        return wide(part);
    }
    static Vector add(Vector sum, Vector row, Vector weight) { return sum + row * weight; }
};

struct SplitPairOps {
    static constexpr int64_t COLUMNS = 2 * LANES;
    static constexpr int STEPS = 2;

    static Vector load(const SplitNumber *from, int step) { return read<Vector>(from + step * LANES); }
    static Vector load(const bfloat16 *from, int step) {
        const Vector pairs = read<Vector>(from);
        return step == 0 ? seconds(pairs) : firsts(pairs);
    }
    static Vector load(const SplitNumber *from, int step, int64_t) { return load(from, step); }
    static Vector load(const bfloat16 *from, int step, int64_t count) {
        bfloat16 part[COLUMNS] = {};
        memcpy(part, from, count * sizeof(bfloat16));
        return load(part, step);
    }
    static Vector add(Vector sum, Vector row, Vector weight) { return sum + row * weight; }
};

#if defined(__AVX512BF16__)

struct Bfloat16PairOps {
    static constexpr int64_t COLUMNS = 2 * LANES;
    static constexpr int STEPS = 1;

    static Vector load(const bfloat16 *from, int) { return read<Vector>(from); }
    static Vector load(const bfloat16 *from, int, int64_t count) {
        return (Vector)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
    }
    static Vector add(Vector sum, Vector row, Vector weight) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)weight);
    }
};

// Whether rows can be rounded to bfloat16 for bfloat16 weights.
constexpr bool MULTIPLIES_PAIRS = true;
typedef Bfloat16PairOps PairOps;

#else

constexpr bool MULTIPLIES_PAIRS = false;
typedef Float32Ops PairOps;

#endif

template <class Row>
using OpsFor = std::conditional_t<std::is_same_v<Row, SplitNumber>, SplitPairOps,
                                  std::conditional_t<std::is_same_v<Row, bfloat16>, PairOps, Float32Ops>>;

// A tile of rows and outputs: to[row][output] = rows[row] . weights[output].
template <class Row, class Number>
struct PlainTile {
    const Row *rows;
    int64_t row_stride;
    const Number *weights;
    int64_t stride, columns;
    float *to;
    int64_t to_stride;
    const char *ahead;  // start of its prefetches
};

// Sums of ROWS rows and SIDE outputs from `first` on; prefetches `parts` vectors for each vector of columns.
template <int ROWS, int SIDE, class Row, class Number, class Parts>
inline __attribute__((always_inline)) void add_columns(const PlainTile<Row, Number> &tile, int first, const char *&ahead,
                                                       Parts parts, Vector (&sums)[ROWS][SIDE]) {
    using Ops = OpsFor<Row>;
    const Number *const weights = tile.weights + first * tile.stride;
    // Fully unrolled: sums indexed by a loop variable would be in memory.
    const auto add = [&](auto load) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int step = 0; step < Ops::STEPS; ++step) {
            Vector weight[SIDE];
#pragma GCC unroll 4
            for (int output = 0; output < SIDE; ++output)
                weight[output] = in_register(load(weights + output * tile.stride, step));
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                const Vector values = load(tile.rows + row * tile.row_stride, step);
#pragma GCC unroll 4
                for (int output = 0; output < SIDE; ++output)
                    sums[row][output] = Ops::add(sums[row][output], values, weight[output]);
            }
        }
    };
    int64_t i = 0;
    for (; i + Ops::COLUMNS <= tile.columns; i += Ops::COLUMNS) {
        for (int64_t part = 0; part < parts; ++part, ahead += Ops::COLUMNS * sizeof(Number)) __builtin_prefetch(ahead, 0, 2);
        add([&](const auto *from, int step) __attribute__((always_inline)) { return Ops::load(from + i, step); });
    }
    const int64_t left = tile.columns - i;
    if (left > 0)
        add([&](const auto *from, int step) __attribute__((always_inline)) { return Ops::load(from + i, step, left); });
}

// Write the sums of a tile. Two rows are added up together with fewer operations, in the same order.
template <int ROWS, int OUTPUTS, class Row, class Number>
inline __attribute__((always_inline)) void write_sums(const PlainTile<Row, Number> &tile, Vector (&products)[ROWS][OUTPUTS]) {
    if constexpr (OUTPUTS == 1) {
        // Added up in the order of several outputs, so that the bits do not depend on the position of an output.
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            Vector same[OUTPUTS_AT_ONCE];
            for (Vector &vector : same) vector = products[row][0];
            const Vector sum = sums<OUTPUTS_AT_ONCE>(same);
            memcpy(tile.to + row * tile.to_stride, &sum, sizeof(float));
        }
    } else {
        constexpr int SIZE = OUTPUTS * sizeof(float);
        constexpr int PAIRED = 2 * OUTPUTS <= LANES ? ROWS / 2 * 2 : 0;
#pragma GCC unroll 4
        for (int row = 0; row < PAIRED; row += 2) {
            const Vector both = sums<PAIRED == 0 ? OUTPUTS : 2 * OUTPUTS>(products[row]);
            memcpy(tile.to + row * tile.to_stride, &both, SIZE);
            memcpy(tile.to + (row + 1) * tile.to_stride, (const char *)&both + SIZE, SIZE);
        }
#pragma GCC unroll 8
        for (int row = PAIRED; row < ROWS; ++row) {
            const Vector totals = sums<OUTPUTS>(products[row]);
            memcpy(tile.to + row * tile.to_stride, &totals, SIZE);
        }
    }
}

// A tile of ROWS rows and OUTPUTS outputs, SIDE outputs at once.
template <int ROWS, int OUTPUTS, int SIDE, class Row, class Number, class Parts>
void dot(const PlainTile<Row, Number> &tile, Parts parts) {
    Vector products[ROWS][OUTPUTS];
    const char *ahead = tile.ahead;
#pragma GCC unroll 4
    for (int first = 0; first < OUTPUTS; first += SIDE) {
        Vector sums[ROWS][SIDE] = {};
        add_columns(tile, first, ahead, parts, sums);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) memcpy(products[row] + first, sums[row], sizeof sums[row]);
    }
    write_sums(tile, products);
}

// A tile that has all rows.
template <int ROWS, int OUTPUTS, class Row, class Number>
void dot_streamed(const PlainTile<Row, Number> &tile) {
    constexpr int SIDE = STREAMS<ROWS> < OUTPUTS ? STREAMS<ROWS> : OUTPUTS;
    if constexpr (ROWS <= HARDWARE_PREFETCHED_ROWS)
        if (!is_intel()) return dot<ROWS, OUTPUTS, SIDE>(tile, std::integral_constant<int, 0>());
    dot<ROWS, OUTPUTS, SIDE>(tile, std::integral_constant<int, SIDE>());
}

// The instantiation for a number of rows.
template <int OUTPUTS, class Row, class Number, std::size_t... I>
inline auto streamed_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr void (*dots[])(const PlainTile<Row, Number> &) = {dot_streamed<I + 1, OUTPUTS, Row, Number>...};
    return dots[rows - 1];
}
template <int OUTPUTS, class Row, class Number, std::size_t... I>
inline auto tile_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr void (*dots[])(const PlainTile<Row, Number> &,
                                    int64_t) = {dot<I + 1, OUTPUTS, OUTPUTS, Row, Number, int64_t>...};
    return dots[rows - 1];
}

template <class Row>
inline bool are_streamed(int64_t rows, int64_t columns) {
    return rows == 1 || (rows <= STREAMED_ROWS && rows * columns * (int64_t)sizeof(Row) < STREAMED_BYTES);
}

// OUTPUTS outputs of `count` rows.
template <int OUTPUTS, class Row, class Number>
inline void dot_rows(PlainTile<Row, Number> tile, int64_t count) {
    tile.ahead = (const char *)tile.weights + PREFETCH_DISTANCE_BYTES;
    if (are_streamed<Row>(count, tile.columns))
        return streamed_of<OUTPUTS, Row, Number>(count, std::make_index_sequence<STREAMED_ROWS>())(tile);
    // The tiles together prefetch all of the next outputs.
    const int64_t bytes = OUTPUTS * tile.stride * sizeof(Number);
    tile.ahead = (const char *)tile.weights + larger(bytes, PREFETCH_DISTANCE_BYTES);
    const int64_t tiles = ceil_div(count, ROWS_AT_ONCE), share = ceil_div(OUTPUTS, tiles);
    for (int64_t left = tiles, prefetched = 0; left > 0; --left, prefetched += share) {
        const int64_t rows = ceil_div(count, left);
        const auto dot = tile_of<OUTPUTS, Row, Number>(rows, std::make_index_sequence<ROWS_AT_ONCE>());
        dot(tile, prefetched < OUTPUTS ? share : 0);
        tile.ahead += share * tile.columns * sizeof(Number);
        tile.rows += rows * tile.row_stride, tile.to += rows * tile.to_stride, count -= rows;
    }
}

// Outputs [first, last) of all rows.
template <class Row, class Number>
void multiply_plain(const Row *rows, int64_t count, int64_t row_stride, const Number *weights, int64_t stride, int64_t columns,
                    int64_t first, int64_t last, float *to, int64_t to_stride) {
    const int64_t fit = ROW_BYTES / (columns * (int64_t)sizeof(Row)) / ROWS_AT_ONCE * ROWS_AT_ONCE;
    const int64_t step = fit > ROWS_AT_ONCE ? fit : ROWS_AT_ONCE;
    for (int64_t row = 0; row < count; row += step) {
        const int64_t row_count = count - row < step ? count - row : step;
        const auto tile = [&](int64_t output) {
            return PlainTile<Row, Number>{rows + row * row_stride,
                                          row_stride,
                                          weights + output * stride,
                                          stride,
                                          columns,
                                          to + row * to_stride + output,
                                          to_stride,
                                          nullptr};
        };
        int64_t output = first;
        for (; output + OUTPUTS_AT_ONCE <= last; output += OUTPUTS_AT_ONCE) dot_rows<OUTPUTS_AT_ONCE>(tile(output), row_count);
        for (; output < last; ++output) dot_rows<1>(tile(output), row_count);
    }
}

}  // namespace
