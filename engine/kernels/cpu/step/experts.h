// A mixture of experts: the router chooses a few experts for each row, and their outputs are added, weighted.
//
//     scores   [row][expert]          of the router
//     lines    (row, rank), sorted by expert: the weights of an expert are read once for all its lines
//     inputs   [line][columns]        the rows
//     inner    [line][2 * width], or gates [line][width] and then ups [line][width] of separate matrices, or gates alone
//     outputs  [line][columns], of activated [line][width]
//
// The outputs for a row are added in the order of their scores, independent of the batch and of threads.
#pragma once

#include <math.h>

#include "step/multiplier.h"
#include "step/row_operations.h"

namespace {

class MixtureOfExperts {
  public:
    MixtureOfExperts() = default;
    explicit MixtureOfExperts(char *memory) : memory(memory) {}

    static int64_t size(const Experts &experts, int64_t rows) {
        const int64_t lines = rows * experts.top_k, count = experts.router.outputs;
        const int64_t columns = experts.down->outputs, width = experts.down->columns;
        const int64_t numbers = rows * count + lines * (1 + 2 * columns + 4 * width);
        return numbers * sizeof(float) + (4 * lines + 2 * count + 2) * sizeof(int64_t) + lines * share_size(experts) + 16 * 64;
    }

    // Called by all threads of a team; `to` is overwritten, `routed` are the rows of the router.
    void run(const Experts &experts, const Multiplier &multiplier, const float *routed, const float *from, float *to,
             int64_t rows) const {
        const Scratch scratch(experts, memory, rows, multiplier.rounds_to_bfloat16);
        const int64_t columns = scratch.columns;
        multiplier.multiply(&experts.router, 1, routed, scratch.scores, rows);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) route(experts, scratch, row);
#pragma omp single
        sort(experts, scratch, rows);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < scratch.lines; ++index) copy_input(experts, scratch, index, from);
        multiply(scratch, experts.inner, scratch.inputs, scratch.inner);
        if (experts.up) multiply(scratch, experts.up, scratch.inputs, scratch.inner + scratch.lines * scratch.width);
#pragma omp for schedule(static)
        for (int64_t line = 0; line < scratch.lines; ++line) activate(experts, scratch, line);
        multiply(scratch, experts.down, scratch.activated, scratch.outputs);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) combine(experts, scratch, row, to + row * columns);
    }

  private:
    struct Scratch {
        const int64_t lines, columns, width, share_size;
        const bool rounds_to_bfloat16;
        float *scores, *weights, *inputs, *inner, *up_values, *activated, *outputs;
        int64_t *expert, *line;      // [row][rank]
        int64_t *row, *line_expert;  // [line]
        int64_t *first;              // [expert + 1], the first line of each expert; at the end the number of lines
        int64_t *active;             // the number of experts with lines, then these experts
        char *shares;                // memory for the multiplier of each line

        Scratch(const Experts &experts, char *memory, int64_t rows, bool rounds_to_bfloat16)
            : lines(rows * experts.top_k),
              columns(experts.down->outputs),
              width(experts.down->columns),
              share_size(MixtureOfExperts::share_size(experts)),
              rounds_to_bfloat16(rounds_to_bfloat16) {
            const int64_t count = experts.router.outputs;
            Arena arena(memory);
            const auto numbers = [&](int64_t count) { return arena.allocate<float>(count); };
            const auto places = [&](int64_t count) { return arena.allocate<int64_t>(count); };
            scores = numbers(rows * count), weights = numbers(lines);
            inputs = numbers(lines * columns), outputs = numbers(lines * columns);
            inner = numbers(2 * lines * width), up_values = numbers(lines * width), activated = numbers(lines * width);
            expert = places(lines), line = places(lines), row = places(lines), line_expert = places(lines);
            first = places(count + 1), active = places(count + 1);
            shares = arena.allocate<char>(lines * share_size);
        }

        // For all lines of an expert.
        Multiplier multiplier(int64_t expert, int64_t columns) const {
            return Multiplier(shares + first[expert] * share_size, lines_of(expert), columns, rounds_to_bfloat16);
        }
        int64_t lines_of(int64_t expert) const { return first[expert + 1] - first[expert]; }
    };

    // Bytes of multiplier memory for a line.
    static int64_t share_size(const Experts &experts) {
        const int64_t columns = larger(experts.inner->columns, experts.down->columns);
        return (Multiplier::size(1, columns) + 63) / 64 * 64;
    }

    static void route(const Experts &experts, const Scratch &scratch, int64_t row) {
        const int64_t count = experts.router.outputs, start = row * experts.top_k;
        float *scores = scratch.scores + row * count, *weights = scratch.weights + start, sum = 0;
        score(experts, scores);
        for (int64_t rank = 0; rank < experts.top_k; ++rank) {
            int64_t best = 0;
            float top = -INFINITY;
            for (int64_t i = 0; i < count; ++i) {
                const float corrected = scores[i] + (experts.score_correction ? experts.score_correction[i] : 0);
                if (corrected > top) best = i, top = corrected;
            }
            scratch.expert[start + rank] = best;
            sum += weights[rank] = scores[best];
            scores[best] = -INFINITY;
        }
        const float by = experts.normalised ? experts.scaling_factor / sum : experts.scaling_factor;
        for (int64_t rank = 0; rank < experts.top_k; ++rank)
            weights[rank] *= experts.expert_scales ? by * experts.expert_scales[scratch.expert[start + rank]] : by;
    }

    static void score(const Experts &experts, float *scores) {
        const int64_t count = experts.router.outputs;
        if (experts.router.bias) add_row(scores, experts.router.bias, nullptr, count);
        if (experts.scoring == SIGMOID) {
            for (int64_t i = 0; i < count; ++i) scores[i] = 1 / (1 + expf(-scores[i]));
            return;
        }
        float top = -INFINITY, sum = 0;
        for (int64_t i = 0; i < count; ++i) top = fmaxf(top, scores[i]);
        for (int64_t i = 0; i < count; ++i) sum += scores[i] = expf(scores[i] - top);
        for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
    }

    static void sort(const Experts &experts, const Scratch &scratch, int64_t rows) {
        const int64_t count = experts.router.outputs;
        memset(scratch.first, 0, (count + 1) * sizeof(int64_t));
        for (int64_t i = 0; i < scratch.lines; ++i) ++scratch.first[scratch.expert[i] + 1];
        scratch.active[0] = 0;
        for (int64_t i = 0; i < count; ++i)
            if (scratch.first[i + 1]) scratch.active[++scratch.active[0]] = i;
        for (int64_t i = 0; i < count; ++i) scratch.first[i + 1] += scratch.first[i];
        for (int64_t i = 0; i < scratch.lines; ++i) {
            const int64_t line = scratch.first[scratch.expert[i]]++;
            scratch.line[i] = line, scratch.row[line] = i / experts.top_k, scratch.line_expert[line] = scratch.expert[i];
        }
        for (int64_t i = count; i > 0; --i) scratch.first[i] = scratch.first[i - 1];
        scratch.first[0] = 0;
    }

    // The input of the line of (row, rank) `index`.
    static void copy_input(const Experts &experts, const Scratch &scratch, int64_t index, const float *from) {
        const float *row = from + index / experts.top_k * scratch.columns;
        const float weight = experts.scales_inputs ? scratch.weights[index] : 1;
        float *to = scratch.inputs + scratch.line[index] * scratch.columns;
        for (int64_t i = 0; i < scratch.columns; ++i) to[i] = weight * row[i];
    }

    // Every line times the matrix of its expert.
    static void multiply(const Scratch &scratch, const Linear *matrices, const float *from, float *to) {
        const int64_t columns = matrices->columns, outputs = matrices->outputs, shares = ::ceil_div(outputs, SHARE);
#pragma omp for schedule(static)
        for (int64_t line = 0; line < scratch.lines; ++line) {
            const int64_t expert = scratch.line_expert[line], first = scratch.first[expert];
            scratch.multiplier(expert, columns)
                .prepare_row(matrices[expert], from + first * columns, line - first, scratch.lines_of(expert));
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < scratch.active[0] * shares; ++i) {
            const int64_t expert = scratch.active[1 + i / shares], first = scratch.first[expert];
            scratch.multiplier(expert, columns)
                .multiply_share(matrices[expert], i % shares, from + first * columns, to + first * outputs,
                                scratch.lines_of(expert));
        }
    }

    static bool has_ups(const Experts &experts) { return experts.up || experts.inner->outputs > experts.down->columns; }

    static void add_bias(const Linear &matrix, float *outputs) {
        if (matrix.bias) add_row(outputs, matrix.bias, nullptr, matrix.outputs);
    }

    // The input of the `down` matrix of a line.
    static void activate(const Experts &experts, const Scratch &scratch, int64_t line) {
        const int64_t width = scratch.width, expert = scratch.line_expert[line];
        float *up_values = scratch.up_values + line * width, *to = scratch.activated + line * width;
        float *gates = scratch.inner + line * experts.inner->outputs;
        if (!has_ups(experts))
            return activate_row(experts.activation, gates, experts.inner[expert].bias, nullptr, nullptr, to, width);
        float *ups = experts.up ? gates + scratch.lines * width : gates + (experts.interleaved ? 1 : width);
        add_bias(experts.inner[expert], gates);
        if (experts.up) add_bias(experts.up[expert], ups);
        if (!experts.interleaved && experts.limit == INFINITY && experts.slope == 1 && experts.shift == 0)
            return activate_row(experts.activation, gates, nullptr, ups, nullptr, to, width);
        const int64_t step = experts.interleaved ? 2 : 1;
        for (int64_t i = 0; i < width; ++i) {
            // These comparisons keep a NaN.
            const float gate = gates[step * i], up = ups[step * i], limit = experts.limit;
            to[i] = experts.slope * (gate > limit ? limit : gate);
            up_values[i] = ((up > limit ? limit : up < -limit ? -limit : up) + experts.shift) / experts.slope;
        }
        activate_row(experts.activation, to, nullptr, up_values, nullptr, to, width);
    }

    static void combine(const Experts &experts, const Scratch &scratch, int64_t row, float *to) {
        memset(to, 0, scratch.columns * sizeof(float));
        for (int64_t rank = 0; rank < experts.top_k; ++rank) {
            const int64_t index = row * experts.top_k + rank;
            float *outputs = scratch.outputs + scratch.line[index] * scratch.columns;
            add_bias(experts.down[scratch.expert[index]], outputs);
            const float weight = experts.scales_inputs ? 1 : scratch.weights[index];
            for (int64_t i = 0; i < scratch.columns; ++i) to[i] += weight * outputs[i];
        }
    }

    char *memory = nullptr;
};

}  // namespace
