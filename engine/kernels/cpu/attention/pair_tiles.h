// Tiles of bfloat16 cells, multiplied as bfloat16 pairs (pair_arithmetic.h): for calls with `rounds_to_bfloat16`.
//
// Few lines read keys and values in place. For more lines they are packed once a block and tile, and read by all lines, a strip
// of lines at a time. Scores and sums are float32. Softmax weights are rounded before they are summed, so that they still add
// up to one.
//
// Inlining is forced or prevented where the choice of GCC was measured to cost up to 10 %.
#pragma once

#include "attention/softmax_state.h"
#include "attention/query_lines.h"
#include "attention/split_pair_arithmetic.h"

namespace {

// Lines of a strip: its keys and values stay in the L1 cache. Up to this many lines read in place (measured: packed, 8 or 12
// lines take 20 % more time); fewer lines where pairs are split, since lines share the splitting.
constexpr int64_t STRIP = 16, FEW_SPLIT_LINES = 8;
// Prefetch distance of keys in bytes; values are prefetched for as many positions. With few lines, each row prefetches another
// one between arithmetic (measured with 2 lines: 33 % more time without prefetches, 10 % with prefetches for 16 rows at once;
// a distance of 8,192 bytes is not faster).
constexpr int64_t PREFETCHED_BYTES = 4096;
constexpr int VECTORS_PER_TILE = TILE / LANES;
constexpr float LOG2_E = 1.44269504088896341f;

class PairTiles {
  public:
    typedef bfloat16 Element;
    static constexpr int64_t BLOCK = MAX_LINES;

    // Scratch memory of one thread.
    struct Scratch {
        Word *queries;                                                     // [lines][pair of columns]
        float *scores;                                                     // [line of a strip][TILE]
        Word *weights;                                                     // [line of a strip][pair of positions]
        Word *keys, *values;                                               // packed
        float *split_queries, *split_weights, *split_keys, *split_values;  // split, for split_pair_arithmetic.h
        const Element *key[TILE], *value[TILE];                            // in place
        const Element *key_ahead[TILE], *value_ahead[TILE];                // the rows to prefetch with them
    };

    explicit PairTiles(const AttentionCall &call)
        : value_width(padded(call.values.width)),
          call(call),
          pool(call),
          key_width(call.keys.width),
          ahead(larger(PREFETCHED_BYTES / (key_width * (int64_t)sizeof(Element)), 1)),
          query_words((key_width + 31) / 32 * 32 / PAIR),
          splits(splits_pairs()) {}

    // Floats of scratch memory.
    int64_t scratch_size() const {
        const int64_t pairs = (BLOCK + TILE) * query_words + STRIP * TILE / PAIR + TILE / PAIR * value_width;
        return STRIP * TILE + pairs + (splits ? PAIR * pairs : 0);
    }

    void assign_memory(Scratch &scratch, float *memory) const {
        scratch.scores = memory, memory += STRIP * TILE;
        scratch.weights = (Word *)memory, memory += STRIP * TILE / PAIR;
        scratch.queries = (Word *)memory, memory += BLOCK * query_words;
        scratch.keys = (Word *)memory, memory += TILE * query_words;
        scratch.values = (Word *)memory, memory += TILE / PAIR * value_width;
        scratch.split_weights = memory, memory += STRIP * TILE;
        scratch.split_queries = memory, memory += BLOCK * query_words * PAIR;
        scratch.split_keys = memory, memory += TILE * query_words * PAIR;
        scratch.split_values = memory;
    }

    void load_query(const float *query, int64_t line, Scratch &scratch) const {
        Word *const to = scratch.queries + line * query_words;
        // Zeros after the last column.
        memset(to + query_words - LANES / PAIR, 0, LANES / PAIR * sizeof(Word));
        round_row(query, key_width, to);
        if (splits) load_split_query((const bfloat16 *)to, scratch.split_queries + line * PAIR * query_words);
    }

    // Add the positions [from, to) of a tile to the softmax state of the lines.
    void accumulate(const Lines &lines, int64_t tile, int64_t from, int64_t to, Scratch &scratch,
                    const SoftmaxState &sums) const {
        if (!splits) return accumulate_lines<false>(lines, tile, from, to, scratch, sums);
        const FlushDenormals flushed;
        accumulate_lines<true>(lines, tile, from, to, scratch, sums);
    }

    const int64_t value_width;

  private:
    void load_split_query(const bfloat16 *query, float *to) const {
        memset(to + PAIR * query_words - LANES, 0, LANES * sizeof(float));
        pack_split_row(query, key_width, to);
    }

    template <bool SPLIT>
    void accumulate_lines(const Lines &lines, int64_t tile, int64_t from, int64_t to, Scratch &scratch,
                          const SoftmaxState &sums) const {
        if (lines.count <= (SPLIT ? FEW_SPLIT_LINES : STRIP))
            accumulate_few<SPLIT>(lines, tile, from, to, scratch, sums);
        else
            accumulate_many<SPLIT>(lines, tile, from, to, scratch, sums);
    }

    // Few lines are bound by memory, which is read in its order.
    template <bool SPLIT>
    __attribute__((noinline)) void accumulate_few(const Lines &lines, int64_t tile, int64_t from, int64_t to, Scratch &scratch,
                                                  const SoftmaxState &sums) const {
        for (int64_t group = from / LANES * LANES; group < to; group += LANES) {
            const int64_t start = larger(group, from), stop = lesser(group + LANES, to);
            find(lines, tile, group, start, stop, scratch);
            find_prefetched(lines, tile, group, start, stop, scratch);
            for_lines<LINES_AT_ONCE>(0, lines.count, [&](int64_t line, auto count) {
                score_rows<count()>(query(line, scratch), query_words, scratch.key + group, scratch.key_ahead + group,
                                    key_width, call.scale, scratch.scores + line * TILE + group, TILE);
            });
        }
        const std::conditional_t<SPLIT, SplitRowValues, RowValues> values{scratch.value, scratch.value_ahead,
                                                                          call.values.width};
        for_lines<LINES_AT_ONCE>(0, lines.count, [&](int64_t line, auto count) {
            for (int64_t i = line; i < line + count(); ++i) to_weights<SPLIT>(lines, tile, i, i, scratch, sums);
            // Fewer lines leave registers for more columns.
            constexpr int MOST = count() <= 2 ? 2 * VECTORS_AT_ONCE : VECTORS_AT_ONCE;
            for_columns<MOST>(0, [&](int64_t column, auto vectors) {
                add_values<SPLIT, count(), vectors()>(line, line, values, from, to, column, scratch, sums);
            });
        });
    }

    template <bool SPLIT>
    __attribute__((noinline)) void accumulate_many(const Lines &lines, int64_t tile, int64_t from, int64_t to, Scratch &scratch,
                                                   const SoftmaxState &sums) const {
        for (int64_t group = from / LANES * LANES; group < to; group += LANES) {
            find(lines, tile, group, larger(group, from), lesser(group + LANES, to), scratch);
            if (SPLIT)
                pack_split_keys(scratch.key + group, key_width, scratch.split_keys + group * PAIR * query_words);
            else
                pack_keys(scratch.key + group, key_width, scratch.keys + group * query_words);
        }
        // Packing reads the rows now: the prefetched row is the key that was just read.
        const RowValues values{scratch.value, scratch.key, call.values.width};
        for (int64_t pair = from / PAIR; pair < (to + 1) / PAIR; ++pair) {
            if (!SPLIT) pack_values(values, pair, value_width, scratch.values + pair * value_width);
            for (int64_t i = PAIR * pair; SPLIT && i < PAIR * (pair + 1); ++i)
                pack_split_row(scratch.value[i], call.values.width, scratch.split_values + i * value_width);
        }
        for (int64_t line = 0; line < lines.count; line += STRIP) {
            const int64_t end = lesser(line + STRIP, lines.count);
            // Prefetch the next tile in portions.
            for (int64_t i = TILE * line / lines.count; i < TILE * end / lines.count; ++i) {
                pool.prefetch_key(lines, tile + TILE + i);
                pool.prefetch_value(lines, tile + TILE + i);
            }
            accumulate_strip<SPLIT>(lines, tile, line, end, from, to, scratch, sums);
        }
    }

    // Lines [line, end) and the packed tile.
    template <bool SPLIT>
    __attribute__((noinline)) void accumulate_strip(const Lines &lines, int64_t tile, int64_t line, int64_t end,
                                                    int64_t from, int64_t to, Scratch &scratch,
                                                    const SoftmaxState &sums) const {
        // In a strip the first line has the oldest position, the last line the newest.
        const int64_t start = larger(from, lines.low(line, tile));
        const int64_t stop = lesser(to, lines.high(end - 1, tile) + 1);
        if (start >= stop) return;
        int64_t group = start / LANES * LANES;
        if (SPLIT)
            for (; group + 3 * LANES < stop; group += 4 * LANES) score<SPLIT, 4>(line, end, group, scratch);
        for (; group + LANES < stop; group += 2 * LANES) score<SPLIT, 2>(line, end, group, scratch);
        if (group < stop) score<SPLIT, 1>(line, end, group, scratch);
        for (int64_t i = line; i < end; ++i) to_weights<SPLIT>(lines, tile, i, i - line, scratch, sums);
        const auto values = packed<SPLIT>(scratch);
        for_columns<VECTORS_AT_ONCE>(0, [&](int64_t column, auto vectors) {
            for_lines<LINES_AT_ONCE>(line, end, [&](int64_t first_line, auto count) {
                add_values<SPLIT, count(), vectors()>(first_line, first_line - line, values, start, stop, column, scratch, sums);
            });
        });
    }

    // Scores of lines [line, end) for GROUPS times LANES keys from `group` on.
    template <bool SPLIT, int GROUPS>
    void score(int64_t line, int64_t end, int64_t group, const Scratch &scratch) const {
        for_lines<LINES_AT_ONCE>(line, end, [&](int64_t first_line, auto count) {
            float *const scores = scratch.scores + (first_line - line) * TILE + group;
            if constexpr (SPLIT)
                score_split<count(), GROUPS>(scratch.split_queries + first_line * PAIR * query_words, PAIR * query_words,
                                             scratch.split_keys + group * PAIR * query_words, LANES * PAIR * query_words,
                                             key_width, call.scale, scores, TILE);
            else
                score_packed<count(), GROUPS>(query(first_line, scratch), query_words, scratch.keys + group * query_words,
                                              LANES * query_words, key_width, call.scale, scores, TILE);
        });
    }

    // Add the weighted values of positions [from, to) to VECTORS vectors of the sums of LINES lines; their weights begin with
    // line `place` of the strip.
    template <bool SPLIT, int LINES, int VECTORS, class Values>
    void add_values(int64_t line, int64_t place, const Values &values, int64_t from, int64_t to, int64_t column,
                    const Scratch &scratch, const SoftmaxState &sums) const {
        float *const values_of_line = sums.values + line * value_width;
        if constexpr (SPLIT)
            add_split_values<LINES, VECTORS>(scratch.split_weights + place * TILE, TILE / PAIR, values, from / PAIR,
                                             (to + 1) / PAIR, column, values_of_line, value_width);
        else
            add_value_pairs<LINES, VECTORS>(scratch.weights + place * TILE / PAIR, TILE / PAIR, values, from / PAIR,
                                            (to + 1) / PAIR, column, values_of_line, value_width);
    }

    // The packed values of a tile.
    template <bool SPLIT>
    auto packed(const Scratch &scratch) const {
        if constexpr (SPLIT)
            return PackedSplitValues{scratch.split_values, value_width};
        else
            return PackedValues{scratch.values, value_width};
    }

    const Word *query(int64_t line, const Scratch &scratch) const { return scratch.queries + line * query_words; }

    // function(column, vectors) for columns from `column` on: VECTORS vectors at once, then fewer.
    template <int VECTORS, class Function>
    __attribute__((always_inline)) void for_columns(int64_t column, Function work) const {
        for (; column + VECTORS * LANES <= value_width; column += VECTORS * LANES)
            work(column, std::integral_constant<int, VECTORS>());
        if constexpr (VECTORS > 1) for_columns<VECTORS / 2>(column, work);
    }

    // function(line, count) for lines [line, end), MOST at once; count is a compile-time constant.
    template <int MOST, class Function>
    static __attribute__((always_inline)) void for_lines(int64_t line, int64_t end, Function work) {
        for (; line + MOST <= end; line += MOST) work(line, std::integral_constant<int, MOST>());
        if constexpr (MOST > 1)
            if (line < end) with_count<MOST - 1>(end - line, [&](auto count) { work(line, count); });
    }

    // use(count) with count in [1, MOST] as a compile-time constant.
    template <int MOST, class Use>
    static __attribute__((always_inline)) void with_count(int64_t count, Use use) {
        if constexpr (MOST > 1)
            if (count < MOST) return with_count<MOST - 1>(count, use);
        use(std::integral_constant<int, MOST>());
    }

    // Pointers to the rows of positions [start, stop) of a tile, in a group of LANES from `group` on.
    __attribute__((always_inline)) void find(const Lines &lines, int64_t tile, int64_t group, int64_t start, int64_t stop,
                                             Scratch &scratch) const {
        for (int64_t i = start; i < stop; ++i) {
            const int64_t cell = pool.cell(lines, tile + i);
            scratch.key[i] = touched(pool.key(lines, cell), key_width);
            scratch.value[i] = pool.value(lines, cell);
        }
        // Outside the range keys are any readable row, and values are zeros.
        for (int64_t i = group; i < start; ++i) scratch.key[i] = scratch.key[start], scratch.value[i] = nullptr;
        for (int64_t i = stop; i < group + LANES; ++i) scratch.key[i] = scratch.key[start], scratch.value[i] = nullptr;
    }

    // Pointers to the rows to prefetch with them: `ahead` positions further, at most the last one.
    __attribute__((always_inline)) void find_prefetched(const Lines &lines, int64_t tile, int64_t group, int64_t start,
                                                        int64_t stop, Scratch &scratch) const {
        const int64_t last = lines.segment->start + lines.segment->rows - 1;
        for (int64_t i = group; i < group + LANES; ++i) {
            const int64_t position = larger(lesser(i, stop - 1), start);
            const int64_t cell = pool.cell(lines, lesser(tile + position + ahead, last));
            scratch.key_ahead[i] = pool.key(lines, cell), scratch.value_ahead[i] = pool.value(lines, cell);
        }
    }

    // Replace the scores of a line, `place` in its strip, by softmax weights.
    template <bool SPLIT>
    void to_weights(const Lines &lines, int64_t tile, int64_t line, int64_t place, Scratch &scratch,
                    const SoftmaxState &sums) const {
        float *scores = scratch.scores + place * TILE;
        if (call.softcap > 0) apply_softcap(scores, call.softcap);
        const int32_t low = lines.low(line, tile), high = lines.high(line, tile);
        if (is_partial(low, high)) mask(scores, low, high, -INFINITY);
        Vector vectors[VECTORS_PER_TILE];
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS_PER_TILE; ++i) vectors[i] = load(scores + i * LANES);
        Vector top = vectors[0];
#pragma GCC unroll 8
        for (int i = 1; i < VECTORS_PER_TILE; ++i) top = greater(top, vectors[i]);
        // Rare after the first tiles, so the maximum of each line is only computed if the tile exceeds it.
        if (is_above(top, sums.greatest[line])) sums.raise(line, greatest(top), value_width);
        const Vector less = spread(sums.greatest[line] * LOG2_E);
        Vector total = load(sums.totals + line * LANES);
        const Word ones = 0x3f803f80;  // two ones in bfloat16
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS_PER_TILE; i += PAIR) {
            const Vector first = power_of_two(vectors[i] * LOG2_E - less), second = power_of_two(vectors[i + 1] * LOG2_E - less);
            const Vector rounded = round_pairs(first, second);
            if (SPLIT) {
                float *const to = scratch.split_weights + place * TILE + i * LANES / PAIR;
                store(to, firsts(rounded)), store(to + TILE / PAIR, seconds(rounded));
            } else {
                store((float *)(scratch.weights + (place * TILE + i * LANES) / PAIR), rounded);
            }
            total = add_pairs(total, rounded, spread_pair(&ones));
        }
        store(sums.totals + line * LANES, total);
    }

    const AttentionCall &call;
    const Pool<Element> pool;
    const int64_t key_width, ahead, query_words;
    const bool splits;
};

}  // namespace
