// Tiles in float32 (floats.h): numbers of 16 or 8 bits are brought to it when they are read.
//
// Where a block has many lines, the keys of a tile are turned into columns first, for then no sum runs across a vector.
#pragma once

#include "floats.h"

namespace {

// Lines from which on it pays to turn keys (measured: an eighth less time with 32 of width 64, a sixth with 64).
constexpr int64_t MANY = 32;
// Lines up to which it pays to bring numbers of 16 bits to float32 for each use (measured: a quarter less time with 2
// lines of width 128, a tenth with 4 of width 64, a twentieth more with 16).
constexpr int64_t FEW = 4;
// How many positions before their turn cells of a table are asked for (measured: 20 % of a decode's time).
constexpr int64_t AHEAD = 32;

template <class Stored>
class FloatTiles {
  public:
    typedef Stored Element;
    static constexpr int64_t BLOCK = 64;  // lines, at most

    // One thread's memory.
    struct Desk {
        float *queries;        // [lines][key width], scaled
        float *scores;         // [lines][TILE]
        float *turned;         // [key width][LANES], some keys' columns
        float *keys, *values;  // [TILE][width] in float32, where the pool holds them otherwise
        const float *key[TILE], *value[TILE];
        const bfloat16 *narrow_key[TILE], *narrow_value[TILE];  // where they stand in the pool, if they are read there
    };

    explicit FloatTiles(const Call &call)
        : value_width(padded(call.values.width)), call(call), pool(call), key_width(padded(call.keys.width)) {}

    // Numbers of float32 that a desk needs.
    int64_t desk_size() const { return BLOCK * (key_width + TILE) + LANES * key_width + TILE * (key_width + value_width); }

    void furnish(Desk &desk, float *memory) const {
        desk.queries = memory, memory += BLOCK * key_width;
        desk.scores = memory, memory += BLOCK * TILE;
        desk.turned = memory, memory += LANES * key_width;
        desk.keys = memory, memory += TILE * key_width;
        desk.values = memory;
        // The padding behind the last column stays zero.
        memset(desk.keys, 0, TILE * (key_width + value_width) * sizeof(float));
    }

    void lay(const float *query, int64_t line, Desk &desk) const {
        float *to = desk.queries + line * key_width;
        for (int64_t at = 0; at < call.keys.width; ++at) to[at] = query[at] * call.scale;
        for (int64_t at = call.keys.width; at < key_width; ++at) to[at] = 0;
    }

    // Add the positions [from, to) of a tile to the lines' sums.
    void gather(const Lines &lines, int64_t tile, int64_t from, int64_t to, Desk &desk, const Gathered &sums) const {
        fetch(lines, tile, from, to, desk);
        score_tile(lines.count, from, to, desk);
        for (int64_t line = 0; line < lines.count; ++line) weigh(lines, tile, line, desk, sums);
        if (reads_narrow(lines.count))
            mix_tile(lines.count, from, to, desk.narrow_value, desk, sums);
        else
            mix_tile(lines.count, from, to, desk.value, desk, sums);
    }

    const int64_t value_width;

  private:
    // Whether numbers are brought to float32 where they are used, not before.
    bool reads_narrow(int64_t lines) const {
        return std::is_same_v<Element, bfloat16> && lines <= FEW && key_width == call.keys.width &&
               value_width == call.values.width;
    }

    // Where the keys and values of a tile's positions [from, to) stand as float32.
    void fetch(const Lines &lines, int64_t tile, int64_t from, int64_t to, Desk &desk) const {
        const bool narrow = reads_narrow(lines.count);
        for (int64_t at = from; at < to; ++at) {
            // What follows in a run, processors guess on their own, and better.
            if (lines.segment->cells) {
                pool.ask_for_key(lines, tile + at + AHEAD);
                pool.ask_for_value(lines, tile + at + AHEAD);
            }
            const int64_t cell = pool.cell(lines, tile + at);
            const Element *key = pool.key(lines, cell), *value = pool.value(lines, cell);
            if (narrow) {
                desk.narrow_key[at] = touched((const bfloat16 *)key, key_width);
                desk.narrow_value[at] = touched((const bfloat16 *)value, value_width);
                continue;
            }
            desk.key[at] = widened(call.keys, lines.head, cell, key, key_width, desk.keys + at * key_width);
            desk.value[at] = widened(call.values, lines.head, cell, value, value_width, desk.values + at * value_width);
        }
        // Keys are scored KEYS or LANES at a time: others than asked for are some that may be read.
        const auto fill = [&](auto *keys) {
            for (int64_t at = from / LANES * LANES; at < from; ++at) keys[at] = keys[from];
            for (int64_t at = to; at % LANES; ++at) keys[at] = keys[from];
        };
        narrow ? fill(desk.narrow_key) : fill(desk.key);
    }

    static const float *widened(const Plane &plane, int64_t head, int64_t cell, const Element *row, int64_t width,
                                float *__restrict copy) {
        if constexpr (std::is_same_v<Element, float>)
            if (width == plane.width) return touched(row, width);
        const float scale = plane.scales ? plane.scales[head * plane.scale_stride + cell] : 1.0f;
        for (int64_t at = 0; at < plane.width; ++at) copy[at] = number(row[at]) * scale;
        return copy;
    }

    void score_tile(int64_t lines, int64_t from, int64_t to, Desk &desk) const {
        if (lines >= MANY) return score_tile_turned(lines, from, to, desk);
        if (reads_narrow(lines)) return score_keys(lines, from, to, desk.narrow_key, desk);
        score_keys(lines, from, to, desk.key, desk);
    }

    template <class Number>
    void score_keys(int64_t lines, int64_t from, int64_t to, const Number *const *keys, const Desk &desk) const {
        for (int64_t key = from / KEYS * KEYS; key < to; key += KEYS) {
            by_lines(lines, [&](int64_t line, auto count) {
                score<count()>(desk.queries + line * key_width, keys + key, key_width, desk.scores + line * TILE + key);
            });
        }
    }

    void score_tile_turned(int64_t lines, int64_t from, int64_t to, Desk &desk) const {
        for (int64_t key = from / LANES * LANES; key < to; key += LANES) {
            turn(desk.key + key, key_width, desk.turned);
            const auto score = [&](int64_t line, auto count) {
                score_turned<count()>(desk.queries + line * key_width, desk.turned, key_width,
                                      desk.scores + line * TILE + key);
            };
            int64_t line = 0;
            for (; line + TURNED <= lines; line += TURNED) score(line, std::integral_constant<int, TURNED>());
            for (; line < lines; ++line) score(line, std::integral_constant<int, 1>());
        }
    }

    // Turn a line's scores of a tile into weights, and bring its sums to the same greatest score.
    void weigh(const Lines &lines, int64_t tile, int64_t line, Desk &desk, const Gathered &sums) const {
        float *scores = desk.scores + line * TILE;
        const int32_t low = lines.low(line, tile), high = lines.high(line, tile);
        if (call.softcap > 0) cap(scores, call.softcap);
        if (is_part(low, high)) hide(scores, low, high, NOTHING);
        Vector top = spread(NOTHING);
        for (int32_t at = 0; at < TILE; at += LANES) top = greater(load(scores + at), top);
        const float now = fmaxf(sums.greatest[line], greatest(top));
        sums.raise(line, now, value_width);
        for (int32_t at = 0; at < TILE; at += LANES) store(scores + at, exponential(load(scores + at) - now));
        // A line that sees nothing of this tile may have seen nothing at all: its weights are zero, not e^0.
        if (is_part(low, high)) hide(scores, low, high, 0);
        Vector total = {};
        for (int32_t at = 0; at < TILE; at += LANES) total += load(scores + at);
        sums.add_total(line, total);
    }

    template <class Number>
    void mix_tile(int64_t lines, int64_t from, int64_t to, const Number *const *values, const Desk &desk,
                  const Gathered &sums) const {
        by_lines(lines, [&](int64_t line, auto count) {
            mix_columns<count()>(desk.scores + line * TILE, values, from, to, sums.values + line * value_width,
                                 value_width);
        });
    }

    const Call &call;
    const Pool<Element> pool;
    const int64_t key_width;
};

}  // namespace
