// Linear attention by the gated delta rule (arXiv 2412.06464): each head has a state [key][value].
//
//     inputs     [span][kernel - 1 + rows][width]   channels of queries, keys and values, then the decay, beta and gate inputs
//                of each head (convolution.h)
//     convolved  [row][channels]                    after the convolution; queries and keys have L2 norm 1
//     state      = decay * state; state += key (value - state . key) * beta; output = state . query, for each token
//
// Tokens are computed in order and each value column independently, so a row has the same bits for any chunking, any batch and
// any number of threads. Value columns are computed in bands, which stay in the core's cache from token to token.
#pragma once

#include <math.h>
#include <omp.h>

#include "step/convolution.h"

namespace {

// Value columns of a band, and partial sums over the rows of a state.
constexpr int64_t BAND = 32, SUMS_APART = 4;
constexpr int BAND_VECTORS = BAND / LANES;
// Added to the squared L2 norm, as in transformers.
constexpr float L2_EPSILON = 1e-6f;

// The delta rule of one layer.
class DeltaRuleLayer {
  public:
    DeltaRuleLayer(const Step &step, const Sequences &sequences, const Layer &layer, float *memory)
        : step(step),
          sequences(sequences),
          layer(layer),
          delta(*layer.delta_rule),
          channels(delta.convolution.channels),
          inputs(sequences, delta.convolution, width(delta), memory),
          convolved(memory + ConvolutionInput::numbers(step, delta.convolution, width(delta))) {}

    // Bytes of memory for a step.
    static int64_t size(const Step &step, const DeltaRule &delta) {
        const int64_t numbers = ConvolutionInput::numbers(step, delta.convolution, width(delta)) +
                                step.rows * delta.convolution.channels + step.threads * delta.key_width * BAND;
        return numbers * sizeof(float) + 64;
    }

    // From the outputs of the projections, the rows [row][value_heads * value_width] for the output projection. Called by all
    // threads of a team.
    void run(float *projected, float *to) const {
        const int64_t blocks = ::ceil_div(delta.value_width, BAND), spans = Sequences::count(step);
        inputs.fill(step, layer, delta.ranges, delta.range_count, projected);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < step.rows; ++row) prepare_row(row);
#pragma omp for schedule(dynamic, 1) collapse(3)
        for (int64_t span = 0; span < spans; ++span)
            for (int64_t head = 0; head < delta.value_heads; ++head)
                for (int64_t block = 0; block < blocks; ++block) scan(span, head, block * BAND, to);
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < step.rows; ++row)
            for (int64_t head = 0; head < delta.value_heads; ++head) finish(row, head, to);
    }

  private:
    static int64_t width(const DeltaRule &delta) {
        return delta.convolution.channels + delta.value_heads * (2 + delta.value_width);
    }

    // One band of a state for each thread, aligned to a cache line.
    float *state_columns() const {
        const uintptr_t start = (uintptr_t)(convolved + step.rows * channels);
        return (float *)((start + 63) / 64 * 64) + omp_get_thread_num() * delta.key_width * BAND;
    }

    // The convolution of a row; queries and keys normalised, decays and betas computed.
    void prepare_row(int64_t row) const {
        float *to = convolved + row * channels;
        inputs.activate_sums(row, to);
        for (int64_t head = 0; head < 2 * delta.key_heads; ++head) {
            float *head_row = to + head * delta.key_width;
            const float length = sqrtf(squares(head_row, 0, delta.key_width) + L2_EPSILON);
            const float by = (head < delta.key_heads ? 1 / sqrtf((float)delta.key_width) : 1) / length;
            for (int64_t i = 0; i < delta.key_width; ++i) head_row[i] *= by;
        }
        float *decays = inputs.row(row) + channels, *betas = decays + delta.value_heads;
        for (int64_t head = 0; head < delta.value_heads; ++head) {
            decays[head] = expf(-delta.decay_scale[head] * softplus(decays[head] + delta.dt_bias[head]));
            betas[head] = delta.max_beta / (1 + expf(-betas[head]));
        }
    }

    // All rows of a span, for one band of a head.
    void scan(int64_t span, int64_t head, int64_t column, float *to) const {
        float *state = state_columns();
        const int64_t columns = lesser(BAND, delta.value_width - column);
        const int64_t place = head * delta.key_width * delta.value_width + column;
        const float *before = delta.states_before[span];
        if (columns < BAND || !before) memset(state, 0, delta.key_width * BAND * sizeof(float));
        if (before) copy(before + place, delta.value_width, state, BAND, delta.key_width, columns);
        for (int64_t i = sequences.first_range(span); i < step.state_range_count && step.state_ranges[i].span == span;
             ++i) {
            const StateRange &range = step.state_ranges[i];
            for (int64_t row = range.row; row < range.row + range.rows; ++row) {
                alignas(64) float output[BAND];
                step_token(row, head, column, columns, state, output);
                memcpy(to + (row * delta.value_heads + head) * delta.value_width + column, output, columns * sizeof(float));
            }
            copy(state, BAND, delta.states_after[i] + place, delta.value_width, delta.key_width, columns);
        }
    }

    static void copy(const float *from, int64_t from_stride, float *to, int64_t to_stride, int64_t rows, int64_t count) {
        for (int64_t row = 0; row < rows; ++row, from += from_stride, to += to_stride)
            if (count == BAND)
                memcpy(to, from, BAND * sizeof(float));
            else
                memcpy(to, from, count * sizeof(float));
    }

    // One token: correct the value that the state predicts for the key, and read the output for the query.
    void step_token(int64_t row, int64_t head, int64_t column, int64_t columns, float *state, float *output) const {
        const int64_t key_head = head * delta.key_heads / delta.value_heads, keys = delta.key_heads * delta.key_width;
        const float *query = convolved + row * channels + key_head * delta.key_width, *key = query + keys;
        const float *value = convolved + row * channels + 2 * keys + head * delta.value_width + column;
        const float *decays = inputs.row(row) + channels;
        const float decay = decays[head], beta = decays[delta.value_heads + head];
        alignas(64) float target[BAND] = {};
        memcpy(target, value, columns * sizeof(float));
        Vector predicted[SUMS_APART][BAND_VECTORS] = {}, change[BAND_VECTORS], outputs[SUMS_APART][BAND_VECTORS] = {};
        by_rows(delta.key_width, [&](int64_t index, int part) {
#pragma GCC unroll 8
            for (int i = 0; i < BAND_VECTORS; ++i) predicted[part][i] += load(state + index * BAND + i * LANES) * key[index];
        });
        for (int i = 0; i < BAND_VECTORS; ++i) change[i] = (load(target + i * LANES) - decay * joined(predicted, i)) * beta;
        by_rows(delta.key_width, [&](int64_t index, int part) {
#pragma GCC unroll 8
            for (int i = 0; i < BAND_VECTORS; ++i) {
                float *entry = state + index * BAND + i * LANES;
                const Vector now = load(entry) * decay + change[i] * key[index];
                store(entry, now);
                outputs[part][i] += now * query[index];
            }
        });
        for (int i = 0; i < BAND_VECTORS; ++i) store(output + i * LANES, joined(outputs, i));
    }

    // f(row, partial sum of the row) for all rows of a state.
    template <class Function>
    static inline void by_rows(int64_t rows, Function function) {
        int64_t i = 0;
        for (; i + SUMS_APART <= rows; i += SUMS_APART) {
#pragma GCC unroll 4
            for (int part = 0; part < SUMS_APART; ++part) function(i + part, part);
        }
        for (; i < rows; ++i) function(i, 0);
    }

    static Vector joined(const Vector (&parts)[SUMS_APART][BAND_VECTORS], int i) {
        return (parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i]);
    }

    // The norm of a head, times its activated gate.
    void finish(int64_t row, int64_t head, float *to) const {
        const int64_t all = delta.value_heads * delta.value_width, place = head * delta.value_width;
        const float *gate = inputs.row(row) + channels + 2 * delta.value_heads + place;
        float *output = to + row * all + place;
        normalise(delta.head_norm, output, output);
        activate_row<SILU>(gate, nullptr, output, nullptr, output, delta.value_width);
    }

    const Step &step;
    const Sequences &sequences;
    const Layer &layer;
    const DeltaRule &delta;
    const int64_t channels;
    const ConvolutionInput inputs;
    float *const convolved;
};

}  // namespace
