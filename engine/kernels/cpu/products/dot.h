// The arithmetic of the linear kernel, for one instruction set: integer sums of 16 outputs over a group of columns.
//
//     Words  64 bytes of codes: 4 columns of 16 outputs
//     Sums   integer sums of 16 outputs
//     Totals float32 totals of 16 outputs
//
// A word is multiplied in PARTS, one after the other. `widen` follows every `dot`: products may be added in fewer than 32 bits
// while they fit.
//
// Values are unsigned with a zero, so a sum of value * number is too large by the zero times the sum of the numbers: `begin`
// returns initial sums that correct for it, from those for a zero of 128. All sums of a group are exact.
//
// Up to ROWS_ALONE rows are multiplied by one block of outputs at a time. More rows are computed in tiles of up to
// ROWS_PER_TILE rows and BLOCKS_AT_ONCE blocks, as many as there are registers for sums and totals (measured: no other
// numbers are faster). Without vectors one row: a batch takes a fifth more time, compilation a fifth of it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// From a zero of 128 to another power of two.
constexpr int shift_to(int zero) { return zero >= 128 ? 0 : 1 + shift_to(2 * zero); }

inline int32_t word(const int8_t *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

#if defined(__AVX512VNNI__)

constexpr int ROWS_ALONE = 8, ROWS_PER_TILE = 6, BLOCKS_AT_ONCE = 2;

typedef __m512i Words;
typedef __m512i Sums;
typedef __m512 Totals;

inline Totals nothing() { return _mm512_setzero_ps(); }
template <int BITS, int ZERO>
inline Sums begin(const int32_t &start) {
    if constexpr (ZERO == 0) return _mm512_setzero_si512();
    const Sums all = _mm512_set1_epi32(start);
    if constexpr (ZERO == 128) return all;
    return _mm512_srai_epi32(all, shift_to(ZERO));
}

inline Words fetch(const uint8_t *codes) { return _mm512_load_si512(codes); }
inline Words low(Words both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
inline Words high(Words both) { return low(_mm512_srli_epi16(both, 4)); }
inline void write(uint8_t *to, Words words) { _mm512_store_si512(to, words); }
inline Words plus(Words words, int number) { return _mm512_add_epi8(words, _mm512_set1_epi8((char)number)); }
inline Words look_up(const uint8_t *values, Words codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)values)), codes);
}
// Bits [SHIFT, SHIFT + BITS) of each byte of `from` as the bits of `words` from 4 on.
template <int BITS, int SHIFT>
inline Words join(Words words, Words from) {
    __m512i shifted = from;
    if constexpr (SHIFT < 4) shifted = _mm512_slli_epi16(from, 4 - SHIFT);
    if constexpr (SHIFT > 4) shifted = _mm512_srli_epi16(from, SHIFT - 4);
    const __m512i mask = _mm512_set1_epi8((char)(BITS == 1 ? 0x10 : 0x30));
    return _mm512_ternarylogic_epi32(shifted, mask, words, 0xEA);  // (shifted & mask) | words
}

// Inline assembly, because GCC 12 copies registers around the intrinsic (measured: half the speed).
template <int BITS, int PART>
inline __attribute__((always_inline)) Sums dot(Sums sums, Words words, const int8_t *numbers, int offset) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(words), "m"(*(const int32_t(*)[1])(numbers + 4 * offset)));
    return sums;
}

inline Totals bfloat16_scales(const uint16_t *scales) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)scales)), 16));
}
inline Totals add(Totals totals, Sums sums, Totals scales, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(scales, _mm512_set1_ps(scale)), totals);
}
inline Totals add(Totals totals, Totals sums, float scale) { return _mm512_fmadd_ps(sums, _mm512_set1_ps(scale), totals); }
inline Totals add(Totals totals, Sums sums, Totals scales) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), scales, totals);
}
inline Totals multiply(Sums sums, Totals scales) { return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales); }
inline Totals multiply(Totals a, Totals b) { return _mm512_mul_ps(a, b); }
inline void write(float *to, Totals totals) { _mm512_storeu_ps(to, totals); }
inline Totals float_scales(const float *scales) { return _mm512_load_ps(scales); }
inline Totals half_scales(const uint8_t *scales) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
}
inline Totals byte_scales(const uint8_t *scales) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)scales)));
}
inline Totals byte_scales(const int8_t *scales) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)scales)));
}

#elif defined(__AVX2__)

constexpr int ROWS_ALONE = 4, ROWS_PER_TILE = 4, BLOCKS_AT_ONCE = 1;

struct Words { __m256i half[2]; };
#if defined(__AVXVNNI__)
struct Sums { __m256i half[2]; };
#else
// `pairs` are int16 sums that are not yet in `half`.
struct Sums { __m256i half[2], pairs[2]; };
#endif
struct Totals { __m256 half[2]; };

template <class Both, class Make>
inline Both both(Make make) { return {{make(0), make(1)}}; }

inline Totals nothing() { return both<Totals>([](int) { return _mm256_setzero_ps(); }); }

#if defined(__AVXVNNI__)

template <int BITS, int ZERO>
inline Sums begin(int32_t start) {
    __m256i all = _mm256_setzero_si256();
    if constexpr (ZERO > 0) all = _mm256_set1_epi32(start >> shift_to(ZERO));
    return {{all, all}};
}

template <int BITS>
constexpr int PARTS = 1;

template <int BITS, int PART>
inline __attribute__((always_inline)) Sums dot(const Sums &sums, const Words &words, const int8_t *numbers, int offset) {
    const __m256i spread = _mm256_set1_epi32(word(numbers + 4 * offset));
    Sums next = sums;
    for (int i = 0; i < 2; ++i) asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(next.half[i]) : "x"(words.half[i]), "x"(spread));
    return next;
}

template <int BITS, int PART, int WORD, bool IS_LAST>
inline void widen(Sums &) {}

#else

// 8-bit values are multiplied as signed numbers: the int16 result of the instruction could not hold 255 * 127 * 2.
template <int BITS, int ZERO>
inline Sums begin(int32_t start) {
    __m256i all = _mm256_setzero_si256();
    if constexpr (BITS < 8 && ZERO > 0) all = _mm256_set1_epi32(start >> shift_to(ZERO));
    return {{all, all}, {_mm256_setzero_si256(), _mm256_setzero_si256()}};
}

template <int BITS>
inline __m256i products(__m256i codes, __m256i numbers) {
    if constexpr (BITS < 8) return _mm256_maddubs_epi16(codes, numbers);
    const __m256i signed_codes = _mm256_xor_si256(codes, _mm256_set1_epi8((char)128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(signed_codes), _mm256_sign_epi8(numbers, signed_codes));
}

// With 8 bits there are registers for one half of the words at a time.
template <int BITS>
constexpr int PARTS = BITS == 8 ? 2 : 1;

template <int BITS, int PART>
inline __attribute__((always_inline)) Sums dot(const Sums &sums, const Words &words, const int8_t *numbers, int offset) {
    const __m256i spread = _mm256_set1_epi32(word(numbers + 4 * offset));
    Sums next = sums;
    for (int i = PART; i < 2; i += PARTS<BITS>) {
        next.pairs[i] = _mm256_add_epi16(sums.pairs[i], products<BITS>(words.half[i], spread));
        // GCC would keep all products of a group in memory, to add them as a tree.
        asm("" : "+x"(next.pairs[i]));
    }
    return next;
}

// Words whose products int16 can hold: 2 * 127 times the largest value for each.
template <int BITS>
constexpr int WORDS_OF_PAIRS = 32767 / (254 * (BITS == 8 ? 128 : (1 << BITS) - 1));

template <int BITS, int PART, int WORD, bool IS_LAST>
inline __attribute__((always_inline)) void widen(Sums &sums) {
    if ((WORD + 1) % WORDS_OF_PAIRS<BITS> && !IS_LAST) return;
    for (int i = PART; i < 2; i += PARTS<BITS>) {
        sums.half[i] = _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(sums.pairs[i], _mm256_set1_epi16(1)));
        asm("" : "+x"(sums.half[i]));
        sums.pairs[i] = _mm256_setzero_si256();
    }
}

#endif

inline Words fetch(const uint8_t *codes) {
    return both<Words>([&](int i) { return _mm256_load_si256((const __m256i *)codes + i); });
}
inline Words low(const Words &words) {
    return both<Words>([&](int i) { return _mm256_and_si256(words.half[i], _mm256_set1_epi8(15)); });
}
inline Words high(const Words &words) {
    return low(both<Words>([&](int i) { return _mm256_srli_epi16(words.half[i], 4); }));
}
inline void write(uint8_t *to, const Words &words) {
    for (int i = 0; i < 2; ++i) _mm256_store_si256((__m256i *)to + i, words.half[i]);
}
inline Words plus(const Words &words, int number) {
    return both<Words>([&](int i) { return _mm256_add_epi8(words.half[i], _mm256_set1_epi8((char)number)); });
}
inline Words look_up(const uint8_t *values, const Words &codes) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)values));
    return both<Words>([&](int i) { return _mm256_shuffle_epi8(all, codes.half[i]); });
}
// Bits [SHIFT, SHIFT + BITS) of each byte of `from` as the bits of `words` from 4 on.
template <int BITS, int SHIFT>
inline Words join(const Words &words, const Words &from) {
    const __m256i mask = _mm256_set1_epi8(BITS == 1 ? 0x10 : 0x30);
    return both<Words>([&](int i) {
        __m256i shifted = from.half[i];
        if constexpr (SHIFT < 4) shifted = _mm256_slli_epi16(shifted, 4 - SHIFT);
        if constexpr (SHIFT > 4) shifted = _mm256_srli_epi16(shifted, SHIFT - 4);
        return _mm256_or_si256(words.half[i], _mm256_and_si256(shifted, mask));
    });
}

inline Totals bfloat16_scales(const uint16_t *scales) {
    return both<Totals>([&](int i) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i *)scales + i));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    });
}
inline Totals add(const Totals &totals, const Sums &sums, const Totals &scales, float scale) {
    return both<Totals>([&](int i) {
        const __m256 weight = _mm256_mul_ps(scales.half[i], _mm256_set1_ps(scale));
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums.half[i]), weight, totals.half[i]);
    });
}
inline Totals add(const Totals &totals, const Totals &sums, float scale) {
    return both<Totals>([&](int i) { return _mm256_fmadd_ps(sums.half[i], _mm256_set1_ps(scale), totals.half[i]); });
}
inline Totals add(const Totals &totals, const Sums &sums, const Totals &scales) {
    return both<Totals>([&](int i) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums.half[i]), scales.half[i], totals.half[i]);
    });
}
inline Totals multiply(const Sums &sums, const Totals &scales) {
    return both<Totals>([&](int i) { return _mm256_mul_ps(_mm256_cvtepi32_ps(sums.half[i]), scales.half[i]); });
}
inline Totals multiply(const Totals &a, const Totals &b) {
    return both<Totals>([&](int i) { return _mm256_mul_ps(a.half[i], b.half[i]); });
}
inline void write(float *to, const Totals &totals) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_ps(to + 8 * i, totals.half[i]);
}
inline Totals float_scales(const float *scales) {
    return both<Totals>([&](int i) { return _mm256_load_ps(scales + 8 * i); });
}
inline Totals half_scales(const uint8_t *scales) {
    return both<Totals>([&](int i) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales + i)); });
}
inline Totals byte_scales(const uint8_t *scales) {
    return both<Totals>([&](int i) {
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(scales + 8 * i))));
    });
}
inline Totals byte_scales(const int8_t *scales) {
    return both<Totals>([&](int i) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(scales + 8 * i))));
    });
}

#elif defined(__aarch64__)

constexpr int ROWS_ALONE = 6, ROWS_PER_TILE = 6, BLOCKS_AT_ONCE = 1;

struct Words { uint8x16_t quarter[4]; };
struct Sums { int32x4_t quarter[4]; };
struct Totals { float32x4_t quarter[4]; };

template <class All, class Make>
inline __attribute__((always_inline)) All all(Make make) {
    return {{make(0), make(1), make(2), make(3)}};
}

inline Totals nothing() { return all<Totals>([](int) { return vdupq_n_f32(0); }); }

// Without the instruction for unsigned values, those of 8 bits are multiplied as signed numbers.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_UNSIGNED = true;
#else
constexpr bool HAS_UNSIGNED = false;
#endif
template <int BITS, int ZERO>
inline Sums begin(int32_t start) {
    int32x4_t first = vdupq_n_s32(0);
    if constexpr ((BITS < 8 || HAS_UNSIGNED) && ZERO > 0) first = vdupq_n_s32(start >> shift_to(ZERO));
    return {{first, first, first, first}};
}

inline Words fetch(const uint8_t *codes) {
    return all<Words>([&](int i) { return vld1q_u8(codes + 16 * i); });
}
inline Words low(const Words &words) {
    return all<Words>([&](int i) { return vandq_u8(words.quarter[i], vdupq_n_u8(15)); });
}
inline Words high(const Words &words) {
    return all<Words>([&](int i) { return vshrq_n_u8(words.quarter[i], 4); });
}
inline void write(uint8_t *to, const Words &words) {
    for (int i = 0; i < 4; ++i) vst1q_u8(to + 16 * i, words.quarter[i]);
}
inline Words plus(const Words &words, int number) {
    return all<Words>([&](int i) { return vaddq_u8(words.quarter[i], vdupq_n_u8((uint8_t)number)); });
}
inline Words look_up(const uint8_t *values, const Words &codes) {
    const uint8x16_t table = vld1q_u8(values);
    return all<Words>([&](int i) { return vqtbl1q_u8(table, codes.quarter[i]); });
}
// Bits [SHIFT, SHIFT + BITS) of each byte of `from` as the bits of `words` from 4 on.
template <int BITS, int SHIFT>
inline Words join(const Words &words, const Words &from) {
    return all<Words>([&](int i) {
        uint8x16_t shifted = from.quarter[i];
        if constexpr (SHIFT < 4) shifted = vshlq_n_u8(shifted, 4 - SHIFT);
        if constexpr (SHIFT > 4) shifted = vshrq_n_u8(shifted, SHIFT - 4);
        return vorrq_u8(words.quarter[i], vandq_u8(shifted, vdupq_n_u8(BITS == 1 ? 0x10 : 0x30)));
    });
}

// The sums of 4 outputs; LANE is that of 4 numbers.
template <int BITS, int LANE>
inline int32x4_t dot(int32x4_t sums, uint8x16_t codes, int8x16_t numbers) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (BITS == 8) return vusdotq_laneq_s32(sums, codes, numbers, LANE);
#endif
    const int8x16_t signed_codes = vreinterpretq_s8_u8(BITS == 8 ? veorq_u8(codes, vdupq_n_u8(128)) : codes);
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(sums, signed_codes, numbers, LANE);
#else
    // Sums of two products fit 16 bits: -128 * -127 * 2.
    const int8x16_t spread = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(numbers), LANE));
    const int16x8_t first = vmull_s8(vget_low_s8(signed_codes), vget_low_s8(spread)), last = vmull_high_s8(signed_codes, spread);
    return vpadalq_s16(sums, vpaddq_s16(first, last));
#endif
}
template <int BITS, int LANE>
inline Sums dot(const Sums &sums, const Words &words, int8x16_t numbers) {
    return all<Sums>([&](int i) { return dot<BITS, LANE>(sums.quarter[i], words.quarter[i], numbers); });
}
template <int BITS, int PART>
inline __attribute__((always_inline)) Sums dot(const Sums &sums, const Words &words, const int8_t *numbers, int offset) {
    const int8x16_t numbers_of_words = vld1q_s8(numbers + offset / 4 * 16);
    switch (offset % 4) {
        case 0: return dot<BITS, 0>(sums, words, numbers_of_words);
        case 1: return dot<BITS, 1>(sums, words, numbers_of_words);
        case 2: return dot<BITS, 2>(sums, words, numbers_of_words);
        default: return dot<BITS, 3>(sums, words, numbers_of_words);
    }
}

inline Totals bfloat16_scales(const uint16_t *scales) {
    return all<Totals>([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(scales + 4 * i)), 16)); });
}
inline Totals add(const Totals &totals, const Sums &sums, const Totals &scales, float scale) {
    return all<Totals>([&](int i) {
        return vfmaq_f32(totals.quarter[i], vcvtq_f32_s32(sums.quarter[i]), vmulq_n_f32(scales.quarter[i], scale));
    });
}
inline Totals add(const Totals &totals, const Totals &sums, float scale) {
    return all<Totals>([&](int i) { return vfmaq_n_f32(totals.quarter[i], sums.quarter[i], scale); });
}
inline Totals add(const Totals &totals, const Sums &sums, const Totals &scales) {
    return all<Totals>(
        [&](int i) { return vfmaq_f32(totals.quarter[i], vcvtq_f32_s32(sums.quarter[i]), scales.quarter[i]); });
}
inline Totals multiply(const Sums &sums, const Totals &scales) {
    return all<Totals>([&](int i) { return vmulq_f32(vcvtq_f32_s32(sums.quarter[i]), scales.quarter[i]); });
}
inline Totals multiply(const Totals &a, const Totals &b) {
    return all<Totals>([&](int i) { return vmulq_f32(a.quarter[i], b.quarter[i]); });
}
inline void write(float *to, const Totals &totals) {
    for (int i = 0; i < 4; ++i) vst1q_f32(to + 4 * i, totals.quarter[i]);
}
inline Totals float_scales(const float *scales) {
    return all<Totals>([&](int i) { return vld1q_f32(scales + 4 * i); });
}
inline Totals half_scales(const uint8_t *scales) {
    return all<Totals>(
        [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(scales + 8 * i))); });
}
inline Totals byte_scales(const uint8_t *scales) {
    const uint8x16_t bytes = vld1q_u8(scales);
    const uint16x8_t halves[] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
    return all<Totals>([&](int i) {
        const uint16x8_t half = halves[i / 2];
        return vcvtq_f32_u32(i % 2 == 0 ? vmovl_u16(vget_low_u16(half)) : vmovl_high_u16(half));
    });
}
inline Totals byte_scales(const int8_t *scales) {
    const int8x16_t bytes = vld1q_s8(scales);
    const int16x8_t halves[] = {vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)};
    return all<Totals>([&](int i) {
        const int16x8_t half = halves[i / 2];
        return vcvtq_f32_s32(i % 2 == 0 ? vmovl_s16(vget_low_s16(half)) : vmovl_high_s16(half));
    });
}

#else

constexpr int ROWS_ALONE = 1, ROWS_PER_TILE = 1, BLOCKS_AT_ONCE = 1;

struct Words { uint8_t code[64]; };
struct Sums { int32_t output[16]; };
struct Totals { float output[16]; };

inline Totals nothing() { return {}; }
template <int BITS, int ZERO>
inline Sums begin(int32_t start) {
    Sums sums = {};
    if constexpr (ZERO > 0)
        for (int32_t &sum : sums.output) sum = start >> shift_to(ZERO);
    return sums;
}

inline Words fetch(const uint8_t *codes) {
    Words words;
    memcpy(words.code, codes, sizeof words.code);
    return words;
}
inline Words low(Words words) {
    for (uint8_t &code : words.code) code &= 15;
    return words;
}
inline Words high(Words words) {
    for (uint8_t &code : words.code) code >>= 4;
    return words;
}
inline void write(uint8_t *to, const Words &words) { memcpy(to, words.code, sizeof words.code); }
inline Words plus(Words words, int number) {
    for (uint8_t &code : words.code) code = (uint8_t)(code + number);
    return words;
}
inline Words look_up(const uint8_t *values, Words words) {
    for (uint8_t &code : words.code) code = values[code];
    return words;
}
// Bits [SHIFT, SHIFT + BITS) of each byte of `from` as the bits of `words` from 4 on.
template <int BITS, int SHIFT>
inline Words join(Words words, const Words &from) {
    for (int i = 0; i < 64; ++i) words.code[i] |= (from.code[i] >> SHIFT & ((1 << BITS) - 1)) << 4;
    return words;
}

template <int BITS, int PART>
inline Sums dot(Sums sums, const Words &words, const int8_t *numbers, int offset) {
    for (int output = 0; output < 16; ++output)
        for (int byte = 0; byte < 4; ++byte)
            sums.output[output] += (int32_t)words.code[4 * output + byte] * numbers[4 * offset + byte];
    return sums;
}

inline Totals bfloat16_scales(const uint16_t *scales) {
    Totals wide;
    for (int output = 0; output < 16; ++output) {
        const uint32_t bits = (uint32_t)scales[output] << 16;
        memcpy(&wide.output[output], &bits, sizeof bits);
    }
    return wide;
}
inline Totals add(Totals totals, const Sums &sums, const Totals &scales, float scale) {
    for (int output = 0; output < 16; ++output)
        totals.output[output] += (float)sums.output[output] * (scales.output[output] * scale);
    return totals;
}
inline Totals add(Totals totals, const Totals &sums, float scale) {
    for (int output = 0; output < 16; ++output) totals.output[output] += sums.output[output] * scale;
    return totals;
}
inline Totals add(Totals totals, const Sums &sums, const Totals &scales) {
    for (int output = 0; output < 16; ++output)
        totals.output[output] += (float)sums.output[output] * scales.output[output];
    return totals;
}
inline Totals multiply(const Sums &sums, Totals scales) {
    for (int output = 0; output < 16; ++output) scales.output[output] *= (float)sums.output[output];
    return scales;
}
inline Totals multiply(Totals a, const Totals &b) {
    for (int output = 0; output < 16; ++output) a.output[output] *= b.output[output];
    return a;
}
inline void write(float *to, const Totals &totals) { memcpy(to, totals.output, sizeof totals.output); }
inline Totals float_scales(const float *scales) {
    Totals totals;
    memcpy(totals.output, scales, sizeof totals.output);
    return totals;
}
// Finite numbers only.
inline Totals half_scales(const uint8_t *scales) {
    Totals wide;
    for (int output = 0; output < 16; ++output) {
        uint16_t half;
        memcpy(&half, scales + 2 * output, sizeof half);
        const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
        float number;
        memcpy(&number, &bits, sizeof number);
        // 2^112, from the exponent bias of float16 to that of float32; right for subnormal numbers too.
        wide.output[output] = (half & 0x8000 ? -number : number) * 5.192296858534828e33f;
    }
    return wide;
}
template <class Byte>
inline Totals byte_scales(const Byte *scales) {
    Totals wide;
    for (int output = 0; output < 16; ++output) wide.output[output] = (float)scales[output];
    return wide;
}

#endif

#if defined(__AVX512VNNI__) || !defined(__AVX2__)
template <int BITS>
constexpr int PARTS = 1;
template <int BITS, int PART, int WORD, bool IS_LAST>
inline void widen(Sums &) {}
#endif

}  // namespace
