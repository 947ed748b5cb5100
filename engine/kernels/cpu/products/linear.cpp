// Products of rows and quantised matrices (quantised_matrices.h), for one instruction set, chosen by compiler flags.
#include "build/layout.h"
#include "vector/vector.h"
#if !defined(GENERIC)
#include "products/plain_matrices.h"
#endif
#include "products/quantised_matrices.h"
#include "products/block_packing.h"

namespace {

// Units of work of a matrix.
inline int64_t shares(const QuantisedMatrix &matrix) { return ceil_div(matrix.outputs, BLOCKS_AT_ONCE * OUTPUTS); }

// Units of all matrices are numbered together, for an even distribution over threads.
void multiply_one(const LinearCall &product, int64_t share, const QuantisedRows &rows, RowRange range) {
    const QuantisedMatrix *matrix = product.matrices;
    for (; share >= shares(*matrix); ++matrix) share -= shares(*matrix);
    multiply_blocks(*matrix, share * BLOCKS_AT_ONCE, rows, range);
}

template <class Number>
int64_t multiply(const LinearCall &product) {
    const int64_t groups = ceil_div(product.columns, GROUP);
    const Memory memory(QuantisedRows::size(product.rows, groups));
    if (!memory.start) return NO_MEMORY;
    RowSums sums;
    for (int64_t i = 0; i < product.count; ++i) sums.include(product.matrices[i].format);
    const QuantisedRows rows(product.rows, groups, product.format, sums, memory.start);
    const FloatRows<Number> numbers = {(const Number *)product.input, product.stride, product.columns};
    int64_t count = 0;
    for (int64_t i = 0; i < product.count; ++i) count += shares(product.matrices[i]);
#pragma omp parallel num_threads((int)product.threads)
    {
        quantise(numbers, rows);
        for (int64_t first = 0; first < rows.rows; first += rows.step()) {
            const RowRange range = {first, lesser(first + rows.step(), rows.rows)};
#pragma omp for schedule(static) nowait
            for (int64_t share = 0; share < count; ++share) multiply_one(product, share, rows, range);
        }
    }
    return DONE;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_multiply(const LinearCall *product) {
    return product->format == BFLOAT16 ? multiply<bfloat16>(*product) : multiply<float>(*product);
}

extern "C" __attribute__((visibility("default"))) void cellar_multiply_blocks(const void *matrix, int64_t first_block,
                                                                              const void *rows, int64_t first, int64_t last) {
    multiply_blocks(*(const QuantisedMatrix *)matrix, first_block, *(const QuantisedRows *)rows, {first, last});
}

extern "C" __attribute__((visibility("default"))) int64_t cellar_pack_blocks(const BlockCall *call) {
    int64_t infinite = 0;
    with_type((BlockType)call->type, [&](auto type) {
#pragma omp parallel for schedule(static) num_threads((int)call->threads) reduction(+ : infinite)
        for (int64_t first = 0; first < call->outputs; first += OUTPUTS) infinite += !pack_outputs<decltype(type)::value>(*call, first);
    });
    return infinite ? BAD_SCALE : DONE;
}

extern "C" __attribute__((visibility("default"))) int64_t cellar_unpack_blocks(const UnpackCall *call) {
    with_type((BlockType)call->type, [&](auto type) {
        constexpr BlockLayout layout = layout_of(decltype(type)::value);
        const int64_t row_bytes = call->columns / (layout.groups * GROUP) * layout.bytes;
#pragma omp parallel for schedule(static) num_threads((int)call->threads)
        for (int64_t row = 0; row < call->outputs; ++row)
            unpack_row<decltype(type)::value>(call->blocks + row * row_bytes, call->numbers + row * call->columns,
                                              call->columns);
    });
    return DONE;
}

#if !defined(GENERIC)

namespace {

// Outputs of a unit of work.
constexpr int64_t PLAIN_SHARE = 32;

template <class Number>
void multiply_plain(const PlainLinearCall &call) {
    const int64_t shares = ceil_div(call.outputs, PLAIN_SHARE);
#pragma omp parallel for collapse(2) schedule(static) num_threads((int)call.threads)
    for (int64_t i = 0; i < call.batch; ++i)
        for (int64_t share = 0; share < shares; ++share) {
            const int64_t first = share * PLAIN_SHARE, last = lesser(first + PLAIN_SHARE, call.outputs);
            multiply_plain(call.rows + i * call.row_batch_stride, call.count, call.row_stride,
                           (const Number *)call.weights + i * call.weight_batch_stride, call.weight_stride, call.columns, first,
                           last, call.output + i * call.count * call.outputs, call.outputs);
        }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_multiply_plain(const PlainLinearCall *product) {
    product->format == BFLOAT16 ? multiply_plain<bfloat16>(*product) : multiply_plain<float>(*product);
    return DONE;
}

#endif

EXPORT_LAYOUT(
    LAYOUT(QuantisedMatrix, codes, scales, format, outputs, output)
    LAYOUT(LinearCall, input, format, stride, rows, columns, matrices, count, threads)
    LAYOUT(BlockCall, blocks, codes, scales, type, outputs, columns, threads)
    LAYOUT(UnpackCall, blocks, numbers, type, outputs, columns, threads)
    LAYOUT(PlainLinearCall, rows, weights, output, format, batch, count, outputs, columns, row_stride,
           row_batch_stride, weight_stride, weight_batch_stride, threads))
