// Attention over cells: how its work is cut, and one thread's part of it.
//
// The queries of a group of heads that share a key head are `lines`, (row, head of the group) one after the other; some of
// them are one block of work, and read each key and value once. A block walks the positions in tiles:
//
//     positions  0        64       128      ...        1024
//     tiles      [  TILE  )[  TILE  )       ...
//     parts      [            PART                    )[ ...
//
// Tiles and parts begin at absolute positions, a line's sums run over them in order, and nothing else enters into them:
// a row comes out the same bit for bit, however the prompt was cut, whatever else the batch holds, with any threads. So
// it does where several blocks walk their first tiles together, because these are the same cells (sharing.h).
//
// What is done with a tile is the business of FloatTiles (float_tiles.h) or PairTiles (pair_tiles.h). For one line they
// differ by what these round; which of them a call gets depends on its format and on who asks, not on its lines.
#pragma once

#include "attention.h"
#include "float_tiles.h"
#include "memory.h"
#if defined(__AVX512BF16__)
#include "pair_tiles.h"
#endif

namespace {

constexpr int64_t PART = 1024;

// How cells in bfloat16 are attended to for those who let queries and weights be rounded to it.
#if defined(__AVX512BF16__)
typedef PairTiles RoundedTiles;
#else
typedef FloatTiles<bfloat16> RoundedTiles;
#endif

// Some lines of one segment and one key head. Others may have walked its first positions for it: these it leaves out.
struct Block {
    const Segment *segment;
    int64_t head, line, lines, parts;
    int64_t shared = 0;      // such positions, whole tiles of them
    float *state = nullptr;  // what the lines have gathered there: of all whole parts, then of the part behind them
};

// One thread's memory for one block.
template <class Tiles>
struct Desk {
    typename Tiles::Desk tiles;
    Lines lines;
    Gathered part, whole;
};

template <class Tiles>
class Kernel {
  public:
    explicit Kernel(const Call &call)
        : call(call), group(call.heads / call.key_heads), tiles(call), value_width(tiles.value_width) {}

    int64_t desk_size() const { return padded(tiles.desk_size()) + 2 * part_size(Tiles::BLOCK); }
    int64_t part_size(int64_t lines) const { return Gathered::size(lines, value_width); }

    void furnish(Desk<Tiles> &desk, float *memory) const {
        tiles.furnish(desk.tiles, memory), memory += padded(tiles.desk_size());
        desk.part = Gathered::at(memory, Tiles::BLOCK), memory += part_size(Tiles::BLOCK);
        desk.whole = Gathered::at(memory, Tiles::BLOCK);
    }

    // Numbers that the state of a block holds.
    int64_t state_size(int64_t lines) const { return 2 * part_size(lines); }

    // The first positions of blocks of one key head that have them in the same cells: into the blocks' states.
    void run_shared(const Block *const *members, int64_t count, Desk<Tiles> &desk) const {
        const int64_t shared = members[0]->shared;
        begin_lines(*members[0], desk);
        for (int64_t at = 0; at < count; ++at) add_lines(*members[at], desk);
        const int64_t lines = desk.lines.count;
        desk.whole.clear(lines, value_width);
        int64_t part = 0;
        for (;; ++part) {
            desk.part.clear(lines, value_width);
            gather(part * PART, lesser(shared, (part + 1) * PART), desk, desk.part);
            if (part == shared / PART) break;
            desk.whole.add(desk.part, lines, value_width);
        }
        int64_t line = 0;
        for (int64_t at = 0; at < count; line += members[at++]->lines) {
            state_whole(*members[at]).copy(desk.whole, line, members[at]->lines, value_width);
            state_part(*members[at]).copy(desk.part, line, members[at]->lines, value_width);
        }
    }

    // A whole block on one thread.
    void run(const Block &block, Desk<Tiles> &desk) const {
        begin_lines(block, desk);
        add_lines(block, desk);
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
    void run_part(const Block &block, int64_t part, Desk<Tiles> &desk, float *memory) const {
        if (part < first_part(block)) return;
        begin_lines(block, desk);
        add_lines(block, desk);
        const Gathered result = Gathered::at(memory, block.lines), own = begin_part(block, part, result);
        gather_part(block, part, desk, own);
        if (own.values != result.values) result.copy(own, 0, block.lines, value_width);
    }

    // What is left to do for such a block: memory holds its parts.
    void join(const Block &block, float *memory, Desk<Tiles> &desk) const {
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
    Gathered begin(const Block &block, Desk<Tiles> &desk) const {
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

    static void begin_lines(const Block &block, Desk<Tiles> &desk) {
        desk.lines.segment = block.segment, desk.lines.head = block.head, desk.lines.count = 0;
    }

    // Lay a block's lines on the desk, behind those that lie there.
    void add_lines(const Block &block, Desk<Tiles> &desk) const {
        for (int64_t line = 0; line < block.lines; ++line) {
            const int64_t place = desk.lines.count++;
            desk.lines.newest[place] = block.segment->start + row(block, line);
            desk.lines.oldest[place] = larger(oldest(desk.lines.newest[place]), block.segment->first);
            tiles.lay(call.query + head(block, line) * call.query_head_stride +
                          (block.segment->row + row(block, line)) * call.query_row_stride,
                      place, desk.tiles);
        }
    }

    // The softmax's sums over what is left of one part.
    void gather_part(const Block &block, int64_t part, Desk<Tiles> &desk, const Gathered &sums) const {
        const int64_t start = larger(larger(desk.lines.oldest[0], part * PART), block.shared);
        gather(start, lesser(desk.lines.newest[block.lines - 1] + 1, (part + 1) * PART), desk, sums);
    }

    // Add positions [start, stop) to the sums.
    void gather(int64_t start, int64_t stop, Desk<Tiles> &desk, const Gathered &sums) const {
        for (int64_t tile = start / TILE * TILE; tile < stop; tile += TILE)
            tiles.gather(desk.lines, tile, larger(start - tile, 0), lesser(stop - tile, TILE), desk.tiles, sums);
    }

    void finish(const Block &block, const Gathered &sums) const {
        for (int64_t line = 0; line < block.lines; ++line) {
            const float total = sums.total(line);
            float by = 1.0f / total;
            if (call.sinks) {
                const float sink = call.sinks[head(block, line)], top = fmaxf(sink, sums.greatest[line]);
                const float own = expf(sums.greatest[line] - top);
                by = own / (total * own + expf(sink - top));
            }
            const int64_t place = (block.segment->row + row(block, line)) * call.heads + head(block, line);
            float *to = call.output + place * call.values.width;
            const float *from = sums.values + line * value_width;
            for (int64_t at = 0; at < call.values.width; ++at) to[at] = from[at] * by;
        }
    }

    const Call &call;
    const int64_t group;
    const Tiles tiles;
    const int64_t value_width;
};

// Fewer blocks than keep all threads busy are cut once more, into their parts; these have LEAST_BLOCK lines at most.
constexpr int64_t BLOCKS_A_THREAD = 4;
// Lines of a block, at most, where there are few; of more lines, a block has as many as leave all threads some blocks.
constexpr int64_t LEAST_BLOCK = 64;

// Lines of a call's blocks, at most; a kernel takes up to `most` at once.
inline int64_t lines_a_block(const Call &call, int64_t most) {
    int64_t lines = 0;
    for (int64_t at = 0; at < call.segment_count; ++at) lines += call.segments[at].rows * call.heads;
    return larger(lesser(lines / (BLOCKS_A_THREAD * call.threads) / LANES * LANES, most), LEAST_BLOCK);
}

// Cut all lines into blocks of about the same size; counts them, and writes them down where `blocks` is not null.
int64_t cut(const Call &call, int64_t most, Block *blocks) {
    const int64_t group = call.heads / call.key_heads, limit = lines_a_block(call, most);
    int64_t count = 0;
    for (int64_t at = 0; at < call.segment_count; ++at) {
        const Segment &segment = call.segments[at];
        const int64_t all = segment.rows * group, pieces = (all + limit - 1) / limit;
        if (pieces == 0) continue;
        const int64_t size = padded((all + pieces - 1) / pieces);
        // A head's last blocks see most, and come first: so that no thread is left with one of them.
        for (int64_t head = 0; head < call.key_heads; ++head)
            for (int64_t line = (all - 1) / size * size; line >= 0; line -= size, ++count) {
                if (!blocks) continue;
                const int64_t lines = lesser(all - line, size);
                const int64_t last = segment.start + (line + lines - 1) / group;
                blocks[count] = {&segment, head, line, lines, last / PART + 1};
            }
    }
    return count;
}

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
