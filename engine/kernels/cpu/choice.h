// The token that is said behind a row: what engine/sample/sampler.py says where nothing but these filters shapes the choice.
//
//     argmax over the kept tokens of  logit / temperature + noise(seed, position, token)
#pragma once

#include <math.h>

#include <algorithm>
#include <functional>

#include "rows.h"

namespace {

// No noise is larger, none smaller: -ln(-ln((n + 0.5) / 2^32)).
constexpr double HIGHEST_NOISE = 22.88, LOWEST_NOISE = -3.14;

typedef uint64_t Products __attribute__((vector_size(LANES * 8)));

inline Unsigned high(uint32_t factor, Unsigned words) {
    return __builtin_convertvector(__builtin_convertvector(words, Products) * factor >> 32, Unsigned);
}

// The first word of Philox4x32-10 for (position, token) of some tokens, as engine/sample/noise.py has it.
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

// The highest logit's token, the first of several; -1 where it is not finite, or one is no number.
inline int64_t highest(const float *logits, int64_t count) {
    // Only the stretch that has it is looked through for where it stands.
    constexpr int64_t STRETCH = 1024;
    Vector unsound = {};
    float best = -INFINITY;
    const float *place = logits;
    for (const float *begin = logits; begin < logits + count; begin += STRETCH) {
        Vector most = spread(begin[0]);
        by_vectors(lesser(STRETCH, logits + count - begin), [&](int64_t at, int64_t some) {
            Vector own = load_some(begin + at, some);
            if (some < LANES) own = lane_numbers() < (int32_t)some ? own : most;
            most = greater(own, most);
            unsound += own == own ? Vector{} : Vector{} + 1;
        });
        if (greatest(most) > best) best = greatest(most), place = begin;
    }
    return sum(unsound) == 0 && std::isfinite(best) ? std::find(place, logits + count, best) - logits : -1;
}

// The scaled logits of a row, gathered by how far they lie below the best one. Beyond the last bucket but one no noise can
// lift a token over the best: there it does not matter what is kept.
class Buckets {
  public:
    // `room` is as large as the row.
    Buckets(const float *scaled, int64_t count, float best, float *room) : scaled(scaled), count(count), best(best), room(room) {
        by_vectors(count, [&](int64_t at, int64_t some) {
            float own[LANES];
            store(own, exponential(load_some(scaled + at, some) - best));
            for (int64_t lane = 0; lane < some; ++lane) {
                const int64_t bucket = place(scaled[at + lane]);
                counts[bucket] += 1, masses[bucket] += own[lane];
            }
        });
    }

    // The `number`-th largest.
    float nth(int64_t number) {
        int64_t bucket = 0;
        for (; bucket < LAST && counts[bucket] < number; ++bucket) number -= counts[bucket];
        if (bucket == LAST) return -INFINITY;
        std::nth_element(room, room + number - 1, gather(bucket), std::greater<float>());
        return room[number - 1];
    }

    // The smallest of those that it takes to have this share of the mass of all from `floor` on.
    float nucleus(double share, float floor) {
        leave_out(floor);
        double whole = 0, before = 0;
        for (const double mass : masses) whole += mass;
        int64_t bucket = 0;
        for (; bucket < LAST && before + masses[bucket] < share * whole; ++bucket) before += masses[bucket];
        if (bucket == LAST) return -INFINITY;
        float last = best, *const end = gather(bucket);
        std::sort(room, end, std::greater<float>());
        for (const float *own = room; own < end && before < share * whole; ++own) last = *own, before += mass(last);
        return last;
    }

  private:
    static constexpr int64_t LAST = 256;

    int64_t place(float own) const {
        const float below = (best - own) * (float)(LAST / (HIGHEST_NOISE - LOWEST_NOISE));
        return below < LAST ? (int64_t)below : LAST;
    }

    double mass(float own) const { return expf(own - best); }

    // Those of a bucket, in the room; their end.
    float *gather(int64_t bucket) const {
        return std::copy_if(scaled, scaled + count, room, [&](float own) { return place(own) == bucket; });
    }

    void leave_out(float floor) {
        if (floor == -INFINITY) return;
        const int64_t last = place(floor);
        std::fill(masses + last, masses + LAST + 1, 0);
        for (const float *own = room, *end = gather(last); own < end; ++own)
            if (*own >= floor) masses[last] += mass(*own);
    }

    const float *const scaled;
    const int64_t count;
    const float best;
    float *const room;
    int64_t counts[LAST + 1] = {};
    double masses[LAST + 1] = {};
};

// The smallest of scaled logits that top-k, top-p and min-p keep; `best` is the largest one, `room` is for all.
inline float least_kept(const Link &link, const float *scaled, int64_t count, float best, float *room) {
    const float least = link.min_p > 0 ? best + logf((float)link.min_p) : -INFINITY;
    const bool few = link.top_k > 0 && link.top_k < count;
    if (!few && link.top_p >= 1) return least;
    Buckets buckets(scaled, count, best, room);
    const float floor = few ? buckets.nth(link.top_k) : -INFINITY;
    return std::max({least, floor, link.top_p < 1 ? buckets.nucleus(link.top_p, floor) : floor});
}

// The token that a sequence says as its `number`-th; `room` is twice as large as the logits [count].
inline int64_t choose(const Link &link, int64_t number, const float *logits, int64_t count, float *room) {
    const int64_t first = highest(logits, count);
    if (first < 0 || link.temperature == 0) return first;
    float *const scaled = room;
    for (int64_t at = 0; at < count; ++at) scaled[at] = logits[at] / (float)link.temperature;
    const uint64_t seed = (uint64_t)link.seed, position = (uint64_t)(link.position + number);
    const float best = scaled[first], least = least_kept(link, scaled, count, best, room + count);
    int64_t chosen = first;
    double top = -INFINITY;
    float chance = INFINITY;
    by_vectors(count, [&](int64_t begin, int64_t some) {
        const Unsigned words = philox(seed, position, (Unsigned)(lane_numbers() + (int32_t)begin));
        // Noise of the uniform u is at most -ln(1 - u). So a token passes the top one only if 1 - u is at most
        // e^(logit - top): nearly all fail that, and need no logarithms. A little more is let through than that.
        const Vector rest = (__builtin_convertvector(~words, Vector) + 0.5f) * 0x1p-32f, own = load_some(scaled + begin, some);
        if (greatest(exponential(own - best) * chance - rest) < 0) return;
        for (int64_t lane = 0; lane < some; ++lane) {
            if (own[lane] < least || rest[lane] > expf(own[lane] - best) * chance) continue;
            const double score = own[lane] + gumbel(words[lane]);
            if (score <= top) continue;
            top = score, chosen = begin + lane, chance = 1.01f * (float)exp(best - top);
        }
    });
    return chosen;
}

}  // namespace
