// Selective state spaces (Mamba-2, arXiv 2405.21060): each head has a state [value][key].
//
//     inputs     [span][kernel - 1 + rows][width]   channels of values, keys and queries, the dt inputs of each head,
//                columns for decays, and gates (convolution.h)
//     convolved  [row][channels]                    after the convolution
//     state      = decay * state + dt * value key, for each token; output = state . query + skip * value
//
// Tokens are computed in order and each value independently, so a row has the same bits for any chunking, any batch and any
// number of threads.
#pragma once

#include <math.h>

#include "step/convolution.h"

namespace {

// Values computed at once: they share the loads of keys and queries.
constexpr int64_t VALUES = 4;

// The state space of one layer.
class StateSpaceLayer {
  public:
    StateSpaceLayer(const Step &step, const Sequences &sequences, const Layer &layer, float *memory)
        : step(step),
          sequences(sequences),
          layer(layer),
          space(*layer.state_space),
          channels(space.convolution.channels),
          values(space.heads * space.value_width),
          inputs(sequences, space.convolution, width(space), memory),
          convolved(memory + ConvolutionInput::numbers(step, space.convolution, width(space))) {}

    // Bytes of memory for a step.
    static int64_t size(const Step &step, const StateSpace &space) {
        const int64_t convolved = step.rows * space.convolution.channels;
        return (ConvolutionInput::numbers(step, space.convolution, width(space)) + convolved) * sizeof(float);
    }

    // From the outputs of the projections, the rows [row][heads * value_width] for the output projection. Called by all threads
    // of a team.
    void run(float *projected, float *to) const {
        const int64_t blocks = ::ceil_div(space.value_width, VALUES), spans = Sequences::count(step);
        const int64_t groups = values / space.group_norm.width;
        inputs.fill(step, layer, space.ranges, space.range_count, projected);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < step.rows; ++row) prepare_row(row);
#pragma omp for schedule(dynamic, 1) collapse(3)
        for (int64_t span = 0; span < spans; ++span)
            for (int64_t head = 0; head < space.heads; ++head)
                for (int64_t block = 0; block < blocks; ++block) scan(span, head, block * VALUES, to);
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < step.rows; ++row)
            for (int64_t group = 0; group < groups; ++group) finish(row, group, to);
    }

  private:
    // Columns of a row: channels, dts, decays and gates.
    static int64_t width(const StateSpace &space) { return space.convolution.channels + space.heads * (2 + space.value_width); }

    void prepare_row(int64_t row) const {
        float *to = convolved + row * channels;
        inputs.activate_sums(row, to);
        float *dts = inputs.row(row) + channels, *decays = dts + space.heads;
        for (int64_t head = 0; head < space.heads; ++head) {
            dts[head] = fminf(fmaxf(softplus(dts[head] + space.dt_bias[head]), space.min_dt), space.max_dt);
            decays[head] = expf(-space.decay_scale[head] * dts[head]);
        }
    }

    // All rows of a span, for some values of a head.
    void scan(int64_t span, int64_t head, int64_t first, float *to) const {
        const int64_t value_count = lesser(VALUES, space.value_width - first);
        const int64_t place = (head * space.value_width + first) * space.key_width;
        const float *before = space.states_before[span] ? space.states_before[span] + place : nullptr;
        for (int64_t i = sequences.first_range(span); i < step.state_range_count && step.state_ranges[i].span == span;
             ++i) {
            const StateRange &range = step.state_ranges[i];
            float *state = space.states_after[i] + place;
            for (int64_t row = range.row; row < range.row + range.rows; ++row, before = state)
                if (value_count == VALUES)
                    step_token<VALUES>(row, head, first, before, state, to);
                else
                    for (int64_t index = 0; index < value_count; ++index)
                        step_token<1>(row, head, first + index, before ? before + index * space.key_width : nullptr,
                                      state + index * space.key_width, to);
        }
    }

    // One token: the state before it, which may be null (zeros), and after it; both may be the same memory.
    template <int COUNT>
    void step_token(int64_t row, int64_t head, int64_t first, const float *before, float *state, float *to) const {
        const int64_t keys = space.key_width, group = head * space.groups / space.heads;
        const float *value = convolved + row * channels + head * space.value_width + first;
        const float *key = convolved + row * channels + values + group * keys, *query = key + space.groups * keys;
        const float *dts = inputs.row(row) + channels;
        const float dt = dts[head], decay = dts[space.heads + head];
        Vector outputs[COUNT] = {};
        for_vectors(keys, [&](int64_t i, int64_t count) {
            const Vector keys_part = load_some(key + i, count), query_part = load_some(query + i, count);
#pragma GCC unroll 4
            for (int index = 0; index < COUNT; ++index) {
                Vector now = keys_part * (value[index] * dt);
                if (before) now += load_some(before + index * keys + i, count) * decay;
                store_some(state + index * keys + i, now, count);
                outputs[index] += now * query_part;
            }
        });
        for (int index = 0; index < COUNT; ++index)
            to[row * values + head * space.value_width + first + index] = sum(outputs[index]) + space.skip[head] * value[index];
    }

    // The gates of a group, then its norm.
    void finish(int64_t row, int64_t group, float *to) const {
        const int64_t count = space.group_norm.width, place = group * count;
        const float *gate = inputs.row(row) + channels + 2 * space.heads + place;
        float *output = to + row * values + place;
        activate_row<SILU>(gate, nullptr, output, nullptr, output, count);
        Norm norm = space.group_norm;
        norm.weight += place;
        normalise(norm, output, output);
    }

    const Step &step;
    const Sequences &sequences;
    const Layer &layer;
    const StateSpace &space;
    const int64_t channels, values;
    const ConvolutionInput inputs;
    float *const convolved;
};

}  // namespace
