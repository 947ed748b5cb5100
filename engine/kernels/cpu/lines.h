// The lines that meet one tile of keys and values after the other, and how these come from memory.
#pragma once

#include "attention.h"
#include "memory.h"
#include "vector.h"

namespace {

constexpr int64_t TILE = 64;   // positions
constexpr int64_t MOST_LINES = 256;  // of a block

// Lines of one key head. Those of one segment are in the order of their rows.
struct Lines {
    const Segment *segment;  // whose cells they see, and through whose table
    int64_t head, count;
    int64_t oldest[MOST_LINES], newest[MOST_LINES];  // positions that a line sees: [oldest, newest]

    // Of a tile that begins with position `tile`, the first and the last that a line sees, numbered from there.
    int32_t low(int64_t line, int64_t tile) const { return (int32_t)larger(oldest[line] - tile, 0); }
    int32_t high(int64_t line, int64_t tile) const { return (int32_t)lesser(newest[line] - tile, TILE); }
};

// Whether [low, high] leaves out some of a tile.
inline bool is_part(int32_t low, int32_t high) { return low > 0 || high < TILE - 1; }

// Give all numbers of a tile but [low, high] a value.
inline void hide(float *scores, int32_t low, int32_t high, float value) {
    for (int32_t at = 0; at < TILE; at += LANES) {
        const Integers number = lane_numbers() + at;
        store(scores + at, (number >= low) & (number <= high) ? load(scores + at) : spread(value));
    }
}

inline void cap(float *scores, float softcap) {
    for (int32_t at = 0; at < TILE; at += LANES)
        store(scores + at, softcap * hyperbolic_tangent(load(scores + at) / softcap));
}

// The rows of a call's planes.
template <class Element>
class Pool {
  public:
    explicit Pool(const Call &call) : keys(call.keys), values(call.values) {}

    static int64_t cell(const Lines &lines, int64_t position) {
        const int64_t place = position - lines.segment->first;
        return lines.segment->cells ? lines.segment->cells[place] : lines.segment->run + place;
    }
    const Element *key(const Lines &lines, int64_t cell) const { return row(keys, lines.head, cell); }
    const Element *value(const Lines &lines, int64_t cell) const { return row(values, lines.head, cell); }

    // Ask for what will be read at a position, if there is one. Inlined by force: GCC deletes calls of functions that do
    // nothing but this.
    __attribute__((always_inline)) void ask_for_key(const Lines &lines, int64_t position) const {
        if (is_one(lines, position)) ask_for(keys, key(lines, cell(lines, position)));
    }
    __attribute__((always_inline)) void ask_for_value(const Lines &lines, int64_t position) const {
        if (is_one(lines, position)) ask_for(values, value(lines, cell(lines, position)));
    }

  private:
    static bool is_one(const Lines &lines, int64_t position) {
        return position < lines.segment->start + lines.segment->rows;
    }

    static const Element *row(const Plane &plane, int64_t head, int64_t cell) {
        return (const Element *)plane.data + head * plane.head_stride + cell * plane.cell_stride;
    }

    static __attribute__((always_inline)) void ask_for(const Plane &plane, const Element *row) {
        for (int64_t at = 0; at < plane.width; at += 64 / sizeof(Element)) __builtin_prefetch(row + at, 0, 2);
    }

    const Plane keys, values;
};

}  // namespace
