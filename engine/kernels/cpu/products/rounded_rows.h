// Rows rounded to bfloat16 for bfloat16 weights: as pairs, or split (split_pairs.h).
#pragma once

#include "products/plain_matrices.h"
#include "products/quantised_rows.h"

namespace {

// Rows up to which pairs are not split on any processor: they are bound by memory (measured: 1 to 3 rows are 3 to 5 % faster
// than split, 4 the same, 5 or more slower).
constexpr int64_t ROWS_IN_PAIRS = 4;

class Rounded {
  public:
    Rounded() = default;
    explicit Rounded(char *memory) : memory(memory) {}

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

    // multiply(first row, stride). On processors that may split pairs denormals are zero, for the same bits with any row count.
    template <class Multiply>
    void multiply_with(int64_t columns, int64_t rows, Multiply multiply) const {
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

}  // namespace
