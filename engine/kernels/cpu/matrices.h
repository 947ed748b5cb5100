// Rows times the matrices of a step (step.h), however their weights are stored: shared out among a team of threads.
#pragma once

#include "plain.h"
#include "quantised.h"
#include "step.h"

namespace {

// Outputs that a thread takes at a time: whole blocks of quantised ones.
constexpr int64_t SHARE = 32;

inline int64_t outputs(const Linear *matrices, int64_t count) {
    int64_t sum = 0;
    for (int64_t at = 0; at < count; ++at) sum += matrices[at].outputs;
    return sum;
}

// What matrix number `at` makes: they stand one behind the other, each [rows][outputs].
inline float *made_by(float *start, const Linear *matrices, int64_t at, int64_t rows) {
    return start + rows * outputs(matrices, at);
}

// Holds rows as the weights want them: quantised for codes, rounded for halves where the processor multiplies those.
class Multiplier {
  public:
    Multiplier() = default;
    // rounds: whether it may round rows.
    Multiplier(char *memory, int64_t rows, int64_t columns, bool rounds)
        : rounds(ROUNDS && rounds), codes(memory), halves((bfloat16 *)(memory + codes_size(rows, columns))) {}

    // Bytes that it needs for so many rows and columns at most.
    static int64_t size(int64_t rows, int64_t columns) {
        return codes_size(rows, columns) + (ROUNDS ? rows * columns * sizeof(bfloat16) : 0);
    }

    // Rows times some matrices of as many columns. To be called by all threads of a team.
    void multiply(const Linear *matrices, int64_t count, const float *from, float *to, int64_t rows) const {
        const Rows quantised(rows, ::parts(matrices->columns, GROUP), codes);
        prepare(matrices, count, from, quantised);
        int64_t shares = 0;
        for (int64_t at = 0; at < count; ++at) shares += ::parts(matrices[at].outputs, SHARE);
#pragma omp for schedule(static)
        for (int64_t share = 0; share < shares; ++share) {
            int64_t at = 0, own = share;
            for (; own >= ::parts(matrices[at].outputs, SHARE); ++at) own -= ::parts(matrices[at].outputs, SHARE);
            multiply_share(matrices[at], own * SHARE, from, quantised, made_by(to, matrices, at, rows));
        }
    }

    // Whether rows are rounded to meet weights of a kind.
    bool rounds_for(Weights kind) const { return rounds && kind == HALVES; }

  private:
    static int64_t codes_size(int64_t rows, int64_t columns) { return padded(Rows::size(rows, ::parts(columns, GROUP))); }
    static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    void prepare(const Linear *matrices, int64_t count, const float *from, const Rows &quantised) const {
        const int64_t columns = matrices->columns;
        bool coded = false, halved = false;
        for (int64_t at = 0; at < count; ++at) {
            coded = coded || matrices[at].kind >= BYTES;
            halved = halved || rounds_for(matrices[at].kind);
        }
        if (!coded && !halved) return;
        Product product = {};
        product.input = from, product.stride = product.columns = columns;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < quantised.rows; ++row) {
            if (coded) quantise_row<float>(product, row, quantised);
            if (halved) put(halves + row * columns, from + row * columns, columns);
        }
    }

    // A matrix's outputs from `first` on.
    void multiply_share(const Linear &matrix, int64_t first, const float *from, const Rows &quantised, float *to) const {
        const int64_t last = lesser(first + SHARE, matrix.outputs);
        const auto plain = [&](const auto *rows, auto *weights) {
            multiply_plain(rows, quantised.rows, matrix.columns, weights, matrix.stride, matrix.columns, first, last, to,
                           matrix.outputs);
        };
        if (matrix.kind == PLAIN) return plain(from, (const float *)matrix.weights);
        if (matrix.kind == HALVES) {
            if constexpr (ROUNDS)
                if (rounds) return plain(halves, (const bfloat16 *)matrix.weights);
            return plain(from, (const bfloat16 *)matrix.weights);
        }
        const Matrix own = {(const uint8_t *)matrix.weights, matrix.scales, matrix.kind == BYTES ? 8 : 4, matrix.outputs, to};
        for (int64_t block = first / OUTPUTS; block < ::parts(last, OUTPUTS); ++block) {
            if (matrix.kind == BYTES)
                multiply_block<float, 8>(own, block, quantised);
            else
                multiply_block<float, 4>(own, block, quantised);
        }
    }

    bool rounds = false;
    char *codes = nullptr;
    bfloat16 *halves = nullptr;
};

}  // namespace
