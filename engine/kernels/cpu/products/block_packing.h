// Quantised weights of GGUF files, repacked without loss to the layout of linear.h, or as float32 numbers. The same bits as
// engine/kernels/blocks.py, which describes the types, with packing.py and row_major.py.
#pragma once

#include <cstring>

#include "vector/memory.h"
#include "products/weight_formats.h"

namespace {

// Types of GGUF files, by their numbers.
enum BlockType : int64_t {
    BLOCK_Q4_0 = 2,
    BLOCK_Q4_1 = 3,
    BLOCK_Q5_0 = 6,
    BLOCK_Q5_1 = 7,
    BLOCK_Q8_0 = 8,
    BLOCK_Q3_K = 11,
    BLOCK_Q4_K = 12,
    BLOCK_Q5_K = 13,
    BLOCK_Q6_K = 14,
    BLOCK_IQ4_NL = 20,
    BLOCK_IQ4_XS = 23,
    BLOCK_MXFP4 = 39,
};

struct BlockLayout {
    WeightFormat format;
    int64_t bytes, groups;  // of a block
};

constexpr BlockLayout layout_of(BlockType type) {
    switch (type) {
        case BLOCK_Q4_0: return {WEIGHTS_Q4_0, 18, 1};
        case BLOCK_Q4_1: return {WEIGHTS_Q4_1, 20, 1};
        case BLOCK_Q5_0: return {WEIGHTS_Q5_0, 22, 1};
        case BLOCK_Q5_1: return {WEIGHTS_Q5_1, 24, 1};
        case BLOCK_Q8_0: return {WEIGHTS_Q8_0, 34, 1};
        case BLOCK_Q3_K: return {WEIGHTS_Q6_K, 110, SUPERBLOCK};
        case BLOCK_Q4_K: return {WEIGHTS_Q4_K, 144, SUPERBLOCK};
        case BLOCK_Q5_K: return {WEIGHTS_Q5_K, 176, SUPERBLOCK};
        case BLOCK_Q6_K: return {WEIGHTS_Q6_K, 210, SUPERBLOCK};
        case BLOCK_IQ4_NL: return {WEIGHTS_IQ4_NL, 18, 1};
        case BLOCK_IQ4_XS: return {WEIGHTS_IQ4_XS, 136, SUPERBLOCK};
        case BLOCK_MXFP4: return {WEIGHTS_MXFP4, 17, 1};
        default: return {};
    }
}

// Calls a function with the type as a compile-time constant.
template <class Function>
inline void with_type(BlockType type, Function &&function) {
#define WITH(TYPE) \
    case TYPE: return function(std::integral_constant<BlockType, TYPE>());
    switch (type) {
        WITH(BLOCK_Q4_0)
        WITH(BLOCK_Q4_1)
        WITH(BLOCK_Q5_0)
        WITH(BLOCK_Q5_1)
        WITH(BLOCK_Q8_0)
        WITH(BLOCK_Q3_K)
        WITH(BLOCK_Q4_K)
        WITH(BLOCK_Q5_K)
        WITH(BLOCK_Q6_K)
        WITH(BLOCK_IQ4_NL)
        WITH(BLOCK_IQ4_XS)
        WITH(BLOCK_MXFP4)
        default: return;
    }
#undef WITH
}

// The codes of 16 outputs for a group, four columns in a word.
struct GroupCodes {
    uint32_t words[8][OUTPUTS];

    void set(int64_t output, const uint8_t *codes) {
        for (int word = 0; word < 8; ++word) std::memcpy(&words[word][output], codes + 4 * word, 4);
    }
};

// Store the codes of a group in the order of linear.h.
template <int bits>
inline void store_codes(const GroupCodes &codes, uint8_t *packed) {
    constexpr uint32_t LOW = 0x0F0F0F0F;
    uint32_t words[bits][OUTPUTS];
    for (int64_t output = 0; output < OUTPUTS; ++output) {
        const auto &source = codes.words;
        if constexpr (bits == 8) {
            for (int word = 0; word < 8; ++word) words[word][output] = source[word][output];
            continue;
        }
        for (int word = 0; word < 4; ++word)
            words[word][output] = (source[2 * word][output] & LOW) | (source[2 * word + 1][output] & LOW) << 4;
        for (int word = 4; word < bits; ++word) words[word][output] = 0;
        // A last word has the high bits of 4 or 8 words.
        constexpr int high = bits - 4, sharing = high ? 8 / high : 8;
        for (int word = 0; word < 8 && high; ++word)
            words[4 + word / sharing][output] |= (source[word][output] >> 4 & LOW) << word % sharing * high;
    }
    std::memcpy(packed, words, sizeof(words));
}

inline uint16_t half_at(const uint8_t *bytes) { return (uint16_t)(bytes[0] | bytes[1] << 8); }

// The low halves of 16 bytes, then their high halves.
inline void split_halves(const uint8_t *bytes, uint8_t *codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = bytes[i] & 15;
        codes[16 + i] = bytes[i] >> 4;
    }
}

// The codes of a group of a block: 32 columns.
template <BlockType type>
inline void unpack_codes(const uint8_t *block, int64_t group, uint8_t *codes) {
    constexpr BlockLayout layout = layout_of(type);
    const int shift = (int)(group % 2) * 4;
    if constexpr (type == BLOCK_Q8_0) {
        for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 128;
    } else if constexpr (type == BLOCK_Q4_K || type == BLOCK_Q5_K) {
        const uint8_t *low = block + layout.bytes - 128 + group / 2 * 32;
        for (int i = 0; i < 32; ++i) codes[i] = low[i] >> shift & 15;
        if constexpr (type == BLOCK_Q5_K)
            for (int i = 0; i < 32; ++i) codes[i] |= (block[16 + i] >> group & 1) << 4;
    } else if constexpr (type == BLOCK_Q6_K) {
        // Halves of 128 columns: low halves of columns [0, 64), high halves of [64, 128), two bits of 32 columns each.
        const uint8_t *low = block + group / 4 * 64 + group % 2 * 32, *high = block + 128 + group / 4 * 32;
        const int low_shift = (int)(group % 4 / 2) * 4, high_shift = (int)(group % 4) * 2;
        for (int i = 0; i < 32; ++i) codes[i] = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
    } else if constexpr (type == BLOCK_Q3_K) {
        const uint8_t *low = block + 32 + group / 4 * 32;
        const int low_shift = (int)(group % 4) * 2;
        for (int i = 0; i < 32; ++i) codes[i] = (low[i] >> low_shift & 3) + 4 * (block[i] >> group & 1) + 28;
    } else if constexpr (type == BLOCK_IQ4_XS) {
        split_halves(block + 8 + group * 16, codes);
    } else {
        split_halves(block + layout.bytes - 16, codes);
        if constexpr (type == BLOCK_Q5_0 || type == BLOCK_Q5_1) {
            uint32_t high;
            std::memcpy(&high, block + (type == BLOCK_Q5_1 ? 4 : 2), 4);
            for (int i = 0; i < 32; ++i) codes[i] |= (high >> i & 1) << 4;
        }
    }
}

// The scale and the minimum of a group in the 12 bytes of Q4_K and Q5_K: 6 bits each.
inline uint8_t k_scale(const uint8_t *packed, int64_t group) {
    return group < 4 ? packed[group] & 63 : (packed[4 + group] & 15) | packed[group - 4] >> 6 << 4;
}
inline uint8_t k_minimum(const uint8_t *packed, int64_t group) {
    return group < 4 ? packed[4 + group] & 63 : packed[4 + group] >> 4 | packed[group] >> 6 << 4;
}

// The scale of a half group of Q3_K: 6 bits.
inline int8_t q3_scale(const uint8_t *packed, int64_t half) {
    const int low = packed[half % 8] >> half / 8 * 4 & 15, high = packed[8 + half % 4] >> half / 4 * 2 & 3;
    return (int8_t)((low | high << 4) - 32);
}

inline int8_t iq4_scale(const uint8_t *block, int64_t group) {
    const int low = block[4 + group / 2] >> group % 2 * 4 & 15, high = block[2 + group / 4] >> group % 4 * 2 & 3;
    return (int8_t)((low | high << 4) - 32);
}

// 2 ** (exponent - 128) in bfloat16; the smallest two are subnormal.
inline uint16_t power_of_two(uint8_t exponent) {
    return (uint16_t)(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7);
}

// Store the scales of a block of a row in a record of 16 outputs; false: one is infinite or no number.
template <BlockType type>
inline bool store_scales(const uint8_t *block, int64_t output, uint8_t *record) {
    const auto is_finite = [](uint16_t half) { return (half & 0x7C00) != 0x7C00; };
    uint16_t *halves = (uint16_t *)record + output;
    if constexpr (type == BLOCK_MXFP4) {
        halves[0] = power_of_two(block[0]);
        return true;
    }
    constexpr bool has_super_minimums = type == BLOCK_Q4_K || type == BLOCK_Q5_K;
    constexpr bool has_minimums = type == BLOCK_Q4_1 || type == BLOCK_Q5_1;
    constexpr int64_t scale_at = type == BLOCK_Q3_K ? 108 : type == BLOCK_Q6_K ? 208 : 0;
    halves[0] = half_at(block + scale_at);
    bool finite = is_finite(halves[0]);
    if constexpr (has_minimums || has_super_minimums) {
        // The super-minimums of files are subtracted.
        halves[OUTPUTS] = half_at(block + 2) ^ (has_super_minimums ? 0x8000 : 0);
        finite = finite && is_finite(halves[OUTPUTS]);
    }
    uint8_t *scales = record + (has_super_minimums ? 4 : 2) * OUTPUTS + output;
    for (int64_t i = 0; i < 2 * SUPERBLOCK && layout_of(type).groups > 1; ++i) {
        uint8_t &scale = scales[i * OUTPUTS];
        if constexpr (has_super_minimums) scale = i % 2 ? k_minimum(block + 4, i / 2) : k_scale(block + 4, i / 2);
        if constexpr (type == BLOCK_Q6_K) scale = block[192 + i];
        if constexpr (type == BLOCK_Q3_K) scale = (uint8_t)q3_scale(block + 96, i);
        if constexpr (type == BLOCK_IQ4_XS) scale = (uint8_t)iq4_scale(block, i / 2);
    }
    return finite;
}

// Repack 16 outputs, or fewer at the end, which are padded with weights of 0; false: a scale is infinite or no number.
template <BlockType type>
bool pack_outputs(const BlockCall &call, int64_t first) {
    constexpr BlockLayout blocks = layout_of(type);
    constexpr WeightLayout layout = layout_of(blocks.format);
    const int64_t groups = call.columns / GROUP, present = lesser(call.outputs - first, OUTPUTS);
    const int64_t row_bytes = groups / blocks.groups * blocks.bytes, records = groups / layout.record_groups();
    uint8_t *codes = call.codes + first / OUTPUTS * groups * layout.group_bytes();
    uint8_t *scales = call.scales + first / OUTPUTS * records * layout.record_bytes();
    if (present < OUTPUTS) std::memset(scales, 0, records * layout.record_bytes());
    GroupCodes unpacked;
    uint8_t unpacked_codes[GROUP];
    std::memset(&unpacked, layout.zero, sizeof(unpacked));
    bool finite = true;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t block = group / blocks.groups, inside = group % blocks.groups;
        for (int64_t output = 0; output < present; ++output) {
            const uint8_t *from = call.blocks + (first + output) * row_bytes + block * blocks.bytes;
            unpack_codes<type>(from, inside, unpacked_codes);
            unpacked.set(output, unpacked_codes);
            if (!inside) finite &= store_scales<type>(from, output, scales + block * layout.record_bytes());
        }
        store_codes<layout.bits>(unpacked, codes + group * layout.group_bytes());
    }
    return finite;
}

inline float float_of(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
}

// A float16 number.
inline float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (!exponent) return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    return float_of(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

// The scale and the minimum of a half group of the first output of a record.
template <WeightFormat format>
inline void read_scale(const uint8_t *record, int64_t half, float &scale, float &minimum) {
    constexpr ScaleKind kind = layout_of(format).scales;
    const uint16_t *halves = (const uint16_t *)record;
    scale = kind == BFLOAT16_SCALES ? float_of((uint32_t)halves[0] << 16) : float_of_half(halves[0]);
    minimum = layout_of(format).has_minimums() ? float_of_half(halves[OUTPUTS]) : 0;
    if constexpr (kind == SUPERBLOCK_MINIMUMS) {
        const uint8_t *half_scales = record + 4 * OUTPUTS + half / 2 * 2 * OUTPUTS;
        scale *= half_scales[0], minimum *= half_scales[OUTPUTS];
    }
    if constexpr (kind == SUPERBLOCK_HALVES) scale *= (int8_t)record[2 * OUTPUTS + half * OUTPUTS];
}

// The weights of a row of blocks. Only adding a minimum rounds.
template <BlockType type>
void unpack_row(const uint8_t *blocks, float *numbers, int64_t columns) {
    constexpr BlockLayout layout = layout_of(type);
    constexpr WeightLayout weights = layout_of(layout.format);
    uint8_t record[weights.record_bytes()], codes[GROUP];
    for (int64_t first = 0; first < columns; first += layout.groups * GROUP, blocks += layout.bytes) {
        store_scales<type>(blocks, 0, record);
        for (int64_t half = 0; half < 2 * layout.groups; ++half) {
            if (half % 2 == 0) unpack_codes<type>(blocks, half / 2, codes);
            float scale, minimum, *to = numbers + first + half * (GROUP / 2);
            read_scale<layout.format>(record, half, scale, minimum);
            for (int i = 0; i < GROUP / 2; ++i) {
                const uint8_t code = codes[half % 2 * (GROUP / 2) + i];
                const int value = weights.lookup ? LOOKUP_VALUES[weights.lookup][code & 15] - 128 : code - weights.zero;
                to[i] = scale * (float)value;
                if constexpr (weights.has_minimums()) to[i] += minimum;
            }
        }
    }
}

}  // namespace
