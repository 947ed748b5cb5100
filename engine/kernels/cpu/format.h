// Number formats and results of all kernels; engine/kernels/cpu/*.py have the same numbers.
#pragma once

#include <cstdint>

enum Format : int64_t { FLOAT32, BFLOAT16, INT8 };
enum Outcome : int64_t { DONE, NO_MEMORY, BAD_CELL, BAD_TOKEN };
