// How rows enter the layers: as the embeddings of their tokens, each at its position.
#pragma once

#include <algorithm>

#include "memory.h"
#include "step.h"
#include "vector.h"

namespace {

inline bool are_known(const Embedding &embedding, const int64_t *tokens, int64_t count) {
    return std::all_of(tokens, tokens + count, [&](int64_t token) { return 0 <= token && token < embedding.count; });
}

class Entry {
  public:
    // Bytes of memory that it needs.
    static int64_t size(const Step &step) { return step.rows * sizeof(int64_t); }

    Entry() = default;
    Entry(const Step &step, char *memory) : step(&step), positions((int64_t *)memory) {
        // Who stores no cells does not ask where rows stand.
        if (step.cells_count) find_positions(step.cells[0]);
    }

    // A row's first states.
    void embed(int64_t row, float *to) const {
        const Embedding &own = step->embedding;
        for (int64_t at = 0, from = step->tokens[row] * step->width; at < step->width; ++at, ++from)
            to[at] = own.scale * (own.kind == HALVES ? number(((const bfloat16 *)own.table)[from])
                                                     : ((const float *)own.table)[from]);
    }

    // A row's place in the tables by which heads turn.
    int64_t angle(int64_t row) const { return step->angles ? step->angles[row] : positions[row]; }

  private:
    void find_positions(const Cells &cells) {
        for (int64_t at = 0; at < cells.count; ++at) {
            const Segment &segment = cells.segments[at];
            for (int64_t row = 0; row < segment.rows; ++row) positions[segment.row + row] = segment.start + row;
        }
    }

    const Step *step = nullptr;
    int64_t *positions = nullptr;  // [rows]
};

}  // namespace
