// The state of an online softmax: maximum score, sum of weights and weighted sum of values of each line.
#pragma once

#include <math.h>

#include "vector/memory.h"
#include "vector/vector.h"

namespace {

constexpr float NO_SCORE = -1e30f;  // the maximum of a line before its first key

inline int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

// The state of some lines. The sum of weights is kept as LANES partial sums.
struct SoftmaxState {
    float *greatest, *totals, *values;

    static int64_t size(int64_t lines, int64_t width) { return padded(lines) + lines * (LANES + width); }
    static SoftmaxState at(float *memory, int64_t lines) {
        float *const totals = memory + padded(lines);
        return {memory, totals, totals + lines * LANES};
    }
    void clear(int64_t lines, int64_t width) const {
        for (int64_t line = 0; line < lines; ++line) greatest[line] = NO_SCORE;
        memset(totals, 0, lines * LANES * sizeof(float));
        memset(values, 0, lines * width * sizeof(float));
    }
    // Copy the state of some lines, which begin at `line` in `other`.
    void copy(const SoftmaxState &other, int64_t line, int64_t lines, int64_t width) const {
        memcpy(greatest, other.greatest + line, lines * sizeof(float));
        memcpy(totals, other.totals + line * LANES, lines * LANES * sizeof(float));
        memcpy(values, other.values + line * width, lines * width * sizeof(float));
    }
    void add_total(int64_t line, Vector weights) const { store(totals + line * LANES, load(totals + line * LANES) + weights); }
    float total(int64_t line) const { return sum(load(totals + line * LANES)); }
    // Set the maximum of a line to `now`, and scale its sums.
    void raise(int64_t line, float now, int64_t width) const {
        const float before = greatest[line];
        if (now == before) return;
        greatest[line] = now;
        if (before == NO_SCORE) return;
        const float by = expf(before - now);
        float *line_values = values + line * width;
        for (int64_t i = 0; i < width; i += LANES) store(line_values + i, load(line_values + i) * by);
        store(totals + line * LANES, load(totals + line * LANES) * by);
    }
    // Add the state of the same lines over later positions.
    void add(const SoftmaxState &other, int64_t lines, int64_t width) const {
        for (int64_t line = 0; line < lines; ++line) {
            if (other.greatest[line] == NO_SCORE) continue;
            if (greatest[line] == NO_SCORE) {
                at_line(line, width).copy(other, line, 1, width);
                continue;
            }
            const float top = fmaxf(greatest[line], other.greatest[line]);
            const float ours = expf(greatest[line] - top), theirs = expf(other.greatest[line] - top);
            const auto join = [=](float *to, const float *from) { store(to, load(to) * ours + load(from) * theirs); };
            for (int64_t i = line * width; i < (line + 1) * width; i += LANES) join(values + i, other.values + i);
            join(totals + line * LANES, other.totals + line * LANES);
            greatest[line] = top;
        }
    }

  private:
    SoftmaxState at_line(int64_t line, int64_t width) const {
        return {greatest + line, totals + line * LANES, values + line * width};
    }
};

}  // namespace
