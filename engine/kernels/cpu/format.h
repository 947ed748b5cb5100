// What all kernels of this folder call number formats and outcomes; their Python sides know the numbers.
#pragma once

#include <cstdint>

enum Format : int64_t { FLOAT32, BFLOAT16, INT8 };
enum Outcome : int64_t { DONE, NO_MEMORY, BAD_CELL, BAD_TOKEN };
