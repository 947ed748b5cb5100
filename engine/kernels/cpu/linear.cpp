// Rows times quantised matrices (quantised.h), for one instruction set: the compiler's flags say which.
#include "quantised.h"

namespace {

// The blocks of all matrices in one count, so that threads share them evenly.
template <class Number>
void multiply_one(const Product &product, int64_t block, const Rows &rows) {
    const Matrix *matrix = product.matrices;
    for (; block >= parts(matrix->outputs, OUTPUTS); ++matrix) block -= parts(matrix->outputs, OUTPUTS);
    if (matrix->bits == 8) return multiply_block<Number, 8>(*matrix, block, rows);
    multiply_block<Number, 4>(*matrix, block, rows);
}

template <class Number>
int64_t multiply(const Product &product) {
    const int64_t groups = parts(product.columns, GROUP);
    const Memory memory(Rows::size(product.rows, groups));
    if (!memory.start) return NO_MEMORY;
    const Rows rows(product.rows, groups, memory.start);
    int64_t blocks = 0;
    for (int64_t at = 0; at < product.count; ++at) blocks += parts(product.matrices[at].outputs, OUTPUTS);
#pragma omp parallel num_threads((int)product.threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < product.rows; ++row) quantise_row<Number>(product, row, rows);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) multiply_one<Number>(product, block, rows);
    }
    return DONE;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_multiply(const Product *product) {
    return product->format == BFLOAT16 ? multiply<bfloat16>(*product) : multiply<float>(*product);
}
