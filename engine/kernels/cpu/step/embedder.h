// The embeddings of the tokens of a step, and their positions.
#pragma once

#include <algorithm>

#include "vector/memory.h"
#include "products/packed_rows.h"
#include "step/step.h"
#include "vector/vector.h"

namespace {

inline bool are_in_vocabulary(const Embedding &embedding, const int64_t *tokens, int64_t count) {
    return std::all_of(tokens, tokens + count, [&](int64_t token) { return 0 <= token && token < embedding.count; });
}

class Embedder {
  public:
    // Bytes of memory for a step.
    static int64_t size(const Step &step) { return step.rows * sizeof(int64_t); }

    Embedder() = default;
    Embedder(const Step &step, char *memory) : step(&step), positions((int64_t *)memory) {
        // Layers without KV cells need no positions.
        if (step.cell_group_count) find_positions(step.cell_groups[0]);
    }

    // The hidden states of a row before the first layer.
    void embed(int64_t row, float *to) const { embed(step->embedding, step->tokens[row], step->width, to); }

    // A row of a table.
    static void embed(const Embedding &embedding, int64_t token, int64_t width, float *to) {
        if (embedding.kind >= WEIGHTS_INT8) return embed_packed(embedding, token, width, to);
        for (int64_t i = 0, from = token * width; i < width; ++i, ++from)
            to[i] = embedding.scale * (embedding.kind == WEIGHTS_BFLOAT16 ? number(((const bfloat16 *)embedding.table)[from])
                                                                           : ((const float *)embedding.table)[from]);
    }

    // The row of a token in the rotary tables.
    int64_t rotary_row(int64_t row) const { return step->rotary_rows ? step->rotary_rows[row] : positions[row]; }

  private:
    static void embed_packed(const Embedding &embedding, int64_t token, int64_t width, float *to) {
        with_format(embedding.kind, [&](auto format) {
            const PackedRow<decltype(format)::value> row((const uint8_t *)embedding.table, embedding.scales, width, token);
            row.for_each(width, [&](int64_t column, float weight) {
                to[column] = embedding.scale * (embedding.rounds_to_bfloat16 ? rounded_to_bfloat16(weight) : weight);
            });
        });
    }

    void find_positions(const CellGroup &cells) {
        for (int64_t i = 0; i < cells.count; ++i) {
            const Segment &segment = cells.segments[i];
            for (int64_t row = 0; row < segment.rows; ++row) positions[segment.row + row] = segment.start + row;
        }
    }

    const Step *step = nullptr;
    int64_t *positions = nullptr;  // [rows]
};

}  // namespace
