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
    static int64_t size(const Step &step) { return step.rows * (step.width * sizeof(float) + sizeof(int64_t)) + 128; }

    Entry() = default;
    Entry(const Step &step, char *memory) : step(&step) {
        Slices slices(memory);
        states = slices.take<float>(step.rows * step.width);
        positions = slices.take<int64_t>(step.rows);
        // Who stores no cells does not ask where rows stand.
        if (step.cells_count) find_positions(step.cells[0]);
    }

    // To be run by all threads of a team.
    void run() const {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < step->rows; ++row) embed(step->tokens[row], states + row * step->width);
    }

    float *states = nullptr;       // [rows][width]
    int64_t *positions = nullptr;  // [rows]

  private:
    void find_positions(const Cells &cells) {
        for (int64_t at = 0; at < cells.count; ++at) {
            const Segment &segment = cells.segments[at];
            for (int64_t row = 0; row < segment.rows; ++row) positions[segment.row + row] = segment.start + row;
        }
    }

    void embed(int64_t token, float *to) const {
        const Embedding &own = step->embedding;
        for (int64_t at = 0, from = token * step->width; at < step->width; ++at, ++from)
            to[at] = own.scale * (own.kind == HALVES ? number(((const bfloat16 *)own.table)[from])
                                                     : ((const float *)own.table)[from]);
    }

    const Step *step = nullptr;
};

}  // namespace
