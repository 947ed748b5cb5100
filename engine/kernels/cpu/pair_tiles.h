// Tiles of a pool in bfloat16, multiplied as they are (pairs.h): for callers who let queries and weights be rounded to it.
//
// Few lines meet keys and values as they lie. For more these are laid out once a block, as vectors that all lines meet, a
// strip of lines at a time. Scores and sums are float32. Weights are rounded before they are added up, so that those of a
// line still come to one.
//
// What is inlined and what is not is said where GCC's own choice was measured to cost up to a tenth.
#pragma once

#include "gathered.h"
#include "lines.h"
#include "pairs_apart.h"

namespace {

// Lines that meet some keys or values while these are in a core's nearest cache. So many or fewer read them as they lie
// (measured: laid out, 8 or 12 take a fifth more time); fewer where pairs are taken apart, which lines then share.
constexpr int64_t STRIP = 16, FEW_APART = 8;
// How many bytes of keys lie between what is read and what is asked for, and as many positions of values. With few lines
// each row asks for one, in the midst of arithmetic (measured, with 2 lines: not to ask takes a third more time, to ask for
// 16 rows at a time a tenth; 8,192 bytes are no faster, and slower at times).
constexpr int64_t BYTES_ASKED_FOR = 4096;
constexpr int VECTORS_A_TILE = TILE / LANES;
constexpr float LOG2_E = 1.44269504088896341f;

class PairTiles {
  public:
    typedef bfloat16 Element;
    static constexpr int64_t BLOCK = MOST_LINES;

    // One thread's memory.
    struct Desk {
        Word *queries;        // [lines][pair of columns]
        float *scores;        // [line of a strip][TILE]
        Word *weights;        // [line of a strip][pair of positions]
        Word *keys, *values;  // laid out
        float *queries_apart, *weights_apart, *keys_apart, *values_apart;  // the same for pairs_apart.h
        const Element *key[TILE], *value[TILE];  // where they lie
        const Element *key_ahead[TILE], *value_ahead[TILE];  // and what is asked for while they are read
    };

    explicit PairTiles(const Call &call)
        : value_width(padded(call.values.width)),
          call(call),
          pool(call),
          key_width(call.keys.width),
          ahead(larger(BYTES_ASKED_FOR / (key_width * (int64_t)sizeof(Element)), 1)),
          query_words((key_width + 31) / 32 * 32 / PAIR),
          apart(takes_apart()) {}

    // Numbers of float32 that a desk needs.
    int64_t desk_size() const {
        const int64_t pairs = (BLOCK + TILE) * query_words + STRIP * TILE / PAIR + TILE / PAIR * value_width;
        return STRIP * TILE + pairs + (apart ? PAIR * pairs : 0);
    }

    void furnish(Desk &desk, float *memory) const {
        desk.scores = memory, memory += STRIP * TILE;
        desk.weights = (Word *)memory, memory += STRIP * TILE / PAIR;
        desk.queries = (Word *)memory, memory += BLOCK * query_words;
        desk.keys = (Word *)memory, memory += TILE * query_words;
        desk.values = (Word *)memory, memory += TILE / PAIR * value_width;
        desk.weights_apart = memory, memory += STRIP * TILE;
        desk.queries_apart = memory, memory += BLOCK * query_words * PAIR;
        desk.keys_apart = memory, memory += TILE * query_words * PAIR;
        desk.values_apart = memory;
    }

    void lay(const float *query, int64_t line, Desk &desk) const {
        Word *const to = desk.queries + line * query_words;
        // Behind the last column there are zeros.
        memset(to + query_words - LANES / PAIR, 0, LANES / PAIR * sizeof(Word));
        round_row(query, key_width, to);
        if (apart) lay_apart((const bfloat16 *)to, desk.queries_apart + line * PAIR * query_words);
    }

    // Add the positions [from, to) of a tile to the lines' sums.
    void gather(const Lines &lines, int64_t tile, int64_t from, int64_t to, Desk &desk, const Gathered &sums) const {
        if (!apart) return gather_lines<false>(lines, tile, from, to, desk, sums);
        const Flushed flushed;
        gather_lines<true>(lines, tile, from, to, desk, sums);
    }

    const int64_t value_width;

  private:
    void lay_apart(const bfloat16 *query, float *to) const {
        memset(to + PAIR * query_words - LANES, 0, LANES * sizeof(float));
        lay_row_apart(query, key_width, to);
    }

    template <bool APART>
    void gather_lines(const Lines &lines, int64_t tile, int64_t from, int64_t to, Desk &desk, const Gathered &sums) const {
        if (lines.count <= (APART ? FEW_APART : STRIP))
            gather_few<APART>(lines, tile, from, to, desk, sums);
        else
            gather_many<APART>(lines, tile, from, to, desk, sums);
    }

    // While few lines are computed, memory is what takes time: it is read in the order in which it lies.
    template <bool APART>
    __attribute__((noinline)) void gather_few(const Lines &lines, int64_t tile, int64_t from, int64_t to, Desk &desk,
                                              const Gathered &sums) const {
        for (int64_t group = from / LANES * LANES; group < to; group += LANES) {
            const int64_t start = larger(group, from), stop = lesser(group + LANES, to);
            find(lines, tile, group, start, stop, desk);
            find_ahead(lines, tile, group, start, stop, desk);
            by_strips<LINES_AT_ONCE>(0, lines.count, [&](int64_t line, auto count) {
                score_rows<count()>(query(line, desk), query_words, desk.key + group, desk.key_ahead + group, key_width,
                                    call.scale, desk.scores + line * TILE + group, TILE);
            });
        }
        const std::conditional_t<APART, RowsApart, RowValues> values{desk.value, desk.value_ahead, call.values.width};
        by_strips<LINES_AT_ONCE>(0, lines.count, [&](int64_t line, auto count) {
            for (int64_t own = line; own < line + count(); ++own) weigh<APART>(lines, tile, own, own, desk, sums);
            // Fewer lines leave room for more columns.
            constexpr int MOST = count() <= 2 ? 2 * VECTORS_AT_ONCE : VECTORS_AT_ONCE;
            by_columns<MOST>(0, [&](int64_t at, auto vectors) {
                mix<APART, count(), vectors()>(line, line, values, from, to, at, desk, sums);
            });
        });
    }

    template <bool APART>
    __attribute__((noinline)) void gather_many(const Lines &lines, int64_t tile, int64_t from, int64_t to, Desk &desk,
                                               const Gathered &sums) const {
        for (int64_t group = from / LANES * LANES; group < to; group += LANES) {
            find(lines, tile, group, larger(group, from), lesser(group + LANES, to), desk);
            if (APART)
                lay_keys_apart(desk.key + group, key_width, desk.keys_apart + group * PAIR * query_words);
            else
                lay_keys(desk.key + group, key_width, desk.keys + group * query_words);
        }
        // They are read at once: nothing is asked for that is not there.
        const RowValues values{desk.value, desk.key, call.values.width};
        for (int64_t pair = from / PAIR; pair < (to + 1) / PAIR; ++pair) {
            if (!APART) lay_values(values, pair, value_width, desk.values + pair * value_width);
            for (int64_t at = PAIR * pair; APART && at < PAIR * (pair + 1); ++at)
                lay_row_apart(desk.value[at], call.values.width, desk.values_apart + at * value_width);
        }
        for (int64_t line = 0; line < lines.count; line += STRIP) {
            const int64_t behind = lesser(line + STRIP, lines.count);
            // What comes next is asked for little by little.
            for (int64_t at = TILE * line / lines.count; at < TILE * behind / lines.count; ++at) {
                pool.ask_for_key(lines, tile + TILE + at);
                pool.ask_for_value(lines, tile + TILE + at);
            }
            gather_strip<APART>(lines, tile, line, behind, from, to, desk, sums);
        }
    }

    // Lines [line, behind) against what has been laid out.
    template <bool APART>
    __attribute__((noinline)) void gather_strip(const Lines &lines, int64_t tile, int64_t line, int64_t behind, int64_t from,
                                                int64_t to, Desk &desk, const Gathered &sums) const {
        // Of lines beside each other the first sees the oldest position, the last the newest.
        const int64_t start = larger(from, lines.low(line, tile));
        const int64_t stop = lesser(to, lines.high(behind - 1, tile) + 1);
        if (start >= stop) return;
        int64_t group = start / LANES * LANES;
        if (APART)
            for (; group + 3 * LANES < stop; group += 4 * LANES) score<APART, 4>(line, behind, group, desk);
        for (; group + LANES < stop; group += 2 * LANES) score<APART, 2>(line, behind, group, desk);
        if (group < stop) score<APART, 1>(line, behind, group, desk);
        for (int64_t own = line; own < behind; ++own) weigh<APART>(lines, tile, own, own - line, desk, sums);
        const auto values = laid<APART>(desk);
        by_columns<VECTORS_AT_ONCE>(0, [&](int64_t at, auto vectors) {
            by_strips<LINES_AT_ONCE>(line, behind, [&](int64_t own, auto count) {
                mix<APART, count(), vectors()>(own, own - line, values, start, stop, at, desk, sums);
            });
        });
    }

    // Score lines [line, behind) with GROUPS times LANES keys, from number `group` on.
    template <bool APART, int GROUPS>
    void score(int64_t line, int64_t behind, int64_t group, const Desk &desk) const {
        by_strips<LINES_AT_ONCE>(line, behind, [&](int64_t own, auto count) {
            float *const scores = desk.scores + (own - line) * TILE + group;
            if constexpr (APART)
                score_apart<count(), GROUPS>(desk.queries_apart + own * PAIR * query_words, PAIR * query_words,
                                             desk.keys_apart + group * PAIR * query_words, LANES * PAIR * query_words, key_width,
                                             call.scale, scores, TILE);
            else
                score_laid<count(), GROUPS>(query(own, desk), query_words, desk.keys + group * query_words,
                                            LANES * query_words, key_width, call.scale, scores, TILE);
        });
    }

    // Add the values of positions [from, to), weighted, to VECTORS vectors of the sums of a line and those behind it; their
    // weights are those of a strip's line number `place`.
    template <bool APART, int LINES, int VECTORS, class Values>
    void mix(int64_t line, int64_t place, const Values &values, int64_t from, int64_t to, int64_t at, const Desk &desk,
             const Gathered &sums) const {
        float *const own = sums.values + line * value_width;
        if constexpr (APART)
            mix_apart<LINES, VECTORS>(desk.weights_apart + place * TILE, TILE / PAIR, values, from / PAIR, (to + 1) / PAIR, at,
                                      own, value_width);
        else
            mix_pairs<LINES, VECTORS>(desk.weights + place * TILE / PAIR, TILE / PAIR, values, from / PAIR, (to + 1) / PAIR, at,
                                      own, value_width);
    }

    // A tile's values that have been laid out.
    template <bool APART>
    auto laid(const Desk &desk) const {
        if constexpr (APART)
            return LaidApart{desk.values_apart, value_width};
        else
            return LaidValues{desk.values, value_width};
    }

    const Word *query(int64_t line, const Desk &desk) const { return desk.queries + line * query_words; }

    // Run `work` for columns from `at` on, VECTORS vectors of them at once, and what is left with fewer: work(at, vectors).
    template <int VECTORS, class Work>
    __attribute__((always_inline)) void by_columns(int64_t at, Work work) const {
        for (; at + VECTORS * LANES <= value_width; at += VECTORS * LANES)
            work(at, std::integral_constant<int, VECTORS>());
        if constexpr (VECTORS > 1) by_columns<VECTORS / 2>(at, work);
    }

    // Run `work` for lines [line, behind), MOST at a time: work(line, count), the count known to the compiler.
    template <int MOST, class Work>
    static __attribute__((always_inline)) void by_strips(int64_t line, int64_t behind, Work work) {
        for (; line + MOST <= behind; line += MOST) work(line, std::integral_constant<int, MOST>());
        if constexpr (MOST > 1)
            if (line < behind) known<MOST - 1>(behind - line, [&](auto count) { work(line, count); });
    }

    // use(count), a count of 1 to MOST, known to the compiler.
    template <int MOST, class Use>
    static __attribute__((always_inline)) void known(int64_t count, Use use) {
        if constexpr (MOST > 1)
            if (count < MOST) return known<MOST - 1>(count, use);
        use(std::integral_constant<int, MOST>());
    }

    // Find where the positions [start, stop) of a tile lie, of LANES from number `group` on.
    __attribute__((always_inline)) void find(const Lines &lines, int64_t tile, int64_t group, int64_t start, int64_t stop,
                                             Desk &desk) const {
        for (int64_t at = start; at < stop; ++at) {
            const int64_t cell = pool.cell(lines, tile + at);
            desk.key[at] = touched(pool.key(lines, cell), key_width);
            desk.value[at] = pool.value(lines, cell);
        }
        // Others than asked for are keys that may be read, and values that are zero.
        for (int64_t at = group; at < start; ++at) desk.key[at] = desk.key[start], desk.value[at] = nullptr;
        for (int64_t at = stop; at < group + LANES; ++at) desk.key[at] = desk.key[start], desk.value[at] = nullptr;
    }

    // And what is asked for while they are read: what lies `ahead` of them, or else last.
    __attribute__((always_inline)) void find_ahead(const Lines &lines, int64_t tile, int64_t group, int64_t start, int64_t stop,
                                                   Desk &desk) const {
        const int64_t last = lines.segment->start + lines.segment->rows - 1;
        for (int64_t at = group; at < group + LANES; ++at) {
            const int64_t own = larger(lesser(at, stop - 1), start), cell = pool.cell(lines, lesser(tile + own + ahead, last));
            desk.key_ahead[at] = pool.key(lines, cell), desk.value_ahead[at] = pool.value(lines, cell);
        }
    }

    // Turn a line's scores of a tile, those of a strip's line number `place`, into weights.
    template <bool APART>
    void weigh(const Lines &lines, int64_t tile, int64_t line, int64_t place, Desk &desk, const Gathered &sums) const {
        float *scores = desk.scores + place * TILE;
        if (call.softcap > 0) cap(scores, call.softcap);
        const int32_t low = lines.low(line, tile), high = lines.high(line, tile);
        if (is_part(low, high)) hide(scores, low, high, -INFINITY);
        Vector own[VECTORS_A_TILE];
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS_A_TILE; ++i) own[i] = load(scores + i * LANES);
        Vector top = own[0];
#pragma GCC unroll 8
        for (int i = 1; i < VECTORS_A_TILE; ++i) top = greater(top, own[i]);
        // Seldom, behind the first tiles: so it is not worth its time to look for every line's greatest score.
        if (is_above(top, sums.greatest[line])) sums.raise(line, greatest(top), value_width);
        const Vector less = spread(sums.greatest[line] * LOG2_E);
        Vector total = load(sums.totals + line * LANES);
        const Word ones = 0x3f803f80;  // 1 and 1
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS_A_TILE; i += PAIR) {
            const Vector first = power_of_two(own[i] * LOG2_E - less), second = power_of_two(own[i + 1] * LOG2_E - less);
            const Vector rounded = round_pairs(first, second);
            if (APART) {
                float *const to = desk.weights_apart + place * TILE + i * LANES / PAIR;
                store(to, firsts(rounded)), store(to + TILE / PAIR, seconds(rounded));
            } else {
                store((float *)(desk.weights + (place * TILE + i * LANES) / PAIR), rounded);
            }
            total = add_pairs(total, rounded, spread_pair(&ones));
        }
        store(sums.totals + line * LANES, total);
    }

    const Call &call;
    const Pool<Element> pool;
    const int64_t key_width, ahead, query_words;
    const bool apart;
};

}  // namespace
