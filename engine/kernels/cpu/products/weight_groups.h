// Reading groups of quantised weights: the values of their codes, and their scales as float32.
#pragma once

#include "products/dot.h"
#include "products/weight_formats.h"

namespace {

constexpr int GROUP_WORDS = GROUP / 4;

// The values of columns [4 * WORD, 4 * WORD + 4) of a group of 16 outputs, plus the zero.
template <WeightFormat FORMAT, int WORD>
inline __attribute__((always_inline)) Words values_of(const uint8_t *group) {
    constexpr WeightLayout OWN = layout_of(FORMAT);
    if constexpr (OWN.bits == 8) return fetch(group + 64 * WORD);
    const Words stored = fetch(group + 64 * (WORD / 2)), codes = WORD % 2 ? high(stored) : low(stored);
    constexpr int BITS = OWN.bits - 4, WORDS_OF_PLANE = BITS ? 8 / BITS : 8;
    if constexpr (OWN.lookup != NO_LOOKUP) return look_up(LOOKUP_VALUES[OWN.lookup], codes);
    if constexpr (BITS == 0)
        return codes;
    else
        return join<BITS, BITS * (WORD % WORDS_OF_PLANE)>(codes, fetch(group + 64 * (4 + WORD / WORDS_OF_PLANE)));
}

// The scales of a group of a block; `second` are minimums or the scales of the second half.
struct GroupScales {
    Totals first, second;
};

// Reads the scales of a block, group by group in order.
template <WeightFormat FORMAT>
class ScaleReader {
  public:
    explicit ScaleReader(const uint8_t *start) : start(start) {}

    inline __attribute__((always_inline)) GroupScales read(int64_t group) {
        constexpr ScaleKind KIND = OWN.scales;
        if constexpr (OWN.record_groups() > 1) return read_superblock(group);
        const uint8_t *const record = start + group * OWN.record_bytes();
        if constexpr (KIND == BFLOAT16_SCALES) return {bfloat16_scales((const uint16_t *)record), nothing()};
        if constexpr (KIND == FLOAT16_SCALES) return {half_scales(record), nothing()};
        if constexpr (KIND == FLOAT16_MINIMUMS) return {half_scales(record), half_scales(record + 2 * OUTPUTS)};
        const float *const numbers = (const float *)record;
        if constexpr (KIND == UNPACKED_SCALES) return {float_scales(numbers), nothing()};
        return {float_scales(numbers), float_scales(numbers + OUTPUTS)};
    }

  private:
    static constexpr WeightLayout OWN = layout_of(FORMAT);

    inline __attribute__((always_inline)) GroupScales read_superblock(int64_t group) {
        const uint8_t *const record = start + group / SUPERBLOCK * OWN.record_bytes();
        const uint8_t *const bytes = record + (OWN.has_halves() ? 2 : 4) * OUTPUTS + group % SUPERBLOCK * 2 * OUTPUTS;
        if (group % SUPERBLOCK == 0) {
            super_scales = half_scales(record);
            if constexpr (OWN.has_minimums()) super_minimums = half_scales(record + 2 * OUTPUTS);
        }
        if constexpr (OWN.has_halves())
            return {multiply(super_scales, byte_scales((const int8_t *)bytes)),
                    multiply(super_scales, byte_scales((const int8_t *)bytes + OUTPUTS))};
        return {multiply(super_scales, byte_scales(bytes)), multiply(super_minimums, byte_scales(bytes + OUTPUTS))};
    }

    const uint8_t *start;
    Totals super_scales, super_minimums;
};

}  // namespace
