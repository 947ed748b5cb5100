// Attention over cells: how its work is cut, and one thread's part of it.
//
// The queries of a group of heads that share a key head are `lines`, (row, head of the group) one after the other; up to
// BLOCK lines are one block of work, and read each key and value once. A block walks the positions in tiles:
//
//     positions  0        64       128      ...        1024
//     tiles      [  TILE  )[  TILE  )       ...
//     parts      [            PART                    )[ ...
//
// Where a block has many lines, the keys of a tile are turned into columns first, for then no sum runs across a vector.
//
// Tiles and parts begin at absolute positions, a line's sums run over them in order, and nothing else enters into them:
// a row comes out the same bit for bit, however the prompt was cut, whatever else the batch holds, with any threads. So
// it does where several blocks walk their first tiles together, because these are the same cells (sharing.h).
#pragma once

#include "attention.h"
#include "memory.h"
#include "tile.h"

namespace {

constexpr int64_t BLOCK = 64;
constexpr int64_t PART = 1024;
// Lines from which on it pays to turn keys (measured: an eighth less time with 32 of width 64, a sixth with 64).
constexpr int64_t MANY = 32;
// Lines up to which it pays to bring numbers of 16 bits to float32 for each use (measured: a quarter less time with 2
// lines of width 128, a tenth with 4 of width 64, a twentieth more with 16).
constexpr int64_t FEW = 4;
// How many positions before their turn cells of a table are asked for (measured: 20 % of a decode's time).
constexpr int64_t AHEAD = 32;

// Some lines of one segment and one key head. Others may have walked its first positions for it: these it leaves out.
struct Block {
    const Segment *segment;
    int64_t head, line, lines, parts;
    int64_t shared = 0;      // such positions, whole tiles of them
    float *state = nullptr;  // what the lines have gathered there: of all whole parts, then of the part behind them
};

// One thread's memory for one block.
struct Desk {
    float *queries;            // [lines][key width], scaled
    float *scores;             // [lines][TILE]
    float *turned;             // [key width][LANES], some keys' columns
    float *keys, *values;      // [TILE][width] in float32, where the pool holds them otherwise
    Gathered part, whole;
    const float *key[TILE], *value[TILE];
    const bfloat16 *narrow_key[TILE], *narrow_value[TILE];  // where they stand in the pool, if they are read there
    int64_t oldest[BLOCK], newest[BLOCK];  // positions that a line sees: [oldest, newest]
};

template <class Element>
class Kernel {
  public:
    explicit Kernel(const Call &call)
        : call(call),
          group(call.heads / call.key_heads),
          key_width(padded(call.keys.width)),
          value_width(padded(call.values.width)) {}

    int64_t desk_size() const {
        return BLOCK * (key_width + TILE) + LANES * key_width + TILE * (key_width + value_width) + 2 * part_size(BLOCK);
    }
    int64_t part_size(int64_t lines) const { return Gathered::size(lines, value_width); }

    void furnish(Desk &desk, float *memory) const {
        desk.queries = memory, memory += BLOCK * key_width;
        desk.scores = memory, memory += BLOCK * TILE;
        desk.turned = memory, memory += LANES * key_width;
        desk.keys = memory, memory += TILE * key_width;
        desk.values = memory, memory += TILE * value_width;
        desk.part = Gathered::at(memory, BLOCK), memory += part_size(BLOCK);
        desk.whole = Gathered::at(memory, BLOCK);
        // The padding behind the last column stays zero.
        memset(desk.keys, 0, TILE * (key_width + value_width) * sizeof(float));
    }

    // Numbers that the state of a block holds.
    int64_t state_size(int64_t lines) const { return 2 * part_size(lines); }

    // The first positions of blocks of one key head that have them in the same cells: into the blocks' states.
    void run_shared(const Block *const *members, int64_t count, Desk &desk) const {
        Block all = *members[0];
        all.lines = 0;
        for (int64_t at = 0; at < count; ++at) {
            prepare(*members[at], desk, all.lines);
            all.lines += members[at]->lines;
        }
        desk.whole.clear(all.lines, value_width);
        int64_t part = 0;
        for (;; ++part) {
            desk.part.clear(all.lines, value_width);
            gather(all, part * PART, lesser(all.shared, (part + 1) * PART), desk, desk.part);
            if (part == all.shared / PART) break;
            desk.whole.add(desk.part, all.lines, value_width);
        }
        int64_t line = 0;
        for (int64_t at = 0; at < count; line += members[at++]->lines) {
            state_whole(*members[at]).copy(desk.whole, line, members[at]->lines, value_width);
            state_part(*members[at]).copy(desk.part, line, members[at]->lines, value_width);
        }
    }

    // A whole block on one thread.
    void run(const Block &block, Desk &desk) const {
        prepare(block, desk, 0);
        const Gathered whole = begin(block, desk);
        for (int64_t part = first_part(block); part < block.parts; ++part) {
            const Gathered own = begin_part(block, part, desk.part);
            gather_part(block, part, desk, own);
            whole.add(own, block.lines, value_width);
        }
        finish(block, whole);
    }

    // The first part that is left to be gathered.
    int64_t first_part(const Block &block) const { return block.shared / PART; }

    // The positions of one part, for a block whose parts are gathered by several threads.
    void run_part(const Block &block, int64_t part, Desk &desk, float *memory) const {
        if (part < first_part(block)) return;
        prepare(block, desk, 0);
        const Gathered result = Gathered::at(memory, block.lines), own = begin_part(block, part, result);
        gather_part(block, part, desk, own);
        if (own.values != result.values) result.copy(own, 0, block.lines, value_width);
    }

    // What is left to do for such a block: memory holds its parts.
    void join(const Block &block, float *memory, Desk &desk) const {
        const Gathered whole = begin(block, desk);
        for (int64_t part = first_part(block); part < block.parts; ++part)
            whole.add(Gathered::at(memory + part * part_size(block.lines), block.lines), block.lines, value_width);
        finish(block, whole);
    }

  private:
    int64_t row(const Block &block, int64_t line) const { return (block.line + line) / group; }
    int64_t head(const Block &block, int64_t line) const { return block.head * group + (block.line + line) % group; }

    int64_t oldest(int64_t position) const {
        if (call.reach == WINDOW) return larger(position - call.reach_size + 1, 0);
        if (call.reach == CHUNK) return position / call.reach_size * call.reach_size;
        return 0;
    }

    Gathered state_whole(const Block &block) const { return Gathered::at(block.state, block.lines); }
    Gathered state_part(const Block &block) const {
        return Gathered::at(block.state + part_size(block.lines), block.lines);
    }

    // What a block has gathered of whole parts before its own work begins.
    Gathered begin(const Block &block, Desk &desk) const {
        if (block.state) return state_whole(block);
        desk.whole.clear(block.lines, value_width);
        return desk.whole;
    }

    // And of a part: nothing, in `sums`, unless it is the one in which others have stopped.
    Gathered begin_part(const Block &block, int64_t part, const Gathered &sums) const {
        if (block.state && part == first_part(block)) return state_part(block);
        sums.clear(block.lines, value_width);
        return sums;
    }

    // Lay a block's lines on the desk, the first as number `place`.
    void prepare(const Block &block, Desk &desk, int64_t place) const {
        for (int64_t line = 0; line < block.lines; ++line, ++place) {
            desk.newest[place] = block.segment->start + row(block, line);
            desk.oldest[place] = larger(oldest(desk.newest[place]), block.segment->first);
            const float *from = call.query + head(block, line) * call.query_head_stride +
                                (block.segment->row + row(block, line)) * call.query_row_stride;
            float *to = desk.queries + place * key_width;
            for (int64_t at = 0; at < call.keys.width; ++at) to[at] = from[at] * call.scale;
            for (int64_t at = call.keys.width; at < key_width; ++at) to[at] = 0;
        }
    }

    // The softmax's sums over what is left of one part.
    void gather_part(const Block &block, int64_t part, Desk &desk, const Gathered &sums) const {
        const int64_t start = larger(larger(desk.oldest[0], part * PART), block.shared);
        gather(block, start, lesser(desk.newest[block.lines - 1] + 1, (part + 1) * PART), desk, sums);
    }

    // Add positions [start, stop) to the sums.
    void gather(const Block &block, int64_t start, int64_t stop, Desk &desk, const Gathered &sums) const {
        for (int64_t tile = start / TILE * TILE; tile < stop; tile += TILE) {
            const int64_t from = larger(start - tile, 0), to = lesser(stop - tile, TILE);
            fetch(block, tile, from, to, desk);
            score_tile(block, from, to, desk);
            for (int64_t line = 0; line < block.lines; ++line) weigh(tile, line, desk, sums);
            if (reads_narrow(block))
                mix_tile(block, from, to, desk.narrow_value, desk, sums);
            else
                mix_tile(block, from, to, desk.value, desk, sums);
        }
    }

    template <class Number>
    void mix_tile(const Block &block, int64_t from, int64_t to, const Number *const *values, const Desk &desk,
                  const Gathered &sums) const {
        by_lines(block.lines, [&](int64_t line, auto count) {
            mix_columns<count()>(desk.scores + line * TILE, values, from, to, sums.values + line * value_width, value_width);
        });
    }

    // Whether numbers are brought to float32 where they are used, not before.
    bool reads_narrow(const Block &block) const {
        return std::is_same_v<Element, bfloat16> && block.lines <= FEW && key_width == call.keys.width &&
               value_width == call.values.width;
    }

    int64_t cell(const Segment &segment, int64_t position) const {
        const int64_t at = position - segment.first;
        return segment.cells ? segment.cells[at] : segment.run + at;
    }

    // Where the keys and values of a tile's positions [from, to) stand as float32.
    void fetch(const Block &block, int64_t tile, int64_t from, int64_t to, Desk &desk) const {
        const Segment &segment = *block.segment;
        const bool narrow = reads_narrow(block);
        for (int64_t at = from; at < to; ++at) {
            // What follows in a run, processors guess on their own, and better.
            if (segment.cells && tile + at + AHEAD < segment.start + segment.rows) {
                const int64_t later = cell(segment, tile + at + AHEAD);
                ask_for(call.keys, stored(call.keys, block.head, later));
                ask_for(call.values, stored(call.values, block.head, later));
            }
            const int64_t own = cell(segment, tile + at);
            if (narrow) {
                desk.narrow_key[at] = touched((const bfloat16 *)stored(call.keys, block.head, own), key_width);
                desk.narrow_value[at] = touched((const bfloat16 *)stored(call.values, block.head, own), value_width);
                continue;
            }
            desk.key[at] = fetch_one(call.keys, key_width, block.head, own, desk.keys + at * key_width);
            desk.value[at] = fetch_one(call.values, value_width, block.head, own, desk.values + at * value_width);
        }
        // Keys are scored KEYS or LANES at a time: others than asked for are some that may be read.
        const auto fill = [&](auto *keys) {
            for (int64_t at = from / LANES * LANES; at < from; ++at) keys[at] = keys[from];
            for (int64_t at = to; at % LANES; ++at) keys[at] = keys[from];
        };
        narrow ? fill(desk.narrow_key) : fill(desk.key);
    }

    const Element *stored(const Plane &plane, int64_t head, int64_t cell) const {
        return (const Element *)plane.data + head * plane.head_stride + cell * plane.cell_stride;
    }

    // Inlined by force: GCC deletes calls of a function that does nothing but this.
    __attribute__((always_inline)) void ask_for(const Plane &plane, const Element *row) const {
        for (int64_t at = 0; at < plane.width; at += 64 / sizeof(Element)) __builtin_prefetch(row + at, 0, 2);
    }

    const float *fetch_one(const Plane &plane, int64_t width, int64_t head, int64_t cell, float *__restrict copy) const {
        const Element *row = stored(plane, head, cell);
        if constexpr (std::is_same_v<Element, float>)
            if (width == plane.width) return touched(row, width);
        const float scale = plane.scales ? plane.scales[head * plane.scale_stride + cell] : 1.0f;
        for (int64_t at = 0; at < plane.width; ++at) copy[at] = number(row[at]) * scale;
        return copy;
    }

    void score_tile(const Block &block, int64_t from, int64_t to, Desk &desk) const {
        if (block.lines >= MANY) return score_tile_turned(block, from, to, desk);
        reads_narrow(block) ? score_keys(block, from, to, desk.narrow_key, desk) : score_keys(block, from, to, desk.key, desk);
    }

    template <class Number>
    void score_keys(const Block &block, int64_t from, int64_t to, const Number *const *keys, const Desk &desk) const {
        for (int64_t key = from / KEYS * KEYS; key < to; key += KEYS) {
            by_lines(block.lines, [&](int64_t line, auto count) {
                score<count()>(desk.queries + line * key_width, keys + key, key_width, desk.scores + line * TILE + key);
            });
        }
    }

    void score_tile_turned(const Block &block, int64_t from, int64_t to, Desk &desk) const {
        for (int64_t key = from / LANES * LANES; key < to; key += LANES) {
            turn(desk.key + key, key_width, desk.turned);
            const auto score = [&](int64_t line, auto count) {
                score_turned<count()>(desk.queries + line * key_width, desk.turned, key_width,
                                      desk.scores + line * TILE + key);
            };
            int64_t line = 0;
            for (; line + TURNED <= block.lines; line += TURNED) score(line, std::integral_constant<int, TURNED>());
            for (; line < block.lines; ++line) score(line, std::integral_constant<int, 1>());
        }
    }

    // Turn a line's scores of a tile into weights, and bring its sums to the same greatest score.
    void weigh(int64_t tile, int64_t line, Desk &desk, const Gathered &sums) const {
        float *scores = desk.scores + line * TILE;
        const int32_t low = (int32_t)larger(desk.oldest[line] - tile, 0);
        const int32_t high = (int32_t)lesser(desk.newest[line] - tile, TILE);
        const bool partly = low > 0 || high < TILE - 1;
        if (call.softcap > 0) cap(scores);
        if (partly) hide(scores, low, high, NOTHING);
        Vector top = spread(NOTHING);
        for (int32_t at = 0; at < TILE; at += LANES) top = greater(load(scores + at), top);
        const float before = sums.greatest[line], now = fmaxf(before, greatest(top));
        if (now != before) rescale(line, expf(before - now), sums);
        sums.greatest[line] = now;
        for (int32_t at = 0; at < TILE; at += LANES) store(scores + at, exponential(load(scores + at) - now));
        // A line that sees nothing of this tile may have seen nothing at all: its weights are zero, not e^0.
        if (partly) hide(scores, low, high, 0);
        Vector total = {};
        for (int32_t at = 0; at < TILE; at += LANES) total += load(scores + at);
        sums.total[line] += sum(total);
    }

    void cap(float *scores) const {
        for (int32_t at = 0; at < TILE; at += LANES)
            store(scores + at, call.softcap * hyperbolic_tangent(load(scores + at) / call.softcap));
    }

    // Give all of a tile but [low, high] a value.
    void hide(float *scores, int32_t low, int32_t high, float value) const {
        for (int32_t at = 0; at < TILE; at += LANES) {
            const Integers number = lane_numbers() + at;
            store(scores + at, (number >= low) & (number <= high) ? load(scores + at) : spread(value));
        }
    }

    void rescale(int64_t line, float by, const Gathered &sums) const {
        float *values = sums.values + line * value_width;
        for (int64_t at = 0; at < value_width; at += LANES) store(values + at, load(values + at) * by);
        sums.total[line] *= by;
    }

    void finish(const Block &block, const Gathered &sums) const {
        for (int64_t line = 0; line < block.lines; ++line) {
            float by = 1.0f / sums.total[line];
            if (call.sinks) {
                const float sink = call.sinks[head(block, line)], top = fmaxf(sink, sums.greatest[line]);
                const float own = expf(sums.greatest[line] - top);
                by = own / (sums.total[line] * own + expf(sink - top));
            }
            const int64_t place = (block.segment->row + row(block, line)) * call.heads + head(block, line);
            float *to = call.output + place * call.values.width;
            const float *from = sums.values + line * value_width;
            for (int64_t at = 0; at < call.values.width; ++at) to[at] = from[at] * by;
        }
    }

    const Call &call;
    const int64_t group, key_width, value_width;
};

// Cut all lines into blocks; counts them, and writes them down where `blocks` is not null.
int64_t cut(const Call &call, Block *blocks) {
    const int64_t group = call.heads / call.key_heads;
    int64_t count = 0;
    for (int64_t at = 0; at < call.segment_count; ++at) {
        const Segment &segment = call.segments[at];
        for (int64_t head = 0; head < call.key_heads; ++head)
            for (int64_t line = 0; line < segment.rows * group; line += BLOCK, ++count) {
                if (!blocks) continue;
                const int64_t lines = lesser(segment.rows * group - line, BLOCK);
                const int64_t last = segment.start + (line + lines - 1) / group;
                blocks[count] = {&segment, head, line, lines, last / PART + 1};
            }
    }
    return count;
}

// Fewer blocks than keep all threads busy are cut once more, into their parts.
constexpr int64_t BLOCKS_A_THREAD = 4;

bool in_pool(const Call &call) {
    for (int64_t at = 0; at < call.segment_count; ++at) {
        const Segment &segment = call.segments[at];
        const int64_t length = segment.start + segment.rows - segment.first;
        if (!segment.cells && (segment.run < 0 || segment.run + length > call.cells)) return false;
        for (int64_t i = 0; segment.cells && i < length; ++i)
            if (segment.cells[i] < 0 || segment.cells[i] >= call.cells) return false;
    }
    return true;
}

}  // namespace
