// Products of rows and bfloat16 weights in matrix tiles (AMX): rows rounded to bfloat16 (TileRows).
//
// A tile of weights has 16 outputs and 32 columns, and is read in place. A tile of rows has the same columns of up to 16 rows,
// in pairs: [pair of columns][row]. A product is summed by the processor in an order that depends on the columns alone, so it has
// the same bits for any number of rows, also for one.
#pragma once

#include <immintrin.h>

#include "products/quantised_rows.h"
#include "vector/memory.h"
#include "vector/vector.h"

namespace {

constexpr int64_t TILE_ROWS = 16, TILE_COLUMNS = 32, TILE_PAIRS = TILE_COLUMNS / 2;
// Bytes of the rows of a tile of weights, or of 16 rows and of sums.
constexpr int64_t TILE_STRIDE = 64;

// The sizes of tiles 0 to 3 (sums of both tiles of weights and rows), 4 and 5 (weights), 6 and 7 (rows), in this thread.
class TileSizes {
  public:
    TileSizes() = default;
    TileSizes(const TileSizes &) = delete;
    ~TileSizes() {
        if (first_count) _tile_release();
    }

    // For one or two groups of rows.
    void set(int64_t first, int64_t second) {
        if (first == first_count && second == second_count) return;
        first_count = first, second_count = second;
        struct __attribute__((packed)) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } sizes;
        const int64_t bytes[] = {first, first, second, second, TILE_ROWS, TILE_ROWS, first, second};
        for (int tile = 0; tile < 8; ++tile) sizes.bytes[tile] = (uint16_t)(4 * bytes[tile]), sizes.rows[tile] = TILE_ROWS;
        if (!second) sizes.rows[2] = sizes.rows[3] = sizes.rows[7] = 0;
        _tile_loadconfig(&sizes);
    }

  private:
    int64_t first_count = 0, second_count = 0;
};

// Rows rounded to bfloat16, in groups of 16, the last with the rest: [group][pair of columns][row], padded to whole tiles.
class TileRows {
  public:
    TileRows() = default;
    explicit TileRows(char *memory) : words((uint32_t *)memory) {}

    // Bytes of memory for some rows and columns.
    static int64_t size(int64_t rows, int64_t columns) { return rows * row_words(columns) * (int64_t)sizeof(uint32_t); }

    // Store row `row` of `rows`.
    void store(const float *from, int64_t columns, int64_t row, int64_t rows) const {
        const int64_t group = row / TILE_ROWS * TILE_ROWS, count = lesser(rows - group, TILE_ROWS);
        uint32_t *to = words + group * row_words(columns) + row - group;
        for (int64_t column = 0; column < columns; column += TILE_COLUMNS) {
            bfloat16 numbers[TILE_COLUMNS] = {};
            write_row(numbers, from + column, lesser(columns - column, TILE_COLUMNS));
            for (int64_t pair = 0; pair < TILE_PAIRS; ++pair, to += count) memcpy(to, numbers + 2 * pair, sizeof *to);
        }
    }

    // Outputs [first, last) of all rows: to[row][output]. Called for each range of rows, computed with the first one.
    void multiply(const bfloat16 *weights, int64_t stride, int64_t columns, int64_t rows, RowRange range, int64_t first,
                  int64_t last, float *to, int64_t to_stride) const {
        if (range.first > 0) return;
        TileSizes sizes;
        for (; first < last; first += 2 * TILE_ROWS)
            for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
                const int64_t count = lesser(rows - row, 2 * TILE_ROWS);
                const Product product = {weights + first * stride, stride, columns, lesser(last - first, 2 * TILE_ROWS),
                                         words + row * row_words(columns), lesser(count, TILE_ROWS),
                                         larger(count - TILE_ROWS, 0)};
                float *const sums = to + row * to_stride + first;
                sizes.set(product.first_rows, product.second_rows);
                product.second_rows ? multiply<2>(product, row == 0, sums, to_stride)
                                    : multiply<1>(product, row == 0, sums, to_stride);
            }
    }

  private:
    // Up to 32 outputs and 32 rows, in two groups.
    struct Product {
        const bfloat16 *weights;
        int64_t stride, columns, outputs;
        const uint32_t *rows;
        int64_t first_rows, second_rows;
    };

    static int64_t row_words(int64_t columns) { return ceil_div(columns, TILE_COLUMNS) * TILE_PAIRS; }

    template <int GROUPS>
    static void multiply(const Product &product, bool prefetches, float *to, int64_t to_stride) {
        const int64_t steps = ceil_div(product.columns, TILE_COLUMNS), whole = product.columns / TILE_COLUMNS;
        const int64_t first_bytes = 4 * product.first_rows, second_bytes = 4 * product.second_rows;
        const uint32_t *first = product.rows, *second = first + product.first_rows * row_words(product.columns);
        // The outputs after these are read next; prefetched in the order of memory.
        const char *ahead = (const char *)(product.weights + 2 * TILE_ROWS * product.stride);
        bfloat16 copy[2 * TILE_ROWS * TILE_COLUMNS];
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (GROUPS == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t step = 0; step < steps; ++step) {
            const bfloat16 *weights = product.weights + step * TILE_COLUMNS;
            int64_t stride = product.stride;
            if (product.outputs < 2 * TILE_ROWS || step >= whole) {
                copy_part(product, step * TILE_COLUMNS, copy);
                weights = copy, stride = TILE_COLUMNS;
            }
            if (prefetches)
                for (int line = 0; line < 2 * TILE_ROWS; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            _tile_loadd(4, weights, stride * (int64_t)sizeof(bfloat16));
            _tile_loadd(6, first + step * TILE_PAIRS * product.first_rows, first_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, weights + TILE_ROWS * stride, stride * (int64_t)sizeof(bfloat16));
            _tile_dpbf16ps(1, 5, 6);
            if constexpr (GROUPS == 2) {
                _tile_loadd(7, second + step * TILE_PAIRS * product.second_rows, second_bytes);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        alignas(64) float sums[TILE_ROWS * TILE_ROWS];
        const int64_t upper = lesser(product.outputs, TILE_ROWS), lower = product.outputs - upper;
        _tile_stored(0, sums, first_bytes);
        write(sums, product.first_rows, upper, to, to_stride);
        _tile_stored(1, sums, first_bytes);
        write(sums, product.first_rows, lower, to + TILE_ROWS, to_stride);
        if constexpr (GROUPS == 2) {
            to += TILE_ROWS * to_stride;
            _tile_stored(2, sums, second_bytes);
            write(sums, product.second_rows, upper, to, to_stride);
            _tile_stored(3, sums, second_bytes);
            write(sums, product.second_rows, lower, to + TILE_ROWS, to_stride);
        }
    }

    // The columns of a tile from `column` on of all outputs; zeros where there are fewer of either.
    static void copy_part(const Product &product, int64_t column, bfloat16 *to) {
        const int64_t columns = lesser(product.columns - column, TILE_COLUMNS);
        memset(to, 0, 2 * TILE_ROWS * TILE_COLUMNS * sizeof(bfloat16));
        for (int64_t output = 0; output < product.outputs; ++output)
            memcpy(to + output * TILE_COLUMNS, product.weights + output * product.stride + column, columns * sizeof(bfloat16));
    }

    // Sums [16 outputs][rows] as to[row][output].
    static void write(const float *sums, int64_t rows, int64_t outputs, float *to, int64_t to_stride) {
        if (rows == TILE_ROWS && outputs == TILE_ROWS) {
            Vector vectors[TILE_ROWS];
            memcpy(vectors, sums, sizeof vectors);
            transpose(vectors);
            for (int row = 0; row < TILE_ROWS; ++row) ::store(to + row * to_stride, vectors[row]);
            return;
        }
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t output = 0; output < outputs; ++output) to[row * to_stride + output] = sums[output * rows + row];
    }

    uint32_t *words = nullptr;
};

}  // namespace
