// Random blocks of GGUF files, repacked and unpacked with memory of exactly their size. Compiled with
// sanitizers by sanitizers.py; arguments: number of matrices, seed. Prints the number of matrices of each outcome.
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <type_traits>

#include "products/block_packing.h"

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
    bool is_finite = true;
    with_type(type, [&](auto constant_type) {
        for (int64_t first = 0; first < outputs; first += OUTPUTS) is_finite &= pack_outputs<decltype(constant_type)::value>(pack, first);
    });

    const Owned<float> numbers = exact<float>(outputs * columns * (int64_t)sizeof(float), 8);
    with_type(type, [&](auto constant_type) {
        for (int64_t row = 0; row < outputs; ++row)
            unpack_row<decltype(constant_type)::value>(data + row * row_bytes, numbers.get() + row * columns, columns);
    });
    if (!is_finite) return REFUSED;
    // The scales of MXFP4 are powers of two up to 2 ** 127: products with them may be infinite.
    for (int64_t i = 0; i < outputs * columns && type != BLOCK_MXFP4; ++i)
        if (!std::isfinite(numbers.get()[i])) return WRONG;

    return SOUND;
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    std::mt19937_64 random((uint64_t)atoll(argv[2]));
    int64_t counts[OUTCOMES] = {};
    for (int64_t i = atoll(argv[1]); i > 0; --i) ++counts[run(random)];
    printf("%ld %ld %ld\n", (long)counts[SOUND], (long)counts[REFUSED], (long)counts[WRONG]);
}
