// The lines (row, query head) of a block, and the cells that they read.
#pragma once

#include "attention/attention.h"
#include "vector/memory.h"
#include "vector/vector.h"

namespace {

constexpr int64_t TILE = 64;        // positions
constexpr int64_t MAX_LINES = 256;  // of a block

// Lines of one key head. Those of one segment are in the order of their rows.
struct Lines {
    const Segment *segment;  // the segment with their cells
    int64_t head, count;
    int64_t oldest[MAX_LINES], newest[MAX_LINES];  // positions visible to a line: [oldest, newest]

    // The first and the last visible position of a tile that begins at position `tile`, relative to it.
    int32_t low(int64_t line, int64_t tile) const { return (int32_t)larger(oldest[line] - tile, 0); }
    int32_t high(int64_t line, int64_t tile) const { return (int32_t)lesser(newest[line] - tile, TILE); }
};

// Whether [low, high] is less than a whole tile.
inline bool is_partial(int32_t low, int32_t high) { return low > 0 || high < TILE - 1; }

// Set all numbers of a tile outside [low, high] to a value.
inline void mask(float *scores, int32_t low, int32_t high, float value) {
    for (int32_t i = 0; i < TILE; i += LANES) {
        const Integers number = lane_numbers() + i;
        store(scores + i, (number >= low) & (number <= high) ? load(scores + i) : spread(value));
    }
}

inline void apply_softcap(float *scores, float softcap) {
    for (int32_t i = 0; i < TILE; i += LANES) store(scores + i, softcap * hyperbolic_tangent(load(scores + i) / softcap));
}

// The KV buffers of a call.
template <class Element>
class Pool {
  public:
    explicit Pool(const AttentionCall &call) : keys(call.keys), values(call.values) {}

    static int64_t cell(const Lines &lines, int64_t position) {
        const int64_t place = position - lines.segment->first;
        return lines.segment->cells ? lines.segment->cells[place] : lines.segment->first_cell + place;
    }
    const Element *key(const Lines &lines, int64_t cell) const { return row(keys, lines.head, cell); }
    const Element *value(const Lines &lines, int64_t cell) const { return row(values, lines.head, cell); }

    // Prefetch a position, if there is one. Always inlined: GCC deletes calls of functions that only prefetch.
    __attribute__((always_inline)) void prefetch_key(const Lines &lines, int64_t position) const {
        if (is_valid(lines, position)) prefetch(keys, key(lines, cell(lines, position)));
    }
    __attribute__((always_inline)) void prefetch_value(const Lines &lines, int64_t position) const {
        if (is_valid(lines, position)) prefetch(values, value(lines, cell(lines, position)));
    }

  private:
    static bool is_valid(const Lines &lines, int64_t position) { return position < lines.segment->start + lines.segment->rows; }

    static const Element *row(const KVBuffer &buffer, int64_t head, int64_t cell) {
        return (const Element *)buffer.data + head * buffer.head_stride + cell * buffer.cell_stride;
    }

    static __attribute__((always_inline)) void prefetch(const KVBuffer &buffer, const Element *row) {
        for (int64_t i = 0; i < buffer.width; i += 64 / sizeof(Element)) __builtin_prefetch(row + i, 0, 2);
    }

    const KVBuffer keys, values;
};

}  // namespace
