// Single rows of quantised matrices as float32, for embeddings: the reference is PackedMatrix.rows (engine/kernels/packing.py).
#pragma once

#include "vector/memory.h"
#include "vector/vector.h"
#include "products/weight_formats.h"

namespace {

// A finite float16 number. 2^112, from its exponent bias to that of float32, is right for subnormal numbers too.
inline float half_number(const uint8_t *stored) {
    const uint16_t half = read<uint16_t>(stored);
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    return (half & 0x8000 ? -read<float>(&bits) : read<float>(&bits)) * 5.192296858534828e33f;
}

// A finite number rounded to bfloat16.
inline float rounded_to_bfloat16(float number) {
    const uint32_t bits = read<uint32_t>(&number), rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return read<float>(&rounded);
}

// One output of a matrix [outputs][columns] in the layout of linear.h.
template <WeightFormat FORMAT>
class PackedRow {
    static constexpr WeightLayout OWN = layout_of(FORMAT);

  public:
    PackedRow(const uint8_t *codes, const uint8_t *scales, int64_t columns, int64_t output)
        : groups(ceil_div(columns, GROUP)),
          codes(codes + output / OUTPUTS * groups * OWN.group_bytes()),
          scales(scales + output / OUTPUTS * OWN.scale_bytes(groups)),
          output(output % OUTPUTS) {}

    // function(column, weight) for columns [0, columns).
    template <class Function>
    void for_each(int64_t columns, Function function) const {
        for (int64_t group = 0; group < groups; ++group) {
            const Scales scales = scales_of(group);
            for (int64_t i = 0; i < lesser(GROUP, columns - group * GROUP); ++i) {
                const float scale = OWN.has_halves() && i >= GROUP / 2 ? scales.second : scales.first;
                const float weight = scale * (float)value(codes + group * OWN.group_bytes(), i);
                function(group * GROUP + i, OWN.has_minimums() ? weight + scales.second : weight);
            }
        }
    }

  private:
    // `second` is a minimum or the scale of the second half.
    struct Scales {
        float first, second;
    };

    int value(const uint8_t *group, int64_t column) const {
        const int64_t word = column / 4, byte = 4 * output + column % 4;
        if constexpr (OWN.bits == 8) return group[64 * word + byte] - OWN.zero;
        constexpr int MORE = OWN.bits - 4, WORDS = MORE ? 8 / MORE : 8;
        int code = group[64 * (word / 2) + byte] >> word % 2 * 4 & 15;
        if constexpr (MORE > 0)
            code |= (group[64 * (4 + word / WORDS) + byte] >> word % WORDS * MORE & ((1 << MORE) - 1)) << 4;
        if constexpr (OWN.lookup != NO_LOOKUP) return LOOKUP_VALUES[OWN.lookup][code] - OWN.zero;
        return code - OWN.zero;
    }

    Scales scales_of(int64_t group) const {
        const uint8_t *const record = scales + group / OWN.record_groups() * OWN.record_bytes();
        if constexpr (OWN.scales == BFLOAT16_SCALES) return {number(read<bfloat16>(record + 2 * output)), 0};
        const float first = half_number(record + 2 * output);
        if constexpr (OWN.scales == FLOAT16_SCALES) return {first, 0};
        if constexpr (OWN.scales == FLOAT16_MINIMUMS) return {first, half_number(record + 2 * (OUTPUTS + output))};
        const uint8_t *const codes = record + (OWN.has_halves() ? 2 : 4) * OUTPUTS + group % SUPERBLOCK * 2 * OUTPUTS + output;
        if constexpr (OWN.has_halves()) return {first * (int8_t)codes[0], first * (int8_t)codes[OUTPUTS]};
        return {first * codes[0], half_number(record + 2 * (OUTPUTS + output)) * codes[OUTPUTS]};
    }

    int64_t groups;
    const uint8_t *codes, *scales;
    int64_t output;
};

}  // namespace
