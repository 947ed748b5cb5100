// The arithmetic of the linear kernel, for one instruction set: integer sums of 16 outputs over a group of columns.
//
//     Words  64 bytes of codes: 4 columns of 16 outputs
//     Sums   integer sums of 16 outputs
//     Totals float32 totals of 16 outputs
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
template <int BITS>
inline __attribute__((always_inline)) Sums dot(Sums sums, Words words, const int8_t *numbers) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(words), "m"(*(const int32_t(*)[1])numbers));
    return sums;
}

inline Totals bfloat16_scales(const uint16_t *scales) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)scales)), 16));
}
inline Totals add(Totals totals, Sums sums, Totals scales, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(scales, _mm512_set1_ps(scale)), totals);
}
inline Totals add(Totals totals, Totals own, float scale) { return _mm512_fmadd_ps(own, _mm512_set1_ps(scale), totals); }
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

constexpr int ROWS_ALONE = 8, ROWS_PER_TILE = 4, BLOCKS_AT_ONCE = 1;

struct Words { __m256i half[2]; };
struct Sums { __m256i half[2]; };
struct Totals { __m256 half[2]; };

template <class Both, class Make>
inline Both both(Make make) { return {{make(0), make(1)}}; }

inline Totals nothing() { return both<Totals>([](int) { return _mm256_setzero_ps(); }); }

// 8-bit values are multiplied as signed numbers: the int16 result of the instruction could not hold 255 * 127 * 2.
template <int BITS, int ZERO>
inline Sums begin(int32_t start) {
    __m256i all = _mm256_setzero_si256();
    if constexpr (BITS < 8 && ZERO > 0) all = _mm256_set1_epi32(start >> shift_to(ZERO));
    return {{all, all}};
}

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

template <int BITS>
inline __m256i products(__m256i codes, __m256i numbers) {
    if (BITS < 8) return _mm256_maddubs_epi16(codes, numbers);
    const __m256i own = _mm256_xor_si256(codes, _mm256_set1_epi8((char)128));
    return _mm256_maddubs_epi16(_mm256_abs_epi8(own), _mm256_sign_epi8(numbers, own));
}

template <int BITS>
inline Sums dot(const Sums &sums, const Words &words, const int8_t *numbers) {
    const __m256i spread = _mm256_set1_epi32(word(numbers));
    return both<Sums>([&](int i) {
        const __m256i pairs = products<BITS>(words.half[i], spread);
        return _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
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
inline Totals add(const Totals &totals, const Totals &own, float scale) {
    return both<Totals>([&](int i) { return _mm256_fmadd_ps(own.half[i], _mm256_set1_ps(scale), totals.half[i]); });
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
    for (int at = 0; at < 64; ++at) words.code[at] |= (from.code[at] >> SHIFT & ((1 << BITS) - 1)) << 4;
    return words;
}

template <int BITS>
inline Sums dot(Sums sums, const Words &words, const int8_t *numbers) {
    for (int output = 0; output < 16; ++output)
        for (int byte = 0; byte < 4; ++byte)
            sums.output[output] += (int32_t)words.code[4 * output + byte] * numbers[byte];
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
inline Totals add(Totals totals, const Totals &own, float scale) {
    for (int output = 0; output < 16; ++output) totals.output[output] += own.output[output] * scale;
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

}  // namespace
