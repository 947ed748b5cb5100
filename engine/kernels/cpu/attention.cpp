// Attention over cells (blocks.h), for one instruction set: the compiler's flags say which.
#include <omp.h>

#include "blocks.h"

namespace {

template <class Element>
int64_t attend(const Call &call) {
    const Kernel<Element> kernel(call);
    const int64_t count = cut(call, nullptr);
    const Memory list(count * sizeof(Block)), desks(call.threads * kernel.desk_size() * sizeof(float));
    if (!list.start || !desks.start) return NO_MEMORY;
    Block *blocks = (Block *)list.start;
    cut(call, blocks);
    int64_t most = 0;
    for (int64_t at = 0; at < count; ++at) most = larger(most, blocks[at].parts);
    const bool apart = call.threads > 1 && count < BLOCKS_A_THREAD * call.threads && most > 1;
    const Memory parts(apart ? count * most * kernel.part_size(BLOCK) * sizeof(float) : 0);
    if (!parts.start) return NO_MEMORY;
    const auto part_at = [&](int64_t block, int64_t part) {
        return (float *)parts.start + block * most * kernel.part_size(BLOCK) + part * kernel.part_size(blocks[block].lines);
    };
#pragma omp parallel num_threads((int)call.threads)
    {
        Desk desk;
        kernel.furnish(desk, (float *)desks.start + omp_get_thread_num() * kernel.desk_size());
        if (apart) {
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (int64_t at = 0; at < count; ++at)
                for (int64_t part = 0; part < most; ++part)
                    if (part < blocks[at].parts) kernel.run_part(blocks[at], part, desk, part_at(at, part));
#pragma omp for schedule(static)
            for (int64_t at = 0; at < count; ++at) kernel.join(blocks[at], part_at(at, 0), desk);
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t at = 0; at < count; ++at) kernel.run(blocks[at], desk);
        }
    }
    return DONE;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_attend(const Call *call) {
    if (!in_pool(*call)) return BAD_CELL;
    if (call->format == INT8) return attend<int8_t>(*call);
    if (call->format == BFLOAT16) return attend<bfloat16>(*call);
    return attend<float>(*call);
}
