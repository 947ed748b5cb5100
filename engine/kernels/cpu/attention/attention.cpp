// Attention over KV cells (attention_work.h), for one instruction set, chosen by compiler flags.
#include "attention/attention_work.h"
#include "build/layout.h"

namespace {

template <class Tiles>
int64_t attend(const AttentionCall &call) {
    const Memory memory(AttentionWork<Tiles>::size(call));
    if (!memory.start) return NO_MEMORY;
    const AttentionWork<Tiles> work(call, memory.start);
#pragma omp parallel num_threads((int)call.threads)
    work.run();
    return DONE;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_attend(const AttentionCall *call) {
    if (!in_pool(*call)) return BAD_CELL;
    if (call->format == INT8) return attend<FloatTiles<int8_t>>(*call);
    if (call->format == FLOAT32) return attend<FloatTiles<float>>(*call);
    return call->rounds_to_bfloat16 ? attend<RoundedTiles>(*call) : attend<FloatTiles<bfloat16>>(*call);
}

EXPORT_LAYOUT(
    LAYOUT(Segment, row, rows, start, first, first_cell, cells)
    LAYOUT(KVBuffer, data, scales, width, head_stride, cell_stride, scale_head_stride, scale_cell_stride, part_width)
    LAYOUT(AttentionCall, query, query_head_stride, query_row_stride, output, sinks, segments, segment_count, heads,
           key_heads, cells, keys, values, format, attention_range, attention_range_size, scale, softcap,
           rounds_to_bfloat16, threads))
