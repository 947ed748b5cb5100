// The attention of one call by a team of threads.
#pragma once

#include <omp.h>

#include "attention/shared_prefixes.h"

namespace {

template <class Tiles>
class AttentionWork {
  public:
    // Bytes of memory for a call.
    static int64_t size(const AttentionCall &call) {
        const Kernel<Tiles> kernel(call);
        const int64_t blocks = cut(call, Tiles::BLOCK, nullptr);
        int64_t numbers = call.threads * padded(kernel.scratch_size()), most_parts = 0;
        for (int64_t i = 0; i < call.segment_count; ++i) {
            const Segment &segment = call.segments[i];
            most_parts = larger(most_parts, (segment.start + segment.rows - 1) / PART + 1);
            if (SharedPrefixes::can_share(call, segment))
                numbers += call.key_heads * kernel.state_size(SharedPrefixes::lines(call, segment));
        }
        if (is_cut(call, blocks, most_parts)) numbers += blocks * most_parts * kernel.part_size(MIN_BLOCK_LINES);
        const int64_t segments = call.segment_count * (sizeof(PrefixMember) + 2 * sizeof(int64_t));
        return numbers * sizeof(float) + blocks * sizeof(Block) + segments + 512;
    }

    // Constructed by one thread, in memory that is aligned to 64 bytes.
    AttentionWork(const AttentionCall &call, char *memory) : call(call), kernel(this->call) {
        Arena arena(memory);
        members = arena.allocate<PrefixMember>(call.segment_count);
        first_block = arena.allocate<int64_t>(call.segment_count);
        leaders = arena.allocate<int64_t>(call.segment_count);
        count = cut(call, Tiles::BLOCK, nullptr);
        blocks = arena.allocate<Block>(count);
        cut(call, Tiles::BLOCK, blocks);
        scratch_size = padded(kernel.scratch_size());
        scratches = arena.allocate<float>(call.threads * scratch_size);
        find_shared(arena.allocate<float>(0));
    }

    // Whether each key head is one whole block of a single segment.
    bool is_by_heads() const { return call.segment_count == 1 && count == call.key_heads && !is_cut(call, count, most_parts); }

    // Called by all threads of a team; returns after all work is done.
    void run() const {
        run([](int64_t) {});
    }

    // The same, with prepare(key head) before the block of that head if is_by_heads().
    template <class Prepare>
    void run(Prepare prepare) const {
        Scratch<Tiles> scratch;
        kernel.assign_memory(scratch, scratches + omp_get_thread_num() * scratch_size);
        if (stack_count) run_stacks(scratch);
        if (is_cut(call, count, most_parts)) return run_parts(scratch);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i) {
            prepare(blocks[i].head);
            kernel.run(blocks[i], scratch);
        }
    }

  private:
    static bool is_cut(const AttentionCall &call, int64_t blocks, int64_t most_parts) {
        return call.threads > 1 && blocks < BLOCKS_PER_THREAD * call.threads && most_parts > 1;
    }

    // Find shared prefixes and place the states of their blocks in `memory`; the memory after them is for parts.
    void find_shared(float *memory) {
        for (int64_t i = 0, segment = -1; i < count; ++i) {
            most_parts = larger(most_parts, blocks[i].parts);
            for (const int64_t last = blocks[i].segment - call.segments; segment < last;) first_block[++segment] = i;
        }
        SharedPrefixes(call, members).find();
        for (int64_t i = 0; i < call.segment_count; ++i) {
            if (members[i].shared == 0) continue;
            leaders[stack_count++] = i;
            for (int64_t member = i; member >= 0; member = members[member].next)
                for (int64_t head = 0; head < call.key_heads; ++head) {
                    Block &block = blocks[first_block[member] + head];
                    block.shared = members[i].shared, block.state = memory;
                    memory += kernel.state_size(block.lines);
                }
        }
        parts = memory;
    }

    void run_stacks(Scratch<Tiles> &scratch) const {
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t i = 0; i < stack_count; ++i)
            for (int64_t head = 0; head < call.key_heads; ++head) run_stack(leaders[i], head, scratch);
    }

    void run_stack(int64_t leader, int64_t head, Scratch<Tiles> &scratch) const {
        const Block *members_blocks[MAX_SHARED_LINES];
        int64_t count = 0;
        for (int64_t i = leader; i >= 0; i = members[i].next) members_blocks[count++] = &blocks[first_block[i] + head];
        kernel.run_shared(members_blocks, count, scratch);
    }

    void run_parts(Scratch<Tiles> &scratch) const {
        const auto part_at = [&](int64_t block, int64_t part) {
            return parts + block * most_parts * kernel.part_size(MIN_BLOCK_LINES) +
                   part * kernel.part_size(blocks[block].lines);
        };
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i)
            for (int64_t part = 0; part < most_parts; ++part)
                if (part < blocks[i].parts) kernel.run_part(blocks[i], part, scratch, part_at(i, part));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; ++i) kernel.join(blocks[i], part_at(i, 0), scratch);
    }

    const AttentionCall call;
    const Kernel<Tiles> kernel;
    PrefixMember *members;
    int64_t *first_block, *leaders;
    Block *blocks;
    float *scratches, *parts = nullptr;
    int64_t count, scratch_size, stack_count = 0, most_parts = 0;
};

}  // namespace
