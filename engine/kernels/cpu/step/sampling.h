// Samples a token from logits as `emit` in engine/sample/sampler.py does, with temperature, top-k, top-p and min-p:
//
//     argmax over the kept tokens of  logit / temperature + noise(seed, position, token)
#pragma once

#include <math.h>

#include <algorithm>
#include <functional>

#include "step/row_operations.h"

namespace {

// The range of the noise: -ln(-ln((n + 0.5) / 2^32)).
constexpr double HIGHEST_NOISE = 22.88, LOWEST_NOISE = -3.14;

typedef uint64_t Products __attribute__((vector_size(LANES * 8)));

inline Unsigned high(uint32_t factor, Unsigned words) {
    return __builtin_convertvector(__builtin_convertvector(words, Products) * factor >> 32, Unsigned);
}

// The first word of Philox4x32-10 for (position, token), as in engine/sample/noise.py.
inline Unsigned philox(uint64_t seed, uint64_t position, Unsigned tokens) {
    const Unsigned none = {};
    Unsigned a = none + (uint32_t)position, b = none + (uint32_t)(position >> 32), c = tokens, d = none;
    uint32_t first = (uint32_t)seed, second = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const Unsigned next = high(0xCD9E8D57, c) ^ b ^ first, other = high(0xD2511F53, a) ^ d ^ second;
        b = 0xCD9E8D57 * c, d = 0xD2511F53 * a, a = next, c = other;
        first += 0x9E3779B9, second += 0xBB67AE85;
    }
    return a;
}

inline double gumbel(uint32_t word) { return -log(-log((word + 0.5) / 4294967296.0)); }

// The token of the highest logit, the first of equals; -1 where it is not finite, or a logit is NaN.
inline int64_t arg_max(const float *logits, int64_t count) {
    // Only the block with the maximum is searched for its position.
    constexpr int64_t SEARCHED_AT_ONCE = 1024;
    Vector invalid = {};
    float best = -INFINITY;
    const float *place = logits;
    for (const float *begin = logits; begin < logits + count; begin += SEARCHED_AT_ONCE) {
        Vector maximum = spread(begin[0]);
        for_vectors(lesser(SEARCHED_AT_ONCE, logits + count - begin), [&](int64_t i, int64_t vector_count) {
            Vector values = load_some(begin + i, vector_count);
            if (vector_count < LANES) values = lane_numbers() < (int32_t)vector_count ? values : maximum;
            maximum = greater(values, maximum);
            invalid += values == values ? Vector{} : Vector{} + 1;
        });
        if (greatest(maximum) > best) best = greatest(maximum), place = begin;
    }
    return sum(invalid) == 0 && std::isfinite(best) ? std::find(place, logits + count, best) - logits : -1;
}

// Scaled logits in buckets by their distance from the best one. In the last bucket no noise can lift a token above the best
// one, so it is not filtered.
class Buckets {
  public:
    // `scratch` has the size of the row.
    Buckets(const float *scaled, int64_t count, float best, float *scratch)
        : scaled(scaled), count(count), best(best), scratch(scratch) {
        for_vectors(count, [&](int64_t i, int64_t vector_count) {
            float weights[LANES];
            store(weights, exponential(load_some(scaled + i, vector_count) - best));
            for (int64_t lane = 0; lane < vector_count; ++lane) {
                const int64_t bucket = place(scaled[i + lane]);
                counts[bucket] += 1, masses[bucket] += weights[lane];
            }
        });
    }

    // The `number`-th largest scaled logit.
    float nth(int64_t number) {
        int64_t bucket = 0;
        for (; bucket < LAST && counts[bucket] < number; ++bucket) number -= counts[bucket];
        if (bucket == LAST) return -INFINITY;
        std::nth_element(scratch, scratch + number - 1, collect(bucket), std::greater<float>());
        return scratch[number - 1];
    }

    // The smallest scaled logit of the nucleus: the fewest logits from `floor` on with this share of their mass.
    float nucleus(double share, float floor) {
        leave_out(floor);
        double whole = 0, before = 0;
        for (const double mass : masses) whole += mass;
        int64_t bucket = 0;
        for (; bucket < LAST && before + masses[bucket] < share * whole; ++bucket) before += masses[bucket];
        if (bucket == LAST) return -INFINITY;
        float last = best, *const end = collect(bucket);
        std::sort(scratch, end, std::greater<float>());
        for (const float *logit = scratch; logit < end && before < share * whole; ++logit) last = *logit, before += mass(last);
        return last;
    }

  private:
    static constexpr int64_t LAST = 256;

    int64_t place(float logit) const {
        const float below = (best - logit) * (float)(LAST / (HIGHEST_NOISE - LOWEST_NOISE));
        return below < LAST ? (int64_t)below : LAST;
    }

    double mass(float logit) const { return expf(logit - best); }

    // Copy the logits of a bucket to the scratch memory; returns their end.
    float *collect(int64_t bucket) const {
        return std::copy_if(scaled, scaled + count, scratch, [&](float logit) { return place(logit) == bucket; });
    }

    void leave_out(float floor) {
        if (floor == -INFINITY) return;
        const int64_t last = place(floor);
        std::fill(masses + last, masses + LAST + 1, 0);
        for (const float *logit = scratch, *end = collect(last); logit < end; ++logit)
            if (*logit >= floor) masses[last] += mass(*logit);
    }

    const float *const scaled;
    const int64_t count;
    const float best;
    float *const scratch;
    int64_t counts[LAST + 1] = {};
    double masses[LAST + 1] = {};
};

// The smallest scaled logit that top-k, top-p and min-p keep; `best` is the largest one.
inline float cutoff(const SamplingContext &context, const float *scaled, int64_t count, float best, float *scratch) {
    const float least = context.min_p > 0 ? best + logf((float)context.min_p) : -INFINITY;
    const bool few = context.top_k > 0 && context.top_k < count;
    if (!few && context.top_p >= 1) return least;
    Buckets buckets(scaled, count, best, scratch);
    const float floor = few ? buckets.nth(context.top_k) : -INFINITY;
    return std::max({least, floor, context.top_p < 1 ? buckets.nucleus(context.top_p, floor) : floor});
}

// Token `number` of a draft loop; `scratch` is twice as large as the logits [count].
inline int64_t sample(const SamplingContext &context, int64_t number, const float *logits, int64_t count, float *scratch) {
    const int64_t first = arg_max(logits, count);
    if (first < 0 || context.temperature == 0) return first;
    float *const scaled = scratch;
    for (int64_t i = 0; i < count; ++i) scaled[i] = logits[i] / (float)context.temperature;
    const uint64_t seed = (uint64_t)context.seed, position = (uint64_t)(context.position + number);
    const float best = scaled[first], least = cutoff(context, scaled, count, best, scratch + count);
    int64_t chosen = first;
    double top = -INFINITY;
    float chance = INFINITY;
    for_vectors(count, [&](int64_t begin, int64_t vector_count) {
        const Unsigned words = philox(seed, position, (Unsigned)(lane_numbers() + (int32_t)begin));
        // Noise of the uniform u is at most -ln(1 - u), so a token exceeds the top score only if 1 - u <= e^(logit - top).
        // Nearly all tokens fail this cheap test, which has a small margin, and need no logarithms.
        const Vector complement = (__builtin_convertvector(~words, Vector) + 0.5f) * 0x1p-32f,
                     values = load_some(scaled + begin, vector_count);
        if (greatest(exponential(values - best) * chance - complement) < 0) return;
        for (int64_t lane = 0; lane < vector_count; ++lane) {
            if (values[lane] < least || complement[lane] > expf(values[lane] - best) * chance) continue;
            const double score = values[lane] + gumbel(words[lane]);
            if (score <= top) continue;
            top = score, chosen = begin + lane, chance = 1.01f * (float)exp(best - top);
        }
    });
    return chosen;
}

}  // namespace
