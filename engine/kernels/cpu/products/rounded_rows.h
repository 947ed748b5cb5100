// Rows rounded to bfloat16 for bfloat16 weights: in tiles (matrix_tiles.h), as pairs, or split (split_pairs.h).
#pragma once

#if defined(__AMX_BF16__)
#include "products/matrix_tiles.h"
#endif

#include "products/plain_matrices.h"
#include "products/quantised_rows.h"

namespace {

// Rows up to which pairs are not split on any processor: they are bound by memory (measured: 1 to 3 rows are 3 to 5 % faster
// than split, 4 the same, 5 or more slower).
constexpr int64_t ROWS_IN_PAIRS = 4;

class PairRows {
  public:
    PairRows() = default;
    explicit PairRows(char *memory) : memory(memory) {}

    // Bytes of memory for some rows and columns.
    static int64_t size(int64_t rows, int64_t columns) {
        return rows * (splits_pairs() ? whole(columns) * sizeof(SplitNumber) : columns * sizeof(bfloat16));
    }

    // Store row `row` of `rows`.
    void store(const float *from, int64_t columns, int64_t row, int64_t rows) const {
        if (!are_split(rows)) return write_row(in_pairs() + row * columns, from, columns);
        SplitNumber *const to = split() + row * whole(columns);
        for (int64_t i = 0; i < columns; i += COLUMNS) {
            bfloat16 padded_columns[COLUMNS] = {};
            write_row(padded_columns, from + i, lesser(columns - i, COLUMNS));
            const Vector pairs = read<Vector>(padded_columns), parts[] = {seconds(pairs), firsts(pairs)};
            memcpy(to + i, parts, sizeof parts);
        }
    }

    // Outputs [first, last) of a range of rows: to[row][output]. On processors that may split pairs denormals are zero, for the
    // same bits with any row count.
    void multiply(const bfloat16 *weights, int64_t stride, int64_t columns, int64_t rows, RowRange range, int64_t first,
                  int64_t last, float *to, int64_t to_stride) const {
        const auto multiply = [&](const auto *from, int64_t row_stride) {
            multiply_plain(from + range.first * row_stride, range.last - range.first, row_stride, weights, stride, columns, first,
                           last, to + range.first * to_stride, to_stride);
        };
        if (!splits_pairs()) return multiply(in_pairs(), columns);
        const FlushDenormals flushed;
        are_split(rows) ? multiply((const SplitNumber *)split(), whole(columns)) : multiply(in_pairs(), columns);
    }

  private:
    static constexpr int64_t COLUMNS = 2 * LANES;  // in a vector of pairs

    static int64_t whole(int64_t columns) { return ceil_div(columns, COLUMNS) * COLUMNS; }
    static bool are_split(int64_t rows) { return splits_pairs() && rows > ROWS_IN_PAIRS; }

    bfloat16 *in_pairs() const { return (bfloat16 *)memory; }
    SplitNumber *split() const { return (SplitNumber *)memory; }

    char *memory = nullptr;
};

#if defined(__AMX_BF16__)
typedef TileRows Rounded;
#else
typedef PairRows Rounded;
#endif

}  // namespace
