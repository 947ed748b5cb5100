// Rows times quantised matrices (quantised.h), for one instruction set: the compiler's flags say which.
#include "plain.h"
#include "quantised.h"

namespace {

// So many times blocks are met.
inline int64_t shares(const Matrix &matrix) { return parts(matrix.outputs, BLOCKS_AT_ONCE * OUTPUTS); }

// The shares of all matrices in one count, so that threads get even parts of it.
void multiply_one(const Product &product, int64_t share, const Rows &rows, Some some) {
    const Matrix *matrix = product.matrices;
    for (; share >= shares(*matrix); ++matrix) share -= shares(*matrix);
    const int64_t block = share * BLOCKS_AT_ONCE;
    if (matrix->bits == 8) return multiply_blocks<8>(*matrix, block, rows, some);
    multiply_blocks<4>(*matrix, block, rows, some);
}

template <class Number>
int64_t multiply(const Product &product) {
    const int64_t groups = parts(product.columns, GROUP);
    const Memory memory(Rows::size(product.rows, groups));
    if (!memory.start) return NO_MEMORY;
    const Rows rows(product.rows, groups, product.format, memory.start);
    const Numbers<Number> numbers = {(const Number *)product.input, product.stride, product.columns};
    int64_t count = 0;
    for (int64_t at = 0; at < product.count; ++at) count += shares(product.matrices[at]);
#pragma omp parallel num_threads((int)product.threads)
    {
        quantise(numbers, rows);
        for (int64_t first = 0; first < rows.rows; first += rows.step()) {
            const Some some = {first, lesser(first + rows.step(), rows.rows)};
#pragma omp for schedule(static) nowait
            for (int64_t share = 0; share < count; ++share) multiply_one(product, share, rows, some);
        }
    }
    return DONE;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_multiply(const Product *product) {
    return product->format == BFLOAT16 ? multiply<bfloat16>(*product) : multiply<float>(*product);
}

#if LANES >= 8

namespace {

// Outputs that a thread takes at a time.
constexpr int64_t PLAIN_SHARE = 32;

template <class Number>
void multiply_plain(const PlainProduct &own) {
    const int64_t shares = parts(own.outputs, PLAIN_SHARE);
#pragma omp parallel for collapse(2) schedule(static) num_threads((int)own.threads)
    for (int64_t at = 0; at < own.batch; ++at)
        for (int64_t share = 0; share < shares; ++share) {
            const int64_t first = share * PLAIN_SHARE, last = lesser(first + PLAIN_SHARE, own.outputs);
            multiply_plain(own.rows + at * own.row_batch_stride, own.count, own.row_stride,
                           (const Number *)own.weights + at * own.weight_batch_stride, own.weight_stride, own.columns, first,
                           last, own.output + at * own.count * own.outputs, own.outputs);
        }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_multiply_plain(const PlainProduct *product) {
    product->format == BFLOAT16 ? multiply_plain<bfloat16>(*product) : multiply_plain<float>(*product);
    return DONE;
}

#endif
