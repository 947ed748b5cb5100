// Random blocks of GGUF files: repacked, unpacked, looked up as embeddings and multiplied, with memory of exactly their size.
// Compiled with sanitizers by sanitizers.py; arguments: number of matrices, seed. Prints the number of matrices of each outcome.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <type_traits>

#include "products/linear.cpp"
#include "products/packed_rows.h"

namespace {

constexpr BlockType TYPES[] = {BLOCK_Q4_0, BLOCK_Q4_1, BLOCK_Q5_0, BLOCK_Q5_1,   BLOCK_Q8_0,   BLOCK_Q3_K,
                               BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_IQ4_NL, BLOCK_IQ4_XS, BLOCK_MXFP4};

struct Free {
    void operator()(void *start) const { free(start); }
};
template <class T>
using Owned = std::unique_ptr<T, Free>;

// The sanitizer reports any byte beyond `bytes`.
template <class T>
Owned<T> exact(int64_t bytes, int64_t alignment) {
    void *start = nullptr;
    if (posix_memalign(&start, (size_t)alignment, (size_t)bytes)) abort();
    return Owned<T>((T *)start);
}

enum FuzzOutcome { SOUND, REFUSED, WRONG, OUTCOMES };

// Products take most of the time: one in a few matrices is multiplied, by more rows than a tile has.
constexpr int64_t MATRICES_PER_PRODUCT = 4, MAX_ROWS = 20;

// Whether the rows of a repacked matrix, as they are looked up for embeddings, are its weights.
bool rows_equal(WeightFormat format, const uint8_t *codes, const uint8_t *scales, const float *weights, int64_t outputs,
                int64_t columns) {
    bool are_equal = true;
    with_format(format, [&](auto constant) {
        for (int64_t output = 0; output < outputs; ++output)
            PackedRow<decltype(constant)::value>(codes, scales, columns, output)
                .for_each(columns, [&](int64_t column, float weight) { are_equal &= weight == weights[output * columns + column]; });
    });
    return are_equal;
}

FuzzOutcome run(std::mt19937_64 &random) {
    const auto draw = [&](int64_t first, int64_t last) { return first + (int64_t)(random() % (uint64_t)(last - first + 1)); };
    const BlockType type = TYPES[random() % (sizeof(TYPES) / sizeof(*TYPES))];
    const BlockLayout blocks = layout_of(type);
    const WeightLayout layout = layout_of(blocks.format);
    const int64_t outputs = draw(1, 70), groups = draw(1, blocks.groups > 1 ? 3 : 12) * blocks.groups, columns = groups * GROUP;
    const int64_t row_bytes = groups / blocks.groups * blocks.bytes, bytes = outputs * row_bytes;
    // A tensor in a file may begin at any byte.
    const int64_t offset = draw(0, 3);
    const Owned<uint8_t> file = exact<uint8_t>(offset + bytes, 64);
    uint8_t *const data = file.get() + offset;
    // All bytes are random, or the scales are finite: a byte in 4 is kept small.
    const int64_t kind = draw(0, 3);
    const uint64_t constant = random();
    for (int64_t i = 0; i < bytes; ++i) data[i] = kind == 0 ? (uint8_t)constant : (uint8_t)random();
    if (kind > 1)
        for (int64_t i = 0; i < bytes; ++i) data[i] &= 0xBB;

    const int64_t packed_blocks = ceil_div(outputs, OUTPUTS);
    const Owned<uint8_t> codes = exact<uint8_t>(packed_blocks * groups * layout.group_bytes(), 64);
    const Owned<uint8_t> scales = exact<uint8_t>(packed_blocks * layout.scale_bytes(groups), 64);
    const BlockCall pack = {data, codes.get(), scales.get(), type, outputs, columns, 1};
    const bool is_finite = cellar_pack_blocks(&pack) == DONE;
    const Owned<float> numbers = exact<float>(outputs * columns * (int64_t)sizeof(float), 8);
    const UnpackCall unpack = {data, numbers.get(), type, outputs, columns, 1};
    cellar_unpack_blocks(&unpack);
    if (!is_finite) return REFUSED;
    // The scales of MXFP4 are powers of two up to 2 ** 127: weights and products may be infinite.
    const auto are_finite = [&](const float *start, int64_t count) {
        return type == BLOCK_MXFP4 || std::all_of(start, start + count, [](float number) { return std::isfinite(number); });
    };
    if (!are_finite(numbers.get(), outputs * columns)) return WRONG;
    if (!rows_equal(blocks.format, codes.get(), scales.get(), numbers.get(), outputs, columns)) return WRONG;
    if (draw(0, MATRICES_PER_PRODUCT - 1)) return SOUND;

    const int64_t rows = draw(1, MAX_ROWS);
    const Owned<float> input = exact<float>(rows * columns * (int64_t)sizeof(float), 8);
    const Owned<float> output = exact<float>(rows * outputs * (int64_t)sizeof(float), 8);
    for (int64_t i = 0; i < rows * columns; ++i) input.get()[i] = (float)draw(-999, 999);
    const QuantisedMatrix matrix = {codes.get(), scales.get(), blocks.format, outputs, output.get()};
    const LinearCall product = {input.get(), FLOAT32, columns, rows, columns, &matrix, 1, 1};
    return cellar_multiply(&product) == DONE && are_finite(output.get(), rows * outputs) ? SOUND : WRONG;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    std::mt19937_64 random((uint64_t)atoll(argv[2]));
    int64_t counts[OUTCOMES] = {};
    for (int64_t i = atoll(argv[1]); i > 0; --i) ++counts[run(random)];
    printf("%ld %ld %ld\n", (long)counts[SOUND], (long)counts[REFUSED], (long)counts[WRONG]);
}
