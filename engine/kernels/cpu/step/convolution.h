// Causal convolutions over the sequences of a step.
//
//     inputs     [span][kernel - 1 + rows][stride]   the last inputs of each sequence before the step, then its rows
//
// Each channel is summed from the oldest input to the newest, so a row has the same bits for any chunking of the prompt.
#pragma once

#include "step/multiplier.h"
#include "step/row_operations.h"

namespace {

// The spans of a step, and their state ranges.
class Sequences {
  public:
    Sequences() = default;
    Sequences(const Step &step, char *memory)
        : step(&step), range_of((int64_t *)memory), first_of((int64_t *)(memory + padded(step.rows))) {
        for (int64_t i = step.state_range_count - 1; i >= 0; --i) {
            const StateRange &range = step.state_ranges[i];
            first_of[range.span] = i;
            for (int64_t row = range.row; row < range.row + range.rows; ++row) range_of[row] = i;
        }
    }

    // Bytes of memory for a step.
    static int64_t size(const Step &step) { return padded(step.rows) + padded(count(step)); }
    static int64_t count(const Step &step) {
        return step.state_range_count ? step.state_ranges[step.state_range_count - 1].span + 1 : 0;
    }

    int64_t range(int64_t row) const { return range_of[row]; }
    int64_t first_range(int64_t span) const { return first_of[span]; }
    int64_t span(int64_t row) const { return step->state_ranges[range_of[row]].span; }
    bool begins(int64_t row) const { return row == step->state_ranges[first_of[span(row)]].row; }
    // Whether a row is the last one of its range.
    bool ends(int64_t row) const {
        return row == step->state_ranges[range_of[row]].row + step->state_ranges[range_of[row]].rows - 1;
    }

  private:
    static int64_t padded(int64_t places) { return (places * (int64_t)sizeof(int64_t) + 63) / 64 * 64; }

    const Step *step = nullptr;
    int64_t *range_of = nullptr, *first_of = nullptr;
};

// Rows of `stride` numbers, which begin with the channels of a convolution.
class ConvolutionInput {
  public:
    ConvolutionInput(const Sequences &sequences, const Convolution &convolution, int64_t stride, float *start)
        : sequences(sequences), convolution(convolution), stride(stride), start(start) {}

    static int64_t numbers(const Step &step, const Convolution &convolution, int64_t stride) {
        return (step.rows + Sequences::count(step) * (convolution.kernel - 1)) * stride;
    }

    float *row(int64_t row) const { return start + (row + (sequences.span(row) + 1) * (convolution.kernel - 1)) * stride; }

    // Copy ranges of columns of the projections' outputs to the inputs of a row.
    void gather_columns(const Layer &layer, const ColumnRange *ranges, int64_t count, float *projected, int64_t rows,
                        int64_t row) const {
        float *to = this->row(row);
        for (int64_t i = 0; i < count; ++i) {
            const ColumnRange &columns = ranges[i];
            const Linear &matrix = layer.projections[columns.matrix];
            const float *output = output_of(projected, layer.projections, columns.matrix, rows) + row * matrix.outputs;
            memcpy(to + columns.target, output + columns.offset, columns.count * sizeof(float));
            if (matrix.bias) add_row(to + columns.target, matrix.bias + columns.offset, nullptr, columns.count);
        }
    }

    // At the first row of a span, copy its last inputs before it from the state.
    void load_state(int64_t row) const {
        if (!sequences.begins(row)) return;
        const float *inputs = convolution.states_before[sequences.span(row)];
        const int64_t count = convolution.kernel - 1;
        for (int64_t index = 0; index < count; ++index) {
            float *to = this->row(row) - (count - index) * stride;
            for (int64_t i = 0; i < convolution.channels; ++i) to[i] = inputs ? inputs[i * count + index] : 0;
        }
    }

    // Both, for all rows. Called by all threads of a team.
    void fill(const Step &step, const Layer &layer, const ColumnRange *ranges, int64_t count, float *projected) const {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < step.rows; ++row) {
            gather_columns(layer, ranges, count, projected, step.rows, row);
            load_state(row);
        }
    }

    // The convolution of a row, activated by SiLU.
    void activate_sums(int64_t row, float *to) const {
        convolve(row, [&](Vector sum, int64_t i, int64_t count) { store_some(to + i, activate<SILU>(sum), count); });
    }

    // f(sums of some channels, the first of them, their number) for all channels of a row; writes the state after a range.
    template <class Function>
    void convolve(int64_t row, Function function) const {
        const float *row_inputs = this->row(row);
        const int64_t taps = convolution.kernel, all = convolution.channels;
        for_vectors(all, [&](int64_t index, int64_t count) {
            Vector sum = {};
            for (int64_t tap = 0; tap < taps; ++tap)
                sum += load_some(row_inputs - (taps - 1 - tap) * stride + index, count) *
                       load_some(convolution.weights + tap * all + index, count);
            if (convolution.bias) sum += load_some(convolution.bias + index, count);
            function(sum, index, count);
        });
        if (!sequences.ends(row)) return;
        float *inputs = convolution.states_after[sequences.range(row)];
        for (int64_t index = 0; index < taps - 1; ++index)
            for (int64_t i = 0; i < all; ++i) inputs[i * (taps - 1) + index] = row_inputs[(index - taps + 2) * stride + i];
    }

  private:
    const Sequences &sequences;
    const Convolution &convolution;
    const int64_t stride;
    float *const start;
};

inline int64_t gated_convolution_size(const Step &step, const GatedConvolution &gated_convolution) {
    return ConvolutionInput::numbers(step, gated_convolution.convolution, 3 * gated_convolution.convolution.channels) *
           sizeof(float);
}

// The rows [row][channels] for the output projection of a gated convolution layer. Called by all threads of a team.
inline void run_gated_convolution(const Step &step, const Sequences &sequences, const Layer &layer, float *memory,
                                  float *projected, float *to) {
    const GatedConvolution &gated_convolution = *layer.gated_convolution;
    const int64_t channels = gated_convolution.convolution.channels;
    const ConvolutionInput inputs(sequences, gated_convolution.convolution, 3 * channels, memory);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < step.rows; ++row) {
        inputs.gather_columns(layer, gated_convolution.ranges, gated_convolution.range_count, projected, step.rows, row);
        float *input_row = inputs.row(row);
        for (int64_t i = 0; i < channels; ++i) input_row[i] *= input_row[channels + i];
        inputs.load_state(row);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < step.rows; ++row) {
        const float *by = inputs.row(row) + 2 * channels;
        inputs.convolve(row, [&](Vector sum, int64_t i, int64_t count) {
            store_some(to + row * channels + i, sum * load_some(by + i, count), count);
        });
    }
}

}  // namespace
