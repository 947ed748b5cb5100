// Rows times the matrices of a step (step.h), however their weights are stored: shared out among a team of threads.
#pragma once

#include "rounded.h"
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

// Holds rows as the weights want them: quantised for codes, rounded (rounded.h) for halves where the processor multiplies
// those.
class Multiplier {
  public:
    Multiplier() = default;
    // rounds: whether it may round rows.
    Multiplier(char *memory, int64_t rows, int64_t columns, bool rounds)
        : rounds(ROUNDS && rounds), codes(memory), rounded(memory + codes_size(rows, columns)) {}

    // Bytes that it needs for so many rows and columns at most.
    static int64_t size(int64_t rows, int64_t columns) {
        return codes_size(rows, columns) + (ROUNDS ? padded(Rounded::size(rows, columns)) : 0);
    }

    // Rows times some matrices of as many columns. To be called by all threads of a team.
    void multiply(const Linear *matrices, int64_t count, const float *from, float *to, int64_t rows) const {
        prepare(matrices, count, from, held(*matrices, rows));
        meet(matrices, count, from, to, rows);
    }

    // The same with one row, of which each thread has a multiplier of its own: to prepare it more than once takes less time
    // than to wait for who does.
    void multiply_alone(const Linear *matrices, int64_t count, const float *from, float *to) const {
        take_alone(matrices, count, from);
        meet(matrices, count, from, to, 1);
    }

    // That in parts, each by one thread: prepare a row for some matrices; its outputs [first, last), `first` where a block
    // begins; groups [first, last) of the row that a source makes; and what a matrix of codes makes of all of them, once all
    // threads have met.
    void take_alone(const Linear *matrices, int64_t count, const float *from) const {
        const int64_t columns = matrices->columns;
        const Needs needs = needs_of(matrices, count);
        if (needs.codes) quantise_row(Numbers<float>{from, columns, columns}, 0, 0, ::parts(columns, GROUP), held(*matrices, 1));
        if (needs.halves) rounded.take(from, columns, 0, 1);
    }
    void multiply_outputs(const Linear &matrix, int64_t first, int64_t last, const float *from, float *to) const {
        for (; first < last; first += SHARE) multiply_share(matrix, first, from, held(matrix, 1), {0, 1}, to);
    }
    template <class Source>
    void take_groups(const Linear &matrix, const Source &source, int64_t first, int64_t last) const {
        quantise_row(source, 0, first, last, held(matrix, 1));
    }
    void multiply_taken(const Linear &matrix, float *to) const { meet(&matrix, 1, nullptr, to, 1); }

    // Rows that a source makes (codes.h, rows.h) times a matrix. Where its weights are no codes, they are put into `room`.
    template <class Source>
    void multiply_made(const Linear &matrix, const Source &source, float *room, float *to, int64_t rows) const {
        if (matrix.kind >= BYTES) {
            quantise(source, held(matrix, rows));
            return meet(&matrix, 1, nullptr, to, rows);
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) source.put(row, room + row * matrix.columns);
        multiply(&matrix, 1, room, to, rows);
    }

    // The same with one matrix for one thread, of `rows` rows one after the other, and then of its shares of SHARE outputs.
    void take_row(const Linear &matrix, const float *from, int64_t row, int64_t rows) const {
        const int64_t columns = matrix.columns, groups = ::parts(columns, GROUP);
        if (matrix.kind >= BYTES) quantise_row(Numbers<float>{from, columns, columns}, row, 0, groups, held(matrix, rows));
        if (rounds_for(matrix.kind)) rounded.take(from + row * columns, columns, row, rows);
    }
    void multiply_share(const Linear &matrix, int64_t share, const float *from, float *to, int64_t rows) const {
        multiply_share(matrix, share * SHARE, from, held(matrix, rows), {0, rows}, to);
    }

    // Whether it may round rows.
    bool rounds = false;

  private:
    static int64_t codes_size(int64_t rows, int64_t columns) { return padded(Rows::size(rows, ::parts(columns, GROUP))); }
    static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    // Whether rows are rounded to meet weights of a kind.
    bool rounds_for(Weights kind) const { return rounds && kind == HALVES; }

    // Some matrices times rows that are held as these want them.
    void meet(const Linear *matrices, int64_t count, const float *from, float *to, int64_t rows) const {
        const Rows quantised = held(*matrices, rows);
        int64_t shares = 0;
        for (int64_t at = 0; at < count; ++at) shares += ::parts(matrices[at].outputs, SHARE);
        const int64_t step = matrices->kind >= BYTES ? quantised.step() : rows;
        for (int64_t first = 0; first < rows; first += step) {
            const Some some = {first, lesser(first + step, rows)};
#pragma omp for schedule(static) nowait
            for (int64_t share = 0; share < shares; ++share) {
                int64_t at = 0, own = share;
                for (; own >= ::parts(matrices[at].outputs, SHARE); ++at) own -= ::parts(matrices[at].outputs, SHARE);
                multiply_share(matrices[at], own * SHARE, from, quantised, some, made_by(to, matrices, at, rows));
            }
        }
#pragma omp barrier
    }

    Rows held(const Linear &matrix, int64_t rows) const { return Rows(rows, ::parts(matrix.columns, GROUP), FLOAT32, codes); }

    // As what some matrices want rows.
    struct Needs {
        bool codes, halves;
    };
    Needs needs_of(const Linear *matrices, int64_t count) const {
        Needs needs = {};
        for (int64_t at = 0; at < count; ++at) {
            needs.codes = needs.codes || matrices[at].kind >= BYTES;
            needs.halves = needs.halves || rounds_for(matrices[at].kind);
        }
        return needs;
    }

    void prepare(const Linear *matrices, int64_t count, const float *from, const Rows &quantised) const {
        const int64_t columns = matrices->columns;
        const Needs needs = needs_of(matrices, count);
        if (needs.codes) quantise(Numbers<float>{from, columns, columns}, quantised);
        if (!needs.halves) return;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < quantised.rows; ++row) rounded.take(from + row * columns, columns, row, quantised.rows);
    }

    // A matrix's outputs from `first` on, of some rows.
    void multiply_share(const Linear &matrix, int64_t first, const float *from, const Rows &quantised, Some some,
                        float *to) const {
        const int64_t last = lesser(first + SHARE, matrix.outputs);
        const auto plain = [&](const auto *rows, int64_t stride, const auto *weights) {
            multiply_plain(rows + some.first * stride, some.last - some.first, stride, weights, matrix.stride, matrix.columns,
                           first, last, to + some.first * matrix.outputs, matrix.outputs);
        };
        if (matrix.kind == PLAIN) return plain(from, matrix.columns, (const float *)matrix.weights);
        if (rounds_for(matrix.kind))
            return rounded.meet(matrix.columns, quantised.rows, [&](const auto *rows, int64_t stride) {
                plain(rows, stride, (const bfloat16 *)matrix.weights);
            });
        if (matrix.kind == HALVES) return plain(from, matrix.columns, (const bfloat16 *)matrix.weights);
        const Matrix own = {(const uint8_t *)matrix.weights, matrix.scales, matrix.kind == BYTES ? 8 : 4, matrix.outputs, to};
        for (int64_t block = first / OUTPUTS; block < ::parts(last, OUTPUTS); block += BLOCKS_AT_ONCE) {
            if (matrix.kind == BYTES)
                multiply_blocks<8>(own, block, quantised, some);
            else
                multiply_blocks<4>(own, block, quantised, some);
        }
    }

    char *codes = nullptr;
    Rounded rounded;
};

}  // namespace
