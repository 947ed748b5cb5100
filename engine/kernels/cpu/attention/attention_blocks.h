// Attention over KV cells: its blocks of work, and the computation of one block by one thread.
//
// A line is a pair (row, query head). The lines of the query heads that share a key head are numbered row by row; a block is
// a range of them, which reads each key and value once. A block iterates over the positions in tiles:
//
//     positions  0        64       128      ...        1024
//     tiles      [  TILE  )[  TILE  )       ...
//     parts      [            PART                    )[ ...
//
// Tiles and parts begin at absolute positions and the sums of a line run over them in order. So a row has the same bits for
// any chunking of the prompt, any batch and any number of threads, also where several blocks compute their first tiles
// together because these have the same cells (shared_prefixes.h).
//
// FloatTiles (float_tiles.h) and PairTiles (pair_tiles.h) compute a tile. They round differently, and a call uses one of them
// for all its lines, by the format of the cells and `rounds_to_bfloat16`.
#pragma once

#include "attention/attention.h"
#include "attention/float_tiles.h"
#include "vector/memory.h"
#if defined(__AVX512BF16__)
#include "attention/pair_tiles.h"
#endif

namespace {

constexpr int64_t PART = 1024;

// Tiles of bfloat16 cells for calls that may round queries and weights to bfloat16.
#if defined(__AVX512BF16__)
typedef PairTiles RoundedTiles;
#else
typedef FloatTiles<bfloat16> RoundedTiles;
#endif

// Some lines of one segment and one key head. The first `shared` positions may be computed in run_shared.
struct Block {
    const Segment *segment;
    int64_t head, line, lines, parts;
    int64_t shared = 0;      // a multiple of TILE
    float *state = nullptr;  // softmax state of the shared positions: of their whole parts, then of the part that is left
};

// Scratch memory of one thread.
template <class Tiles>
struct Scratch {
    typename Tiles::Scratch tiles;
    Lines lines;
    SoftmaxState part, whole;
};

template <class Tiles>
class Kernel {
  public:
    explicit Kernel(const AttentionCall &call)
        : call(call), group(call.heads / call.key_heads), tiles(call), value_width(tiles.value_width) {}

    int64_t scratch_size() const { return padded(tiles.scratch_size()) + 2 * part_size(Tiles::BLOCK); }
    int64_t part_size(int64_t lines) const { return SoftmaxState::size(lines, value_width); }

    void assign_memory(Scratch<Tiles> &scratch, float *memory) const {
        tiles.assign_memory(scratch.tiles, memory), memory += padded(tiles.scratch_size());
        scratch.part = SoftmaxState::at(memory, Tiles::BLOCK), memory += part_size(Tiles::BLOCK);
        scratch.whole = SoftmaxState::at(memory, Tiles::BLOCK);
    }

    // Floats in the state of a block.
    int64_t state_size(int64_t lines) const { return 2 * part_size(lines); }

    // Compute the shared positions of blocks of one key head, and write the states of the blocks.
    void run_shared(const Block *const *members, int64_t count, Scratch<Tiles> &scratch) const {
        const int64_t shared = members[0]->shared;
        begin_lines(*members[0], scratch);
        for (int64_t i = 0; i < count; ++i) add_lines(*members[i], scratch);
        const int64_t lines = scratch.lines.count;
        scratch.whole.clear(lines, value_width);
        int64_t part = 0;
        for (;; ++part) {
            scratch.part.clear(lines, value_width);
            accumulate(part * PART, lesser(shared, (part + 1) * PART), scratch, scratch.part);
            if (part == shared / PART) break;
            scratch.whole.add(scratch.part, lines, value_width);
        }
        int64_t line = 0;
        for (int64_t i = 0; i < count; line += members[i++]->lines) {
            state_whole(*members[i]).copy(scratch.whole, line, members[i]->lines, value_width);
            state_part(*members[i]).copy(scratch.part, line, members[i]->lines, value_width);
        }
    }

    // A whole block, by one thread.
    void run(const Block &block, Scratch<Tiles> &scratch) const {
        begin_lines(block, scratch);
        add_lines(block, scratch);
        const SoftmaxState whole = begin(block, scratch);
        for (int64_t part = first_part(block); part < block.parts; ++part) {
            const SoftmaxState part_state = begin_part(block, part, scratch.part);
            accumulate_part(block, part, scratch, part_state);
            whole.add(part_state, block.lines, value_width);
        }
        finish(block, whole);
    }

    // The first part that is not computed by run_shared.
    int64_t first_part(const Block &block) const { return block.shared / PART; }

    // One part of a block that several threads compute.
    void run_part(const Block &block, int64_t part, Scratch<Tiles> &scratch, float *memory) const {
        if (part < first_part(block)) return;
        begin_lines(block, scratch);
        add_lines(block, scratch);
        const SoftmaxState result = SoftmaxState::at(memory, block.lines), state = begin_part(block, part, result);
        accumulate_part(block, part, scratch, state);
        if (state.values != result.values) result.copy(state, 0, block.lines, value_width);
    }

    // Combine the parts of such a block from `memory`, and write its output.
    void join(const Block &block, float *memory, Scratch<Tiles> &scratch) const {
        const SoftmaxState whole = begin(block, scratch);
        for (int64_t part = first_part(block); part < block.parts; ++part)
            whole.add(SoftmaxState::at(memory + part * part_size(block.lines), block.lines), block.lines, value_width);
        finish(block, whole);
    }

  private:
    int64_t row(const Block &block, int64_t line) const { return (block.line + line) / group; }
    int64_t head(const Block &block, int64_t line) const { return block.head * group + (block.line + line) % group; }

    int64_t oldest(int64_t position) const {
        if (call.attention_range == WINDOW) return larger(position - call.attention_range_size + 1, 0);
        if (call.attention_range == CHUNK) return position / call.attention_range_size * call.attention_range_size;
        return 0;
    }

    SoftmaxState state_whole(const Block &block) const { return SoftmaxState::at(block.state, block.lines); }
    SoftmaxState state_part(const Block &block) const {
        return SoftmaxState::at(block.state + part_size(block.lines), block.lines);
    }

    // The softmax state of the whole parts before first_part.
    SoftmaxState begin(const Block &block, Scratch<Tiles> &scratch) const {
        if (block.state) return state_whole(block);
        scratch.whole.clear(block.lines, value_width);
        return scratch.whole;
    }

    // The softmax state at the start of a part: empty, in `sums`, or that of the shared positions in the part.
    SoftmaxState begin_part(const Block &block, int64_t part, const SoftmaxState &sums) const {
        if (block.state && part == first_part(block)) return state_part(block);
        sums.clear(block.lines, value_width);
        return sums;
    }

    static void begin_lines(const Block &block, Scratch<Tiles> &scratch) {
        scratch.lines.segment = block.segment, scratch.lines.head = block.head, scratch.lines.count = 0;
    }

    // Add the lines of a block to the scratch memory.
    void add_lines(const Block &block, Scratch<Tiles> &scratch) const {
        for (int64_t line = 0; line < block.lines; ++line) {
            const int64_t place = scratch.lines.count++;
            scratch.lines.newest[place] = block.segment->start + row(block, line);
            scratch.lines.oldest[place] = larger(oldest(scratch.lines.newest[place]), block.segment->first);
            tiles.load_query(call.query + head(block, line) * call.query_head_stride +
                                 (block.segment->row + row(block, line)) * call.query_row_stride,
                             place, scratch.tiles);
        }
    }

    // Add the positions of one part to the softmax state, without the shared ones.
    void accumulate_part(const Block &block, int64_t part, Scratch<Tiles> &scratch, const SoftmaxState &sums) const {
        const int64_t start = larger(larger(scratch.lines.oldest[0], part * PART), block.shared);
        accumulate(start, lesser(scratch.lines.newest[block.lines - 1] + 1, (part + 1) * PART), scratch, sums);
    }

    // Add positions [start, stop) to the softmax state.
    void accumulate(int64_t start, int64_t stop, Scratch<Tiles> &scratch, const SoftmaxState &sums) const {
        for (int64_t tile = start / TILE * TILE; tile < stop; tile += TILE)
            tiles.accumulate(scratch.lines, tile, larger(start - tile, 0), lesser(stop - tile, TILE), scratch.tiles, sums);
    }

    void finish(const Block &block, const SoftmaxState &sums) const {
        for (int64_t line = 0; line < block.lines; ++line) {
            const float total = sums.total(line);
            float by = 1.0f / total;
            if (call.sinks) {
                const float sink = call.sinks[head(block, line)], top = fmaxf(sink, sums.greatest[line]);
                const float share = expf(sums.greatest[line] - top);
                by = share / (total * share + expf(sink - top));
            }
            const int64_t place = (block.segment->row + row(block, line)) * call.heads + head(block, line);
            float *to = call.output + place * call.values.width;
            const float *from = sums.values + line * value_width;
            for (int64_t i = 0; i < call.values.width; ++i) to[i] = from[i] * by;
        }
    }

    const AttentionCall &call;
    const int64_t group;
    const Tiles tiles;
    const int64_t value_width;
};

// With fewer than BLOCKS_PER_THREAD blocks a thread, blocks are cut into parts; they have at most MIN_BLOCK_LINES lines then.
constexpr int64_t BLOCKS_PER_THREAD = 4;
// The lower bound of a block's line limit; with more lines, the limit leaves BLOCKS_PER_THREAD blocks for each thread.
constexpr int64_t MIN_BLOCK_LINES = 64;

// The line limit of the blocks of a call; `max_lines` is the limit of the kernel. A lone segment with fewer key heads than
// threads (latents have one) is cut further, into a block for each thread.
inline int64_t lines_per_block(const AttentionCall &call, int64_t max_lines) {
    int64_t lines = 0;
    for (int64_t i = 0; i < call.segment_count; ++i) lines += call.segments[i].rows * call.heads;
    if (call.segment_count == 1 && call.key_heads < call.threads && lines < MIN_BLOCK_LINES * call.threads)
        return ceil_div(lines, call.threads);
    return larger(lesser(lines / (BLOCKS_PER_THREAD * call.threads) / LANES * LANES, max_lines), MIN_BLOCK_LINES);
}

// Cut all lines into blocks of about the same size. Returns their number, and writes them unless `blocks` is null.
int64_t cut(const AttentionCall &call, int64_t max_lines, Block *blocks) {
    const int64_t group = call.heads / call.key_heads, limit = lines_per_block(call, max_lines);
    int64_t count = 0;
    for (int64_t i = 0; i < call.segment_count; ++i) {
        const Segment &segment = call.segments[i];
        const int64_t all = segment.rows * group, pieces = (all + limit - 1) / limit;
        if (pieces == 0) continue;
        const int64_t equal = (all + pieces - 1) / pieces, size = limit < LANES ? equal : padded(equal);
        // The last blocks of a head have most positions, and come first for load balance.
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

bool in_pool(const AttentionCall &call) {
    for (int64_t index = 0; index < call.segment_count; ++index) {
        const Segment &segment = call.segments[index];
        const int64_t length = segment.start + segment.rows - segment.first;
        if (!segment.cells && (segment.first_cell < 0 || segment.first_cell + length > call.cells)) return false;
        for (int64_t i = 0; segment.cells && i < length; ++i)
            if (segment.cells[i] < 0 || segment.cells[i] >= call.cells) return false;
    }
    return true;
}

}  // namespace
