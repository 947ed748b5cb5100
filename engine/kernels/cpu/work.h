// The attention of one call, shared out among a team of threads.
#pragma once

#include <omp.h>

#include "sharing.h"

namespace {

template <class Tiles>
class Work {
  public:
    // Bytes of memory that a call's work needs.
    static int64_t size(const Call &call) {
        const Kernel<Tiles> kernel(call);
        const int64_t blocks = cut(call, Tiles::BLOCK, nullptr);
        int64_t numbers = call.threads * padded(kernel.desk_size()), most = 0;
        for (int64_t at = 0; at < call.segment_count; ++at) {
            const Segment &segment = call.segments[at];
            most = larger(most, (segment.start + segment.rows - 1) / PART + 1);
            if (Stacks::is_few(call, segment)) numbers += call.key_heads * kernel.state_size(Stacks::lines(call, segment));
        }
        if (is_cut(call, blocks, most)) numbers += blocks * most * kernel.part_size(LEAST_BLOCK);
        const int64_t segments = call.segment_count * (sizeof(Member) + 2 * sizeof(int64_t));
        return numbers * sizeof(float) + blocks * sizeof(Block) + segments + 512;
    }

    // To be made by one thread, in memory that is aligned to 64 bytes.
    Work(const Call &call, char *memory) : call(call), kernel(this->call) {
        Slices slices(memory);
        members = slices.take<Member>(call.segment_count);
        first_block = slices.take<int64_t>(call.segment_count);
        leaders = slices.take<int64_t>(call.segment_count);
        count = cut(call, Tiles::BLOCK, nullptr);
        blocks = slices.take<Block>(count);
        cut(call, Tiles::BLOCK, blocks);
        desk_size = padded(kernel.desk_size());
        desks = slices.take<float>(call.threads * desk_size);
        stack(slices.take<float>(0));
    }

    // Whether each key head is one block of a single segment, with all that sees it.
    bool is_by_heads() const {
        return call.segment_count == 1 && count == call.key_heads && !is_cut(call, count, most_parts);
    }

    // To be run by all threads of a team; all is done behind it.
    void run() const {
        run([](int64_t) {});
    }

    // The same, with prepare(key head) before a block of that, where it is by heads.
    template <class Prepare>
    void run(Prepare prepare) const {
        Desk<Tiles> desk;
        kernel.furnish(desk, desks + omp_get_thread_num() * desk_size);
        if (stacks) run_stacks(desk);
        if (is_cut(call, count, most_parts)) return run_parts(desk);
#pragma omp for schedule(dynamic, 1)
        for (int64_t at = 0; at < count; ++at) {
            prepare(blocks[at].head);
            kernel.run(blocks[at], desk);
        }
    }

  private:
    static bool is_cut(const Call &call, int64_t blocks, int64_t most_parts) {
        return call.threads > 1 && blocks < BLOCKS_A_THREAD * call.threads && most_parts > 1;
    }

    // Find what segments share, and give their blocks states in `memory`; what is left of it is for parts.
    void stack(float *memory) {
        for (int64_t at = 0, segment = -1; at < count; ++at) {
            most_parts = larger(most_parts, blocks[at].parts);
            for (const int64_t own = blocks[at].segment - call.segments; segment < own;) first_block[++segment] = at;
        }
        Stacks(call, members).find();
        for (int64_t at = 0; at < call.segment_count; ++at) {
            if (members[at].shared == 0) continue;
            leaders[stacks++] = at;
            for (int64_t own = at; own >= 0; own = members[own].next)
                for (int64_t head = 0; head < call.key_heads; ++head) {
                    Block &block = blocks[first_block[own] + head];
                    block.shared = members[at].shared, block.state = memory;
                    memory += kernel.state_size(block.lines);
                }
        }
        parts = memory;
    }

    void run_stacks(Desk<Tiles> &desk) const {
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t at = 0; at < stacks; ++at)
            for (int64_t head = 0; head < call.key_heads; ++head) run_stack(leaders[at], head, desk);
    }

    void run_stack(int64_t leader, int64_t head, Desk<Tiles> &desk) const {
        const Block *own[STACK];
        int64_t some = 0;
        for (int64_t at = leader; at >= 0; at = members[at].next) own[some++] = &blocks[first_block[at] + head];
        kernel.run_shared(own, some, desk);
    }

    void run_parts(Desk<Tiles> &desk) const {
        const auto part_at = [&](int64_t block, int64_t part) {
            return parts + block * most_parts * kernel.part_size(LEAST_BLOCK) + part * kernel.part_size(blocks[block].lines);
        };
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t at = 0; at < count; ++at)
            for (int64_t part = 0; part < most_parts; ++part)
                if (part < blocks[at].parts) kernel.run_part(blocks[at], part, desk, part_at(at, part));
#pragma omp for schedule(static)
        for (int64_t at = 0; at < count; ++at) kernel.join(blocks[at], part_at(at, 0), desk);
    }

    const Call call;
    const Kernel<Tiles> kernel;
    Member *members;
    int64_t *first_block, *leaders;
    Block *blocks;
    float *desks, *parts = nullptr;
    int64_t count, desk_size, stacks = 0, most_parts = 0;
};

}  // namespace
