// The low-rank products of adapters next to the matrices of a step (LoRA, arXiv 2106.09685): outputs += up * (down * row), from
// rows that are not rounded. The product of a row is a function of the row and its adapter, as in plain_matrices.h.
#pragma once

#include "products/plain_matrices.h"
#include "step/step.h"
#include "vector/memory.h"

namespace {

class LowRankProducts {
  public:
    LowRankProducts() = default;
    LowRankProducts(const Step &step, char *memory)
        : ranges(step.adapter_ranges), range_count(step.adapter_range_count), max_rank(step.max_rank), reduced((float *)memory) {}

    // Bytes of memory for the constructor.
    static int64_t size(const Step &step) {
        return step.adapter_range_count ? step.rows * MAX_PROJECTIONS * step.max_rank * sizeof(float) : 0;
    }

    // Whether rows of the step have an adapter of one of these matrices.
    bool change(const Linear *matrices, int64_t count) const {
        for (int64_t range = 0; range < range_count; ++range)
            for (int64_t matrix = 0; matrix < count; ++matrix)
                if (factors(range, matrices[matrix]).rank) return true;
        return false;
    }

    // function(row) for the rows with an adapter of a matrix, distributed to the threads of the team.
    template <class Function>
    void for_rows(const Linear &matrix, Function function) const {
        for (int64_t range = 0; range < range_count; ++range) {
            if (!factors(range, matrix).rank) continue;
            const int64_t first = ranges[range].row, last = first + ranges[range].rows;
#pragma omp for schedule(static) nowait
            for (int64_t row = first; row < last; ++row) function(row);
        }
    }

    // Add the products of rows [rows][columns] to the outputs of matrices [rows][outputs], one matrix after the other. Called by
    // all threads of a team; both are complete before, and after it.
    void add(const Linear *matrices, int64_t count, const float *from, float *to, int64_t rows) const {
        if (!change(matrices, count)) return;
        for_factors(matrices, count, [&](const AdapterRange &range, int64_t matrix, const LowRank &low_rank) {
            reduce(low_rank, matrices[matrix].columns, from + range.row * matrices[matrix].columns, range.rows, reduced_of(matrix, rows, range));
        });
#pragma omp barrier
        int64_t offset = 0, before = 0;
        for_factors(matrices, count, [&](const AdapterRange &range, int64_t matrix, const LowRank &low_rank) {
            for (; before < matrix; ++before) offset += matrices[before].outputs;
            float *const outputs = to + rows * offset + range.row * matrices[matrix].outputs;
            expand(low_rank, reduced_of(matrix, rows, range), range.rows, outputs, matrices[matrix].outputs);
        });
#pragma omp barrier
    }

  private:
    // Rows of a factor that a thread multiplies at once, and rows of the batch in a sum of outputs.
    static constexpr int64_t RANKS_AT_ONCE = OUTPUTS_AT_ONCE, OUTPUT_COLUMNS = 32, TILE_ROWS = 32;

    const LowRank &factors(int64_t range, const Linear &matrix) const { return ranges[range].factors[matrix.low_rank]; }

    // function(range, index of the matrix, factors), by ascending matrices.
    template <class Function>
    void for_factors(const Linear *matrices, int64_t count, Function function) const {
        for (int64_t matrix = 0; matrix < count; ++matrix)
            for (int64_t range = 0; range < range_count; ++range)
                if (const LowRank &low_rank = factors(range, matrices[matrix]); low_rank.rank)
                    function(ranges[range], matrix, low_rank);
    }

    // [range.rows][max_rank]
    float *reduced_of(int64_t matrix, int64_t rows, const AdapterRange &range) const {
        return reduced + (matrix * rows + range.row) * max_rank;
    }

    template <class Function>
    static void with_number(const LowRank &low_rank, Function function) {
        if (low_rank.kind == WEIGHTS_FLOAT32) return function((const float *)low_rank.down, (const float *)low_rank.up);
        function((const bfloat16 *)low_rank.down, (const bfloat16 *)low_rank.up);
    }

    void reduce(const LowRank &low_rank, int64_t columns, const float *from, int64_t rows, float *to) const {
        with_number(low_rank, [&](const auto *down, const auto *) {
#pragma omp for schedule(dynamic) nowait
            for (int64_t first = 0; first < low_rank.rank; first += RANKS_AT_ONCE)
                multiply_plain(from, rows, columns, down, columns, columns, first, lesser(first + RANKS_AT_ONCE, low_rank.rank), to,
                               max_rank);
        });
    }

    void expand(const LowRank &low_rank, const float *from, int64_t rows, float *to, int64_t outputs) const {
        with_number(low_rank, [&](const auto *, const auto *up) {
#pragma omp for schedule(static) nowait
            for (int64_t first = 0; first < outputs; first += OUTPUT_COLUMNS)
                for (int64_t row = 0; row < rows; row += TILE_ROWS)
                    add_tile(from + row * max_rank, lesser(rows - row, TILE_ROWS), up, low_rank.rank, first,
                             lesser(first + OUTPUT_COLUMNS, outputs), to + row * outputs, outputs);
        });
    }

    // Add outputs [first, last) of some rows.
    template <class Number>
    void add_tile(const float *from, int64_t rows, const Number *up, int64_t rank, int64_t first, int64_t last, float *to,
                  int64_t outputs) const {
        float sums[TILE_ROWS * OUTPUT_COLUMNS];
        multiply_plain(from, rows, max_rank, up + first * rank, rank, rank, 0, last - first, sums, OUTPUT_COLUMNS);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t output = first; output < last; ++output)
                to[row * outputs + output] += sums[row * OUTPUT_COLUMNS + output - first];
    }

    const AdapterRange *ranges = nullptr;
    int64_t range_count = 0, max_rank = 0;
    float *reduced = nullptr;  // [matrix][rows][max_rank]
};

}  // namespace
