// What is done to the heads of rows before they attend, and to what attention makes of them: biases, norms, turns, cells
// and gates.
#pragma once

#include "cells.h"
#include "entry.h"
#include "matrices.h"
#include "rows.h"
#include "step.h"

namespace {

// The heads of a layer; its pool holds keys and values as `Element`.
template <class Element>
class Making {
  public:
    // projected  what the layer's projections make of the rows
    // targets    [rows], the cells that the rows' keys and values go to
    Making(const Step &step, const Layer &layer, const Entry &entry, const int64_t *targets, float *projected)
        : step(step), layer(layer), entry(entry), targets(targets), projected(projected) {}

    // All heads of all rows. To be called by all threads of a team.
    void run() const {
        const Heads *kinds[] = {&layer.queries, &layer.keys, &layer.values};
        const int64_t heads = layer.queries.count + layer.keys.count + layer.values.count;
        if (layer.norms_whole) norm_rows();
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < step.rows; ++row)
            for (int64_t number = 0; number < heads; ++number) {
                int64_t head = number, kind = 0;
                while (head >= kinds[kind]->count) head -= kinds[kind++]->count;
                make(*kinds[kind], kind, row, head);
            }
    }

    // Whether a key head, its value, and the queries that meet it can be made alone.
    bool is_by_groups() const { return step.rows == 1 && !layer.norms_whole && layer.values.count == layer.keys.count; }

    // Those, of the only row.
    void make_group(int64_t head) const {
        const int64_t group = layer.queries.count / layer.keys.count;
        for (int64_t at = head * group; at < (head + 1) * group; ++at) make(layer.queries, 0, 0, at);
        make(layer.keys, 1, 0, head);
        make(layer.values, 2, 0, head);
    }

    // What attention has made, times the sigmoid of its gates. To be called by all threads of a team.
    void gate(float *attended) const {
        const Heads &heads = layer.gates;
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < step.rows; ++row)
            for (int64_t head = 0; head < heads.count; ++head) {
                float *own = head_of(heads, row, head), *to = attended + (row * heads.count + head) * heads.width;
                add_bias(heads, own, head, heads.width);
                for (int64_t at = 0; at < heads.width; at += LANES) {
                    const int64_t count = lesser(LANES, heads.width - at);
                    const Vector weight = 1.0f / (1.0f + exponential(-load_some(own + at, count)));
                    store_some(to + at, load_some(to + at, count) * weight, count);
                }
            }
    }

  private:
    // Norms of all queries of a row at once, and of all its keys.
    void norm_rows() const {
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < step.rows; ++row)
            for (int64_t kind = 0; kind < 2; ++kind) {
                const Heads &heads = kind == 0 ? layer.queries : layer.keys;
                const Norm &norm = kind == 0 ? layer.of_queries : layer.of_keys;
                float *own = head_of(heads, row, 0);
                add_bias(heads, own, 0, norm.width);
                normalise(norm, own, own);
            }
    }

    float *head_of(const Heads &heads, int64_t row, int64_t head) const {
        return made_by(projected, layer.projections, heads.matrix, step.rows) +
               row * layer.projections[heads.matrix].outputs + heads.offset + head * heads.stride;
    }

    void add_bias(const Heads &heads, float *own, int64_t head, int64_t width) const {
        const float *bias = layer.projections[heads.matrix].bias;
        if (bias) add_row(own, bias + heads.offset + head * heads.stride, nullptr, width);
    }

    // One head of one row: its bias, norm and turn, and a key's or value's way to its cell.
    void make(const Heads &heads, int64_t kind, int64_t row, int64_t head) const {
        float *own = head_of(heads, row, head);
        const bool whole = kind < 2 && layer.norms_whole;
        if (!whole) add_bias(heads, own, head, heads.width);
        if (kind < 2) {
            const Norm &norm = kind == 0 ? layer.of_queries : layer.of_keys;
            if (layer.turns_first) turn_head(step.turns[layer.turn], entry.angle(row), own);
            if (!whole && norm.kind != NO_NORM) normalise(norm, own, own);
            if (!layer.turns_first) turn_head(step.turns[layer.turn], entry.angle(row), own);
            if (std::is_same_v<Element, int8_t>) transform(own, heads.width);
        }
        if (kind > 0)
            put_cell<Element>(kind == 1 ? layer.key_plane : layer.value_plane, head, targets[row], own, heads.width);
    }

    const Step &step;
    const Layer &layer;
    const Entry &entry;
    const int64_t *targets;
    float *projected;
};

}  // namespace
