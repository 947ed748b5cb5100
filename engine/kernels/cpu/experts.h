// A layer's experts: each row goes through the few that its router chooses, and gets what they make, weighted.
//
//     scores   [row][expert]          by the router
//     lines    (row, rank), sorted by expert: an expert's lines stand side by side, so that its weights are read once
//     taken    [line][columns]        the rows, as the weights want them
//     inner    [line][2 * width], activated [line][width], made [line][columns]
//
// A row's parts are added in the order of their scores: so neither neighbours nor threads change a bit of it.
#pragma once

#include <math.h>

#include "matrices.h"
#include "rows.h"

namespace {

class Mixture {
  public:
    Mixture() = default;
    explicit Mixture(char *memory) : memory(memory) {}

    static int64_t size(const Experts &experts, int64_t rows) {
        const int64_t lines = rows * experts.chosen;
        const int64_t numbers = rows * experts.router.outputs + lines * (3 * experts.columns + 4 * experts.width);
        return numbers * sizeof(float) + (3 * lines + experts.router.outputs + 1) * sizeof(int64_t) + 16 * 64;
    }

    // To be called by all threads of a team; `to` is overwritten.
    void run(const Experts &experts, const Multiplier &multiplier, const float *from, float *to, int64_t rows) const {
        const bool rounds = multiplier.rounds_for(experts.kind);
        const Desk desk(experts, memory, rows, rounds);
        multiplier.multiply(&experts.router, 1, from, desk.scores, rows);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) choose(experts, desk, row);
#pragma omp single
        sort(experts, desk, rows);
        if (experts.kind == PLAIN)
            walk<float, float>(experts, desk, from, rows);
        else if (!rounds)
            walk<float, bfloat16>(experts, desk, from, rows);
        else if constexpr (ROUNDS)
            walk<bfloat16, bfloat16>(experts, desk, from, rows);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) gather(experts, desk, row, to + row * experts.columns);
    }

  private:
    struct Desk {
        float *scores, *weights, *inner, *activated, *made;
        void *taken, *entering;  // what inner and down matrices are multiplied with
        int64_t *expert, *line, *row, *first;  // of [row][rank] the expert and the line, of a line the row, of an expert the first line

        Desk(const Experts &experts, char *memory, int64_t rows, bool rounds) {
            const int64_t lines = rows * experts.chosen;
            const auto take = [&](int64_t bytes) {
                char *own = memory;
                memory += (bytes + 63) / 64 * 64;
                return own;
            };
            const auto numbers = [&](int64_t count) { return (float *)take(count * sizeof(float)); };
            const auto places = [&](int64_t count) { return (int64_t *)take(count * sizeof(int64_t)); };
            scores = numbers(rows * experts.router.outputs), weights = numbers(lines);
            taken = numbers(lines * experts.columns), inner = numbers(2 * lines * experts.width);
            activated = numbers(lines * experts.width), made = numbers(lines * experts.columns);
            entering = rounds ? (void *)numbers(lines * experts.width) : activated;
            expert = places(lines), line = places(lines), row = places(lines), first = places(experts.router.outputs + 1);
        }
    };

    static void choose(const Experts &experts, const Desk &desk, int64_t row) {
        const int64_t count = experts.router.outputs, start = row * experts.chosen;
        float *scores = desk.scores + row * count, *weights = desk.weights + start, sum = 0;
        score(experts, scores);
        for (int64_t rank = 0; rank < experts.chosen; ++rank) {
            int64_t best = 0;
            float top = -INFINITY;
            for (int64_t at = 0; at < count; ++at) {
                const float own = scores[at] + (experts.correction ? experts.correction[at] : 0);
                if (own > top) best = at, top = own;
            }
            desk.expert[start + rank] = best;
            sum += weights[rank] = scores[best];
            scores[best] = -INFINITY;
        }
        const float by = experts.renormalised ? experts.factor / sum : experts.factor;
        for (int64_t rank = 0; rank < experts.chosen; ++rank) weights[rank] *= by;
    }

    static void score(const Experts &experts, float *scores) {
        const int64_t count = experts.router.outputs;
        if (experts.router.bias) add_row(scores, experts.router.bias, nullptr, count);
        if (experts.scoring == SIGMOID) {
            for (int64_t at = 0; at < count; ++at) scores[at] = 1 / (1 + expf(-scores[at]));
            return;
        }
        float top = -INFINITY, sum = 0;
        for (int64_t at = 0; at < count; ++at) top = fmaxf(top, scores[at]);
        for (int64_t at = 0; at < count; ++at) sum += scores[at] = expf(scores[at] - top);
        for (int64_t at = 0; at < count; ++at) scores[at] /= sum;
    }

    static void sort(const Experts &experts, const Desk &desk, int64_t rows) {
        const int64_t lines = rows * experts.chosen, count = experts.router.outputs;
        memset(desk.first, 0, (count + 1) * sizeof(int64_t));
        for (int64_t at = 0; at < lines; ++at) ++desk.first[desk.expert[at] + 1];
        for (int64_t at = 0; at < count; ++at) desk.first[at + 1] += desk.first[at];
        for (int64_t at = 0; at < lines; ++at) {
            const int64_t line = desk.first[desk.expert[at]]++;
            desk.line[at] = line, desk.row[line] = at / experts.chosen;
        }
        for (int64_t at = count; at > 0; --at) desk.first[at] = desk.first[at - 1];
        desk.first[0] = 0;
    }

    template <class Row, class Number>
    static void walk(const Experts &experts, const Desk &desk, const float *from, int64_t rows) {
        const int64_t lines = rows * experts.chosen, width = experts.width, columns = experts.columns;
#pragma omp for schedule(static)
        for (int64_t line = 0; line < lines; ++line)
            put((Row *)desk.taken + line * columns, from + desk.row[line] * columns, columns);
        multiply<Row, Number>(experts, desk, desk.taken, experts.inner, columns, 2 * width, desk.inner);
#pragma omp for schedule(static)
        for (int64_t line = 0; line < lines; ++line) {
            const float *gate = desk.inner + 2 * line * width;
            float *to = desk.activated + line * width;
            activate_row(experts.activation, gate, nullptr, gate + width, nullptr, to, width);
            if (desk.entering != desk.activated) put((Row *)desk.entering + line * width, to, width);
        }
        multiply<Row, Number>(experts, desk, desk.entering, experts.down, width, columns, desk.made);
    }

    // Every expert's lines times its matrix [outputs][columns].
    template <class Row, class Number>
    static void multiply(const Experts &experts, const Desk &desk, const void *from, const void *matrices, int64_t columns,
                         int64_t outputs, float *to) {
        const int64_t shares = ::parts(outputs, SHARE);
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t expert = 0; expert < experts.router.outputs; ++expert)
            for (int64_t share = 0; share < shares; ++share) {
                const int64_t start = desk.first[expert], lines = desk.first[expert + 1] - start;
                if (lines == 0) continue;
                multiply_plain((const Row *)from + start * columns, lines, columns,
                               (const Number *)matrices + expert * outputs * columns, columns, columns, share * SHARE,
                               lesser((share + 1) * SHARE, outputs), to + start * outputs, outputs);
            }
    }

    static void gather(const Experts &experts, const Desk &desk, int64_t row, float *to) {
        memset(to, 0, experts.columns * sizeof(float));
        for (int64_t rank = 0; rank < experts.chosen; ++rank) {
            const int64_t at = row * experts.chosen + rank;
            const float *made = desk.made + desk.line[at] * experts.columns;
            for (int64_t i = 0; i < experts.columns; ++i) to[i] += desk.weights[at] * made[i];
        }
    }

    char *memory = nullptr;
};

}  // namespace
