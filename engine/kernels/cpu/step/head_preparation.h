// The heads of rows before attention (bias, norm, rotary embedding, writing K and V to cells), and the gates after it.
#pragma once

#include "step/kv_cells.h"
#include "step/embedder.h"
#include "step/multiplier.h"
#include "step/row_operations.h"
#include "step/step.h"

namespace {

// The heads of a layer; its KV buffers hold `Element`.
template <class Element>
class HeadPreparation {
  public:
    // projected  outputs of the layer's projections
    // targets    [rows], the cells of the rows
    HeadPreparation(const Step &step, const Layer &layer, const Embedder &embedder, const int64_t *targets, float *projected)
        : step(step), layer(layer), embedder(embedder), targets(targets), projected(projected) {}

    // All heads of all rows. Called by all threads of a team.
    void run() const {
        const Heads *kinds[] = {&layer.queries, &layer.keys, &layer.values};
        const int64_t stored = layer.keys.count + (layer.values_are_keys ? 0 : layer.values.count);
        const int64_t heads = layer.queries.count + (layer.stores_cells ? stored : 0);
        if (layer.norms_all_heads) norm_rows();
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < step.rows; ++row)
            for (int64_t number = 0; number < heads; ++number) {
                int64_t head = number, kind = 0;
                while (head >= kinds[kind]->count) head -= kinds[kind++]->count;
                prepare(*kinds[kind], kind, row, head);
            }
    }

    // Whether a key head, its value and its queries can be prepared by one thread alone: for a single row.
    bool is_by_groups() const { return step.rows == 1 && !layer.norms_all_heads && layer.values.count == layer.keys.count; }

    // These, of the only row.
    void prepare_group(int64_t head) const {
        const int64_t group = layer.queries.count / layer.keys.count;
        for (int64_t i = head * group; i < (head + 1) * group; ++i) prepare(layer.queries, 0, 0, i);
        if (!layer.stores_cells) return;
        prepare(layer.keys, 1, 0, head);
        if (!layer.values_are_keys) prepare(layer.values, 2, 0, head);
    }

    // Multiply the attention output by the sigmoid of the gates. Called by all threads of a team.
    void gate(float *attended) const {
        const Heads &heads = layer.gates;
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < step.rows; ++row)
            for (int64_t head = 0; head < heads.count; ++head) {
                float *gates = head_of(heads, row, head), *to = attended + (row * heads.count + head) * heads.width;
                add_bias(heads, gates, head, heads.width);
                for (int64_t i = 0; i < heads.width; i += LANES) {
                    const int64_t count = lesser(LANES, heads.width - i);
                    const Vector weight = 1.0f / (1.0f + exponential(-load_some(gates + i, count)));
                    store_some(to + i, load_some(to + i, count) * weight, count);
                }
            }
    }

  private:
    // Norms over all query heads of a row, and over all its key heads.
    void norm_rows() const {
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < step.rows; ++row)
            for (int64_t kind = 0; kind < 2; ++kind) {
                const Heads &heads = kind == 0 ? layer.queries : layer.keys;
                const Norm &norm = kind == 0 ? layer.query_norm : layer.key_norm;
                float *numbers = head_of(heads, row, 0);
                add_bias(heads, numbers, 0, norm.width);
                normalise(norm, numbers, numbers);
            }
    }

    float *head_of(const Heads &heads, int64_t row, int64_t head) const {
        return output_of(projected, layer.projections, heads.matrix, step.rows) +
               row * layer.projections[heads.matrix].outputs + heads.offset + head * heads.stride;
    }

    void add_bias(const Heads &heads, float *numbers, int64_t head, int64_t width) const {
        const float *bias = layer.projections[heads.matrix].bias;
        if (bias) add_row(numbers, bias + heads.offset + head * heads.stride, nullptr, width);
    }

    // One head of one row: bias, norm and rotary embedding; keys and values are written to their cells.
    void prepare(const Heads &heads, int64_t kind, int64_t row, int64_t head) const {
        float *numbers = head_of(heads, row, head);
        const bool whole = kind < 2 && layer.norms_all_heads;
        if (!whole) add_bias(heads, numbers, head, heads.width);
        if (kind == 2) return write_value(numbers, row, head);
        if (kind == 1 && layer.values_are_keys) {
            float value[MAX_VALUES_FROM_KEYS];
            memcpy(value, numbers, heads.width * sizeof(float));
            write_value(value, row, head);
        }
        const Norm &norm = kind == 0 ? layer.query_norm : layer.key_norm;
        if (layer.rotates_before_norm) rotate_head(step.rotaries[layer.rotary], embedder.rotary_row(row), numbers);
        if (!whole && norm.kind != NO_NORM) normalise(norm, numbers, numbers);
        if (!layer.rotates_before_norm) rotate_head(step.rotaries[layer.rotary], embedder.rotary_row(row), numbers);
        if (kind == 0) scale_query(step.rotaries[layer.rotary], embedder.rotary_row(row), numbers, heads.width);
        if (std::is_same_v<Element, int8_t>) transform(numbers, heads.width);
        if (kind == 1) write_cell<Element>(layer.key_buffer, head, targets[row], numbers, heads.width);
    }

    void write_value(float *value, int64_t row, int64_t head) const {
        if (layer.value_norm.kind != NO_NORM) normalise(layer.value_norm, value, value);
        write_cell<Element>(layer.value_buffer, head, targets[row], value, layer.values.width);
    }

    const Step &step;
    const Layer &layer;
    const Embedder &embedder;
    const int64_t *targets;
    float *projected;
};

}  // namespace
