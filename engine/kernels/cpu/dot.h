// The arithmetic of the linear kernel, for one instruction set: integer sums of 16 outputs over a group of columns.
//
//     Words  64 bytes of codes: 4 columns of 16 outputs
//     Sums   integer sums of 16 outputs
//     Totals float32 totals of 16 outputs
//
// Codes are unsigned with a zero of 128 or 8, so a sum of code * number is too large by the zero times the sum of the numbers:
// `begin` returns initial sums that correct for it, from those for a zero of 128. All sums of a group are exact.
//
// Up to ROWS_ALONE rows are multiplied by one block of outputs at a time. More rows are computed in tiles of up to
// ROWS_PER_TILE rows and BLOCKS_AT_ONCE blocks, as many as there are registers for sums and totals (measured: no other
// numbers are faster).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

template <int BITS>
constexpr int SHIFT = BITS == 8 ? 0 : 4;  // from a zero of 128 to the zero of BITS

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
template <int BITS>
inline Sums begin(const int32_t &start) {
    const Sums all = _mm512_set1_epi32(start);
    return BITS == 8 ? all : _mm512_srai_epi32(all, SHIFT<BITS>);
}

inline Words fetch(const uint8_t *codes) { return _mm512_load_si512(codes); }
inline Words low(Words both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
inline Words high(Words both) { return low(_mm512_srli_epi16(both, 4)); }

// Inline assembly, because GCC 12 copies registers around the intrinsic (measured: half the speed).
template <int BITS>
inline __attribute__((always_inline)) Sums dot(Sums sums, Words words, const int8_t *numbers) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(words), "m"(*(const int32_t(*)[1])numbers));
    return sums;
}

inline Totals scales_at(const uint16_t *scales) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)scales)), 16));
}
inline Totals add(Totals totals, Sums sums, Totals scales, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(scales, _mm512_set1_ps(scale)), totals);
}
inline void write(float *to, Totals totals) { _mm512_storeu_ps(to, totals); }

#elif defined(__AVX2__)

constexpr int ROWS_ALONE = 8, ROWS_PER_TILE = 4, BLOCKS_AT_ONCE = 1;

struct Words { __m256i half[2]; };
struct Sums { __m256i half[2]; };
struct Totals { __m256 half[2]; };

template <class Both, class Make>
inline Both both(Make make) { return {{make(0), make(1)}}; }

inline Totals nothing() { return both<Totals>([](int) { return _mm256_setzero_ps(); }); }

// 8-bit codes are multiplied as signed numbers: the int16 result of the instruction could not hold 255 * 127 * 2.
template <int BITS>
inline Sums begin(int32_t start) {
    const __m256i all = _mm256_set1_epi32(BITS == 8 ? 0 : start >> SHIFT<BITS>);
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

template <int BITS>
inline __m256i products(__m256i codes, __m256i numbers) {
    if (BITS == 4) return _mm256_maddubs_epi16(codes, numbers);
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

inline Totals scales_at(const uint16_t *scales) {
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
inline void write(float *to, const Totals &totals) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_ps(to + 8 * i, totals.half[i]);
}

#else

constexpr int ROWS_ALONE = 3, ROWS_PER_TILE = 3, BLOCKS_AT_ONCE = 1;

struct Words { uint8_t code[64]; };
struct Sums { int32_t output[16]; };
struct Totals { float output[16]; };

inline Totals nothing() { return {}; }
template <int BITS>
inline Sums begin(int32_t start) {
    Sums sums;
    for (int32_t &sum : sums.output) sum = start >> SHIFT<BITS>;
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

template <int BITS>
inline Sums dot(Sums sums, const Words &words, const int8_t *numbers) {
    for (int output = 0; output < 16; ++output)
        for (int byte = 0; byte < 4; ++byte)
            sums.output[output] += (int32_t)words.code[4 * output + byte] * numbers[byte];
    return sums;
}

inline Totals scales_at(const uint16_t *scales) {
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
inline void write(float *to, const Totals &totals) { memcpy(to, totals.output, sizeof totals.output); }

#endif

}  // namespace
