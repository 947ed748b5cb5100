// Rows times a matrix of plain numbers, as it lies: to[row][output] = row . weights[output].
//
// Rows of float32 meet float32 or bfloat16 weights one number a lane (Singles). Where the processor multiplies bfloat16
// numbers in pairs, rows are rounded to bfloat16 for weights in it (Pairs): twice as many numbers at once. Where it is faster
// so, these are multiplied apart (Singly): the same products, added up in the same order.
//
// Few rows wait for memory, which comes fastest where it is read from end to end: they meet one output, or two, after the
// other. More rows come in tiles, and wait for arithmetic: a tile meets some outputs at once, and what is loaded is multiplied
// as often as there are registers for sums. All tiles meet the same outputs before the next ones' turn, for which they ask.
//
// A product is summed in LANES parts, each in the order of the columns, and these in one order: so it comes out the same
// bit for bit, whatever rows and outputs stand beside its own.
#pragma once

#include "apart.h"
#include "memory.h"
#include "vector.h"

namespace {

// Rows of a tile, and outputs whose sums are added up at once: they fill the registers.
constexpr int ROWS_AT_ONCE = LANES == 16 ? 6 : 3, OUTPUTS_AT_ONCE = 4;
// Rows, and bytes of them, up to which all are one tile that weights stream past (measured: 10 rows are faster as two tiles,
// and so are rows that leave no room for weights in a core's nearest cache).
constexpr int ROWS_STREAMED = LANES == 16 ? 8 : 3;
constexpr int64_t BYTES_STREAMED = 30 * 1024;
// Outputs that such a tile meets at once.
template <int ROWS>
constexpr int STREAMS = ROWS <= 4 ? 1 : 2;
// Rows up to which a processor guesses best what will be read next (measured: 28 GB/s with 2 rows, 22 where we ask for it);
// not so Intel's (8 and 13).
constexpr int ROWS_GUESSED = 2;
// How far before its turn a weight is asked for otherwise, at least.
constexpr int64_t BYTES_BEFORE = 16 * 1024;
// Bytes of rows that stay in a core's cache while all outputs meet them.
constexpr int64_t ROW_BYTES = 512 * 1024;

// A number of a row that has been taken apart: [vector of pairs][their second numbers: LANES, their first ones].
struct Apart {
    float number;
};

// What is multiplied at once: COLUMNS of a row and of a weight, in STEPS.
struct Singles {
    static constexpr int64_t COLUMNS = LANES;
    static constexpr int STEPS = 1;

    template <class Number>
    static Vector take(const Number *from, int) {
        return wide(from);
    }
    // The first `count` numbers, and zeros.
    template <class Number>
    static Vector take(const Number *from, int, int64_t count) {
        Number part[LANES] = {};
        memcpy(part, from, count * sizeof(Number));
        return wide(part);
    }
    static Vector add(Vector sum, Vector row, Vector weight) { return sum + row * weight; }
};

struct Singly {
    static constexpr int64_t COLUMNS = 2 * LANES;
    static constexpr int STEPS = 2;

    static Vector take(const Apart *from, int step) { return read<Vector>(from + step * LANES); }
    static Vector take(const bfloat16 *from, int step) {
        const Vector pairs = read<Vector>(from);
        return step == 0 ? seconds(pairs) : firsts(pairs);
    }
    static Vector take(const Apart *from, int step, int64_t) { return take(from, step); }
    static Vector take(const bfloat16 *from, int step, int64_t count) {
        bfloat16 part[COLUMNS] = {};
        memcpy(part, from, count * sizeof(bfloat16));
        return take(part, step);
    }
    static Vector add(Vector sum, Vector row, Vector weight) { return sum + row * weight; }
};

#if defined(__AVX512BF16__)

struct Pairs {
    static constexpr int64_t COLUMNS = 2 * LANES;
    static constexpr int STEPS = 1;

    static Vector take(const bfloat16 *from, int) { return read<Vector>(from); }
    static Vector take(const bfloat16 *from, int, int64_t count) {
        return (Vector)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
    }
    static Vector add(Vector sum, Vector row, Vector weight) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)weight);
    }
};

// Whether rows are rounded to bfloat16 to meet weights in it.
constexpr bool ROUNDS = true;
typedef Pairs Rounds;

#else

constexpr bool ROUNDS = false;
typedef Singles Rounds;

#endif

template <class Row>
using Arithmetic = std::conditional_t<std::is_same_v<Row, Apart>, Singly,
                                      std::conditional_t<std::is_same_v<Row, bfloat16>, Rounds, Singles>>;

// Some rows and outputs that are multiplied: to[row][output] = rows[row] . weights[output].
template <class Row, class Number>
struct PlainTile {
    const Row *rows;
    int64_t row_stride;
    const Number *weights;
    int64_t stride, columns;
    float *to;
    int64_t to_stride;
    const char *ahead;  // what it asks for before its turn
};

// Sums of ROWS rows times SIDE outputs from number `first` on; with each vector of theirs, `parts` vectors are asked for.
template <int ROWS, int SIDE, class Row, class Number, class Parts>
inline __attribute__((always_inline)) void add_columns(const PlainTile<Row, Number> &tile, int first, const char *&ahead,
                                                       Parts parts, Vector (&sums)[ROWS][SIDE]) {
    using Way = Arithmetic<Row>;
    const Number *const weights = tile.weights + first * tile.stride;
    // All is unrolled, for sums that are counted through would lie in memory all the while.
    const auto add = [&](auto take) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int step = 0; step < Way::STEPS; ++step) {
            Vector weight[SIDE];
#pragma GCC unroll 4
            for (int output = 0; output < SIDE; ++output) weight[output] = kept(take(weights + output * tile.stride, step));
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                const Vector own = take(tile.rows + row * tile.row_stride, step);
#pragma GCC unroll 4
                for (int output = 0; output < SIDE; ++output)
                    sums[row][output] = Way::add(sums[row][output], own, weight[output]);
            }
        }
    };
    int64_t at = 0;
    for (; at + Way::COLUMNS <= tile.columns; at += Way::COLUMNS) {
        for (int64_t part = 0; part < parts; ++part, ahead += Way::COLUMNS * sizeof(Number))
            __builtin_prefetch(ahead, 0, 2);
        add([&](const auto *from, int step) __attribute__((always_inline)) { return Way::take(from + at, step); });
    }
    const int64_t left = tile.columns - at;
    if (left > 0)
        add([&](const auto *from, int step) __attribute__((always_inline)) { return Way::take(from + at, step, left); });
}

// Write what a tile makes, of whose outputs each row has a vector. Two rows take fewer operations together, in the same order.
template <int ROWS, int OUTPUTS, class Row, class Number>
inline __attribute__((always_inline)) void put_sums(const PlainTile<Row, Number> &tile, Vector (&products)[ROWS][OUTPUTS]) {
    if constexpr (OUTPUTS == 1) {
        // In the order in which several outputs are added up, for where an output stands must not show.
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            Vector same[OUTPUTS_AT_ONCE];
            for (Vector &one : same) one = products[row][0];
            const Vector sum = sums<OUTPUTS_AT_ONCE>(same);
            memcpy(tile.to + row * tile.to_stride, &sum, sizeof(float));
        }
    } else {
        constexpr int SIZE = OUTPUTS * sizeof(float);
#pragma GCC unroll 4
        for (int row = 0; row + 2 <= ROWS; row += 2) {
            const Vector both = sums<2 * OUTPUTS>(products[row]);
            memcpy(tile.to + row * tile.to_stride, &both, SIZE);
            memcpy(tile.to + (row + 1) * tile.to_stride, (const char *)&both + SIZE, SIZE);
        }
        if constexpr (ROWS % 2 == 1) {
            const Vector last = sums<OUTPUTS>(products[ROWS - 1]);
            memcpy(tile.to + (ROWS - 1) * tile.to_stride, &last, SIZE);
        }
    }
}

// A tile of ROWS rows and OUTPUTS outputs, SIDE of which are met at once.
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
    put_sums(tile, products);
}

// A tile of few rows, which is all that meets its outputs.
template <int ROWS, int OUTPUTS, class Row, class Number>
void dot_streamed(const PlainTile<Row, Number> &tile) {
    constexpr int SIDE = STREAMS<ROWS> < OUTPUTS ? STREAMS<ROWS> : OUTPUTS;
    if constexpr (ROWS <= ROWS_GUESSED)
        if (!__builtin_cpu_is("intel")) return dot<ROWS, OUTPUTS, SIDE>(tile, std::integral_constant<int, 0>());
    dot<ROWS, OUTPUTS, SIDE>(tile, std::integral_constant<int, SIDE>());
}

// The function for so many rows, of those for 1, 2, ...
template <int OUTPUTS, class Row, class Number, std::size_t... I>
inline auto streamed_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr void (*dots[])(const PlainTile<Row, Number> &) = {dot_streamed<I + 1, OUTPUTS, Row, Number>...};
    return dots[rows - 1];
}
template <int OUTPUTS, class Row, class Number, std::size_t... I>
inline auto tile_of(int64_t rows, std::index_sequence<I...>) {
    static constexpr void (*dots[])(const PlainTile<Row, Number> &, int64_t) = {
        dot<I + 1, OUTPUTS, OUTPUTS, Row, Number, int64_t>...};
    return dots[rows - 1];
}

template <class Row>
inline bool are_streamed(int64_t rows, int64_t columns) {
    return rows == 1 || (rows <= ROWS_STREAMED && rows * columns * (int64_t)sizeof(Row) < BYTES_STREAMED);
}

// OUTPUTS outputs of some rows.
template <int OUTPUTS, class Row, class Number>
inline void dot_rows(PlainTile<Row, Number> tile, int64_t count) {
    tile.ahead = (const char *)tile.weights + BYTES_BEFORE;
    if (are_streamed<Row>(count, tile.columns))
        return streamed_of<OUTPUTS, Row, Number>(count, std::make_index_sequence<ROWS_STREAMED>())(tile);
    // All of the next outputs are wanted at once.
    const int64_t bytes = OUTPUTS * tile.stride * sizeof(Number);
    tile.ahead = (const char *)tile.weights + larger(bytes, BYTES_BEFORE);
    const int64_t tiles = parts(count, ROWS_AT_ONCE), share = parts(OUTPUTS, tiles);
    for (int64_t left = tiles, asked = 0; left > 0; --left, asked += share) {
        const int64_t rows = parts(count, left);
        const auto dot = tile_of<OUTPUTS, Row, Number>(rows, std::make_index_sequence<ROWS_AT_ONCE>());
        dot(tile, asked < OUTPUTS ? share : 0);
        tile.ahead += share * tile.columns * sizeof(Number);
        tile.rows += rows * tile.row_stride, tile.to += rows * tile.to_stride, count -= rows;
    }
}

// The outputs [first, last) of all rows.
template <class Row, class Number>
void multiply_plain(const Row *rows, int64_t count, int64_t row_stride, const Number *weights, int64_t stride,
                    int64_t columns, int64_t first, int64_t last, float *to, int64_t to_stride) {
    const int64_t fit = ROW_BYTES / (columns * (int64_t)sizeof(Row)) / ROWS_AT_ONCE * ROWS_AT_ONCE;
    const int64_t step = fit > ROWS_AT_ONCE ? fit : ROWS_AT_ONCE;
    for (int64_t row = 0; row < count; row += step) {
        const int64_t some = count - row < step ? count - row : step;
        const auto tile = [&](int64_t output) {
            return PlainTile<Row, Number>{rows + row * row_stride, row_stride, weights + output * stride, stride, columns,
                                          to + row * to_stride + output, to_stride, nullptr};
        };
        int64_t output = first;
        for (; output + OUTPUTS_AT_ONCE <= last; output += OUTPUTS_AT_ONCE) dot_rows<OUTPUTS_AT_ONCE>(tile(output), some);
        for (; output < last; ++output) dot_rows<1>(tile(output), some);
    }
}

}  // namespace
