// Blocks of a quantised matrix unpacked for many rows: a byte for each value and float32 scales. Each tile of rows reads them
// again, so they are unpacked once; only where a tile multiplies several blocks and bytes are multiplied as fast as codes of
// fewer bits (measured with AVX2: no faster).
#pragma once

#include "vector/memory.h"
#include "products/weight_groups.h"

namespace {

// The format of unpacked blocks.
constexpr WeightFormat unpacked_format(WeightFormat format) {
    const WeightLayout layout = layout_of(format);
    return layout.has_minimums() ? UNPACKED_MINIMUMS : layout.has_halves() ? UNPACKED_HALVES : UNPACKED_GROUPS;
}

// Tiles of rows from which on unpacking takes less time (measured: with 2 tiles 10 to 20 % more, with 32 rows 12 % less; with
// 8 bits 8 % more for any number).
constexpr int64_t min_unpacked_tiles(WeightFormat format) {
    if (BLOCKS_AT_ONCE == 1 || format == WEIGHTS_INT8) return INT64_MAX;
    return format == WEIGHTS_INT4 ? 4 : 3;
}

// Whether a tile multiplies several blocks that are not unpacked. The others multiply one.
constexpr bool has_tiles_of_blocks(WeightFormat format) { return format == WEIGHTS_INT8 || format == WEIGHTS_INT4; }

// Memory of a thread for unpacked blocks.
class UnpackedMemory {
  public:
    ~UnpackedMemory() { free(start); }

    // At least this many bytes, aligned to 64; null if the allocation fails.
    uint8_t *reserve(int64_t bytes) {
        if (bytes > size) {
            free(start);
            start = (uint8_t *)aligned_alloc(64, (bytes + 63) / 64 * 64);
            size = start ? bytes : 0;
        }
        return start;
    }

  private:
    uint8_t *start = nullptr;
    int64_t size = 0;
};

template <WeightFormat FORMAT, std::size_t... WORD>
inline void unpack_codes(const uint8_t *group, uint8_t *to, std::index_sequence<WORD...>) {
    constexpr int MORE = layout_of(unpacked_format(FORMAT)).zero - layout_of(FORMAT).zero;
    const auto shifted = [](const Words &words) {
        if constexpr (MORE == 0)
            return words;
        else
            return plus(words, MORE);
    };
    (write(to + 64 * WORD, shifted(values_of<FORMAT, WORD>(group))), ...);
}

// Unpack a block.
template <WeightFormat FORMAT>
void unpack_block(const uint8_t *codes, const uint8_t *scales, int64_t groups, uint8_t *codes_to, uint8_t *scales_to) {
    constexpr WeightLayout OWN = layout_of(FORMAT), UNPACKED = layout_of(unpacked_format(FORMAT));
    ScaleReader<FORMAT> reader(scales);
    for (int64_t group = 0; group < groups; ++group) {
        unpack_codes<FORMAT>(codes + group * OWN.group_bytes(), codes_to + group * UNPACKED.group_bytes(),
                             std::make_index_sequence<GROUP_WORDS>());
        const GroupScales read = reader.read(group);
        float *const numbers = (float *)(scales_to + group * UNPACKED.record_bytes());
        write(numbers, read.first);
        if constexpr (OWN.has_minimums() || OWN.has_halves()) write(numbers + OUTPUTS, read.second);
    }
}

}  // namespace
