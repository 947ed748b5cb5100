// Attention over cells (work.h), for one instruction set: the compiler's flags say which.
#include "work.h"

namespace {

template <class Element>
int64_t attend(const Call &call) {
    const Memory memory(Work<Element>::size(call));
    if (!memory.start) return NO_MEMORY;
    const Work<Element> work(call, memory.start);
#pragma omp parallel num_threads((int)call.threads)
    work.run();
    return DONE;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_attend(const Call *call) {
    if (!in_pool(*call)) return BAD_CELL;
    if (call->format == INT8) return attend<int8_t>(*call);
    if (call->format == BFLOAT16) return attend<bfloat16>(*call);
    return attend<float>(*call);
}
