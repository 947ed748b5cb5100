// Tiles in float32 (float_arithmetic.h): bfloat16 and int8 cells are converted when they are read. With many lines, the keys of
// a tile are transposed first, so that no sum is across the lanes of a vector.
#pragma once

#include "attention/float_arithmetic.h"

namespace {

// Lines from which on keys are transposed (measured: 12 % less time with 32 lines of width 64, 17 % with 64).
constexpr int64_t TRANSPOSED_FROM_LINES = 32;
// Lines up to which bfloat16 is converted at each use (measured: 25 % less time with 2 lines of width 128, 10 % with 4 of width
// 64, 5 % more with 16).
constexpr int64_t NARROW_UP_TO_LINES = 4;
// Prefetch distance in positions for cells that are not contiguous (measured: 20 % of a decode step).
constexpr int64_t PREFETCHED_POSITIONS = 32;

template <class Stored>
class FloatTiles {
  public:
    typedef Stored Element;
    static constexpr int64_t BLOCK = 64;  // maximum lines of a block

    // Scratch memory of one thread.
    struct Scratch {
        float *queries;        // [lines][key width], scaled
        float *scores;         // [lines][TILE]
        float *transposed;     // [key width][LANES], columns of some keys
        float *keys, *values;  // [TILE][width] in float32, converted
        const float *key[TILE], *value[TILE];
        const bfloat16 *narrow_key[TILE], *narrow_value[TILE];  // pointers into the KV buffer, if read in place
    };

    explicit FloatTiles(const AttentionCall &call)
        : value_width(padded(call.values.width)), call(call), pool(call), key_width(padded(call.keys.width)) {}

    // Floats of scratch memory.
    int64_t scratch_size() const { return BLOCK * (key_width + TILE) + LANES * key_width + TILE * (key_width + value_width); }

    void assign_memory(Scratch &scratch, float *memory) const {
        scratch.queries = memory, memory += BLOCK * key_width;
        scratch.scores = memory, memory += BLOCK * TILE;
        scratch.transposed = memory, memory += LANES * key_width;
        scratch.keys = memory, memory += TILE * key_width;
        scratch.values = memory;
        // The padding after the last column stays zero.
        memset(scratch.keys, 0, TILE * (key_width + value_width) * sizeof(float));
    }

    void load_query(const float *query, int64_t line, Scratch &scratch) const {
        float *to = scratch.queries + line * key_width;
        for (int64_t i = 0; i < call.keys.width; ++i) to[i] = query[i] * call.scale;
        for (int64_t i = call.keys.width; i < key_width; ++i) to[i] = 0;
    }

    // Add the positions [from, to) of a tile to the softmax state of the lines.
    void accumulate(const Lines &lines, int64_t tile, int64_t from, int64_t to, Scratch &scratch,
                    const SoftmaxState &sums) const {
        fetch(lines, tile, from, to, scratch);
        score_tile(lines.count, from, to, scratch);
        for (int64_t line = 0; line < lines.count; ++line) to_weights(lines, tile, line, scratch, sums);
        if (reads_narrow(lines.count))
            add_values(lines.count, from, to, scratch.narrow_value, scratch, sums);
        else
            add_values(lines.count, from, to, scratch.value, scratch, sums);
    }

    const int64_t value_width;

  private:
    // Whether numbers are converted at each use, not once a tile.
    bool reads_narrow(int64_t lines) const {
        return std::is_same_v<Element, bfloat16> && lines <= NARROW_UP_TO_LINES && key_width == call.keys.width &&
               value_width == call.values.width;
    }

    // Pointers to float32 keys and values of positions [from, to) of a tile.
    void fetch(const Lines &lines, int64_t tile, int64_t from, int64_t to, Scratch &scratch) const {
        const bool narrow = reads_narrow(lines.count);
        for (int64_t i = from; i < to; ++i) {
            // The hardware prefetches contiguous cells better.
            if (lines.segment->cells) {
                pool.prefetch_key(lines, tile + i + PREFETCHED_POSITIONS);
                pool.prefetch_value(lines, tile + i + PREFETCHED_POSITIONS);
            }
            const int64_t cell = pool.cell(lines, tile + i);
            const Element *key = pool.key(lines, cell), *value = pool.value(lines, cell);
            if (narrow) {
                scratch.narrow_key[i] = touched((const bfloat16 *)key, key_width);
                scratch.narrow_value[i] = touched((const bfloat16 *)value, value_width);
                continue;
            }
            scratch.key[i] = widened(call.keys, lines.head, cell, key, key_width, scratch.keys + i * key_width);
            scratch.value[i] = widened(call.values, lines.head, cell, value, value_width, scratch.values + i * value_width);
        }
        // Keys are scored KEYS or LANES at a time: outside the range they are any readable row.
        const auto fill = [&](auto *keys) {
            for (int64_t i = from / LANES * LANES; i < from; ++i) keys[i] = keys[from];
            for (int64_t i = to; i % LANES; ++i) keys[i] = keys[from];
        };
        narrow ? fill(scratch.narrow_key) : fill(scratch.key);
    }

    static const float *widened(const KVBuffer &buffer, int64_t head, int64_t cell, const Element *row, int64_t width,
                                float *__restrict copy) {
        if constexpr (std::is_same_v<Element, float>)
            if (width == buffer.width) return touched(row, width);
        if constexpr (std::is_same_v<Element, int8_t>) {
            const float *scales = buffer.scales + head * buffer.scale_head_stride + cell * buffer.scale_cell_stride;
            for (int64_t i = 0; i < buffer.part_width; ++i) copy[i] = number(row[i]) * scales[0];
            for (int64_t i = buffer.part_width; i < buffer.width; ++i) copy[i] = number(row[i]) * scales[1];
        } else {
            for (int64_t i = 0; i < buffer.width; ++i) copy[i] = number(row[i]);
        }
        return copy;
    }

    void score_tile(int64_t lines, int64_t from, int64_t to, Scratch &scratch) const {
        if (lines >= TRANSPOSED_FROM_LINES) return score_tile_transposed(lines, from, to, scratch);
        if (reads_narrow(lines)) return score_keys(lines, from, to, scratch.narrow_key, scratch);
        score_keys(lines, from, to, scratch.key, scratch);
    }

    template <class Number>
    void score_keys(int64_t lines, int64_t from, int64_t to, const Number *const *keys, const Scratch &scratch) const {
        for (int64_t key = from / KEYS * KEYS; key < to; key += KEYS) {
            for_line_groups(lines, [&](int64_t line, auto count) {
                score<count()>(scratch.queries + line * key_width, keys + key, key_width, scratch.scores + line * TILE + key);
            });
        }
    }

    void score_tile_transposed(int64_t lines, int64_t from, int64_t to, Scratch &scratch) const {
        for (int64_t key = from / LANES * LANES; key < to; key += LANES) {
            transpose(scratch.key + key, key_width, scratch.transposed);
            const auto score = [&](int64_t line, auto count) {
                score_transposed<count()>(scratch.queries + line * key_width, scratch.transposed, key_width,
                                          scratch.scores + line * TILE + key);
            };
            int64_t line = 0;
            for (; line + TRANSPOSED_LINES <= lines; line += TRANSPOSED_LINES)
                score(line, std::integral_constant<int, TRANSPOSED_LINES>());
            for (; line < lines; ++line) score(line, std::integral_constant<int, 1>());
        }
    }

    // Replace the scores of a line by softmax weights, and scale its sums to the new maximum.
    void to_weights(const Lines &lines, int64_t tile, int64_t line, Scratch &scratch, const SoftmaxState &sums) const {
        float *scores = scratch.scores + line * TILE;
        const int32_t low = lines.low(line, tile), high = lines.high(line, tile);
        if (call.softcap > 0) apply_softcap(scores, call.softcap);
        if (is_partial(low, high)) mask(scores, low, high, NO_SCORE);
        Vector top = spread(NO_SCORE);
        for (int32_t i = 0; i < TILE; i += LANES) top = greater(load(scores + i), top);
        const float now = fmaxf(sums.greatest[line], greatest(top));
        sums.raise(line, now, value_width);
        for (int32_t i = 0; i < TILE; i += LANES) store(scores + i, exponential(load(scores + i) - now));
        // A line may see no position of this tile nor of earlier ones: its weights are zero, not e^0.
        if (is_partial(low, high)) mask(scores, low, high, 0);
        Vector total = {};
        for (int32_t i = 0; i < TILE; i += LANES) total += load(scores + i);
        sums.add_total(line, total);
    }

    template <class Number>
    void add_values(int64_t lines, int64_t from, int64_t to, const Number *const *values, const Scratch &scratch,
                    const SoftmaxState &sums) const {
        for_line_groups(lines, [&](int64_t line, auto count) {
            add_value_columns<count()>(scratch.scores + line * TILE, values, from, to, sums.values + line * value_width,
                                       value_width);
        });
    }

    const AttentionCall &call;
    const Pool<Element> pool;
    const int64_t key_width;
};

}  // namespace
