// Products of rows and the matrices of a step (step.h), in any weight format, by a team of threads.
#pragma once

#include "products/rounded_rows.h"
#include "step/low_rank.h"
#include "step/step.h"

namespace {

// `cellar_multiply_blocks` of the linear kernel, for the same instruction set.
MultiplyBlocks *multiply_blocks;

// Outputs of a unit of work: whole blocks of quantised weights.
constexpr int64_t SHARE = 32;

inline int64_t outputs(const Linear *matrices, int64_t count) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += matrices[i].outputs;
    return sum;
}

// The output of matrix `index`: [rows][outputs] each, one after the other.
inline float *output_of(float *start, const Linear *matrices, int64_t index, int64_t rows) {
    return start + rows * outputs(matrices, index);
}

// Holds rows in the format that the weights need: quantised for quantised weights, rounded (rounded_rows.h) for bfloat16 where the
// processor multiplies bfloat16 pairs.
class Multiplier {
  public:
    Multiplier() = default;
    // rounds_to_bfloat16: rows may be rounded; adapters: of the rows of the step
    Multiplier(char *memory, int64_t rows, int64_t columns, bool rounds_to_bfloat16, const LowRankProducts &adapters = {})
        : rounds_to_bfloat16(MULTIPLIES_PAIRS && rounds_to_bfloat16),
          adapters(adapters),
          codes(memory),
          rounded(memory + codes_size(rows, columns)) {}

    // Bytes of memory for at most this many rows and columns.
    static int64_t size(int64_t rows, int64_t columns) {
        return codes_size(rows, columns) + (MULTIPLIES_PAIRS ? padded(Rounded::size(rows, columns)) : 0);
    }

    // Rows times matrices of equal `columns`. Called by all threads of a team.
    void multiply(const Linear *matrices, int64_t count, const float *from, float *to, int64_t rows) const {
        prepare(matrices, count, from, rows);
        multiply_range(matrices, count, from, to, rows);
        adapters.add(matrices, count, from, to, rows);
    }

    // The same for a single row, with a multiplier for each thread: preparing the row in every thread is faster than a barrier.
    void multiply_alone(const Linear *matrices, int64_t count, const float *from, float *to) const {
        prepare_alone(matrices, count, from);
        multiply_range(matrices, count, from, to, 1);
        adapters.add(matrices, count, from, to, 1);
    }

    // The same in parts, each by one thread: prepare a row; compute outputs [first, last), `first` at the start of a block;
    // quantise groups [first, last) of the row of a source; and, after a barrier, multiply the quantised row by a matrix.
    void prepare_alone(const Linear *matrices, int64_t count, const float *from) const {
        const int64_t columns = matrices->columns;
        const RowFormats formats = formats_of(matrices, count);
        if (formats.codes)
            quantise_row(FloatRows<float>{from, columns, columns}, 0, 0, ::ceil_div(columns, GROUP),
                         quantised_rows(*matrices, 1, formats.sums));
        if (formats.halves) rounded.store(from, columns, 0, 1);
    }
    void multiply_outputs(const Linear &matrix, int64_t first, int64_t last, const float *from, float *to) const {
        for (; first < last; first += SHARE) multiply_share(matrix, first, from, quantised_rows(matrix, 1), {0, 1}, to);
    }
    template <class Source>
    void quantise_groups(const Linear &matrix, const Source &source, int64_t first, int64_t last) const {
        quantise_row(source, 0, first, last, quantised_rows(matrix, 1));
    }
    void multiply_prepared(const Linear &matrix, float *to) const { multiply_range(&matrix, 1, nullptr, to, 1); }

    // Rows of a source (quantised_rows.h, row_operations.h) times a matrix. For weights that are not quantised, and for rows with an
    // adapter of the matrix, `scratch` holds the rows.
    template <class Source>
    void multiply_source(const Linear &matrix, const Source &source, float *scratch, float *to, int64_t rows) const {
        if (matrix.kind >= WEIGHTS_INT8) {
            quantise(source, quantised_rows(matrix, rows));
            adapters.for_rows(matrix, [&](int64_t row) { source.write_row(row, scratch + row * matrix.columns); });
            multiply_range(&matrix, 1, nullptr, to, rows);
            return adapters.add(&matrix, 1, scratch, to, rows);
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) source.write_row(row, scratch + row * matrix.columns);
        multiply(&matrix, 1, scratch, to, rows);
    }

    // For one matrix by single threads: prepare row `row` of `rows`, and then compute units of SHARE outputs.
    void prepare_row(const Linear &matrix, const float *from, int64_t row, int64_t rows) const {
        const int64_t columns = matrix.columns, groups = ::ceil_div(columns, GROUP);
        if (matrix.kind >= WEIGHTS_INT8)
            quantise_row(FloatRows<float>{from, columns, columns}, row, 0, groups, quantised_rows(matrix, rows));
        if (rounds_for(matrix.kind)) rounded.store(from + row * columns, columns, row, rows);
    }
    void multiply_share(const Linear &matrix, int64_t share, const float *from, float *to, int64_t rows) const {
        multiply_share(matrix, share * SHARE, from, quantised_rows(matrix, rows), {0, rows}, to);
    }

    // Whether rows may be rounded.
    bool rounds_to_bfloat16 = false;

  private:
    static int64_t codes_size(int64_t rows, int64_t columns) {
        return padded(QuantisedRows::size(rows, ::ceil_div(columns, GROUP)));
    }
    static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    // Whether rows are rounded for this weight format.
    bool rounds_for(WeightFormat kind) const { return rounds_to_bfloat16 && kind == WEIGHTS_BFLOAT16; }

    // Multiply prepared rows by matrices.
    void multiply_range(const Linear *matrices, int64_t count, const float *from, float *to, int64_t rows) const {
        const QuantisedRows quantised = quantised_rows(*matrices, rows);
        int64_t shares = 0;
        for (int64_t i = 0; i < count; ++i) shares += ::ceil_div(matrices[i].outputs, SHARE);
        const int64_t step = matrices->kind >= WEIGHTS_INT8 ? quantised.step() : rows;
        for (int64_t first = 0; first < rows; first += step) {
            const RowRange range = {first, lesser(first + step, rows)};
#pragma omp for schedule(static) nowait
            for (int64_t share = 0; share < shares; ++share) {
                int64_t i = 0, local = share;
                for (; local >= ::ceil_div(matrices[i].outputs, SHARE); ++i) local -= ::ceil_div(matrices[i].outputs, SHARE);
                multiply_share(matrices[i], local * SHARE, from, quantised, range, output_of(to, matrices, i, rows));
            }
        }
#pragma omp barrier
    }

    // Rows for a matrix, with the sums of codes that it needs.
    QuantisedRows quantised_rows(const Linear &matrix, int64_t rows) const {
        RowSums sums;
        sums.include(matrix.kind);
        return quantised_rows(matrix, rows, sums);
    }
    QuantisedRows quantised_rows(const Linear &matrix, int64_t rows, RowSums sums) const {
        return QuantisedRows(rows, ::ceil_div(matrix.columns, GROUP), FLOAT32, sums, codes);
    }

    // The row formats that some matrices need.
    struct RowFormats {
        bool codes, halves;
        RowSums sums;
    };
    RowFormats formats_of(const Linear *matrices, int64_t count) const {
        RowFormats formats = {};
        for (int64_t i = 0; i < count; ++i) {
            formats.codes = formats.codes || matrices[i].kind >= WEIGHTS_INT8;
            formats.halves = formats.halves || rounds_for(matrices[i].kind);
            formats.sums.include(matrices[i].kind);
        }
        return formats;
    }

    void prepare(const Linear *matrices, int64_t count, const float *from, int64_t rows) const {
        const int64_t columns = matrices->columns;
        const RowFormats formats = formats_of(matrices, count);
        if (formats.codes) quantise(FloatRows<float>{from, columns, columns}, quantised_rows(*matrices, rows, formats.sums));
        if (!formats.halves) return;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) rounded.store(from + row * columns, columns, row, rows);
    }

    // SHARE outputs of a matrix from `first` on, for a range of rows.
    void multiply_share(const Linear &matrix, int64_t first, const float *from, const QuantisedRows &quantised, RowRange range,
                        float *to) const {
        const int64_t last = lesser(first + SHARE, matrix.outputs);
        const auto plain = [&](const auto *weights) {
            multiply_plain(from + range.first * matrix.columns, range.last - range.first, matrix.columns, weights, matrix.stride,
                           matrix.columns, first, last, to + range.first * matrix.outputs, matrix.outputs);
        };
        if (matrix.kind == WEIGHTS_FLOAT32) return plain((const float *)matrix.weights);
        if (rounds_for(matrix.kind))
            return rounded.multiply((const bfloat16 *)matrix.weights, matrix.stride, matrix.columns, quantised.rows, range, first,
                                    last, to, matrix.outputs);
        if (matrix.kind == WEIGHTS_BFLOAT16) return plain((const bfloat16 *)matrix.weights);
        const QuantisedMatrix packed = {(const uint8_t *)matrix.weights, matrix.scales, matrix.kind, matrix.outputs, to};
        for (int64_t block = first / OUTPUTS; block < ::ceil_div(last, OUTPUTS); block += BLOCKS_AT_ONCE)
            multiply_blocks(&packed, block, &quantised, range.first, range.last);
    }

    LowRankProducts adapters;
    char *codes = nullptr;
    Rounded rounded;
};

}  // namespace
