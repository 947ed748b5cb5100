// The last layers of a decoder that only read cells of earlier layers (shared keys and values): they are computed for the rows
// with outputs alone. A step is divided into one of the lower layers, and one of the upper layers for these rows.
#pragma once

#include <algorithm>

#include "step/step.h"
#include "vector/memory.h"

namespace {

class OutputLayers {
  public:
    // Whether a step has such layers, no adapters, and at most half of its rows have outputs.
    static bool apply(const Step &step) {
        return !step.initial_states && !step.state_layer_count && !step.adapter_range_count && 2 * step.output_count <= step.rows &&
               lower_count(step) < step.layer_count;
    }

    // Bytes of memory for the constructor.
    static int64_t size(const Step &step) {
        const int64_t rows = step.output_count;
        return rows * (4 * sizeof(int64_t) + 2 * step.width * sizeof(float) +
                       step.cell_group_count * sizeof(Segment)) +
               step.cell_group_count * sizeof(CellGroup) + (7 + step.cell_group_count) * 64;
    }

    OutputLayers(const Step &step, char *memory) : lower(step), upper(step) {
        Arena arena(memory);
        int64_t *const rows = arena.allocate<int64_t>(step.output_count);
        int64_t *const tokens = arena.allocate<int64_t>(step.output_count);
        int64_t *const rotary_rows = arena.allocate<int64_t>(step.output_count);
        int64_t *const output_rows = arena.allocate<int64_t>(step.output_count);
        float *const states = arena.allocate<float>(step.output_count * step.width);
        CellGroup *const groups = arena.allocate<CellGroup>(step.cell_group_count);
        // A row may be in `output_rows` more than once.
        std::copy(step.output_rows, step.output_rows + step.output_count, rows);
        std::sort(rows, rows + step.output_count);
        const int64_t count = std::unique(rows, rows + step.output_count) - rows;
        for (int64_t i = 0; i < count; ++i) {
            tokens[i] = step.tokens[rows[i]];
            if (step.rotary_rows) rotary_rows[i] = step.rotary_rows[rows[i]];
        }
        for (int64_t i = 0; i < step.output_count; ++i)
            output_rows[i] = std::lower_bound(rows, rows + count, step.output_rows[i]) - rows;
        for (int64_t group = 0; group < step.cell_group_count; ++group) {
            Segment *const segments = arena.allocate<Segment>(count);
            cut(step.cell_groups[group], rows, count, segments);
            groups[group] = {segments, count, step.cell_groups[group].cells};
        }
        // The states after the lower layers are written for rows with outputs, but without logits.
        last_lower = lower_count(step) - 1;
        lower.layer_count = lower_count(step);
        lower.output_rows = rows, lower.output_count = count, lower.logit_count = 0;
        lower.hidden_states = arena.allocate<float>(count * step.width);
        lower.state_layers = &last_lower, lower.state_layer_count = 1, lower.layer_states = states;
        upper.tokens = tokens, upper.rows = count, upper.initial_states = states;
        upper.layers += lower.layer_count, upper.layer_count -= lower.layer_count;
        if (step.rotary_rows) upper.rotary_rows = rotary_rows;
        upper.cell_groups = groups, upper.output_rows = output_rows;
    }
    OutputLayers(const OutputLayers &) = delete;

    Step lower, upper;

  private:
    // The number of layers up to the last one that writes cells or states.
    static int64_t lower_count(const Step &step) {
        int64_t count = step.layer_count;
        while (count > 0 && step.layers[count - 1].queries.count && !step.layers[count - 1].latents &&
               !step.layers[count - 1].stores_cells)
            --count;
        return count;
    }

    // A segment for each of some rows, in ascending order.
    static void cut(const CellGroup &cells, const int64_t *rows, int64_t count, Segment *segments) {
        for (int64_t i = 0; i < count; ++i)
            for (int64_t part = 0; part < cells.count; ++part) {
                const Segment &whole = cells.segments[part];
                if (rows[i] < whole.row || rows[i] >= whole.row + whole.rows) continue;
                segments[i] = whole;
                segments[i].row = i, segments[i].rows = 1, segments[i].start = whole.start + rows[i] - whole.row;
            }
    }

    int64_t last_lower;
};

}  // namespace
