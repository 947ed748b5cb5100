// Operations on a single row: norms, rotary embedding, activations.
#pragma once

#include <math.h>

#include "products/linear.h"
#include "vector/memory.h"
#include "step/step.h"
#include "vector/vector.h"

namespace {

// function(start, count) for vectors of a row; count < LANES at the end.
template <class Function>
inline void for_vectors(int64_t width, Function function) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) function(i, (int64_t)LANES);
    if (i < width) function(i, width - i);
}

inline Vector load_some(const float *from, int64_t count) {
    Vector part = {};
    memcpy(&part, from, count * sizeof(float));
    return part;
}
inline void store_some(float *to, Vector vector, int64_t count) { memcpy(to, &vector, count * sizeof(float)); }

inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

inline void add_row(float *__restrict to, const float *__restrict more, const float *__restrict bias, int64_t width) {
    if (bias)
        for (int64_t i = 0; i < width; ++i) to[i] += more[i] + bias[i];
    else
        for (int64_t i = 0; i < width; ++i) to[i] += more[i];
}

inline float total(const float *from, int64_t width) {
    Vector parts = {};
    for_vectors(width, [&](int64_t i, int64_t count) { parts += load_some(from + i, count); });
    return sum(parts);
}

// The sum of squared distances from `middle`.
inline float squares(const float *from, float middle, int64_t width) {
    Vector parts = {};
    for_vectors(width, [&](int64_t i, int64_t count) {
        Vector differences = load_some(from + i, count) - middle;
        if (count < LANES) differences = lane_numbers() < (int32_t)count ? differences : Vector{};
        parts += differences * differences;
    });
    return sum(parts);
}

// `from` and `to` may be equal.
inline void normalise(const Norm &norm, const float *from, float *to) {
    const float middle = norm.kind == LAYER_NORM ? total(from, norm.width) / norm.width : 0;
    const float by = 1.0f / sqrtf(squares(from, middle, norm.width) / norm.width + norm.epsilon);
    for (int64_t i = 0; i < norm.width; ++i) {
        const float normalised = (from[i] - middle) * by;
        to[i] = (norm.weight ? normalised * norm.weight[i] : normalised) + (norm.bias ? norm.bias[i] : 0);
    }
}

inline void normalise_or_copy(const Norm &norm, const float *from, float *to, int64_t width) {
    if (norm.kind != NO_NORM)
        normalise(norm, from, to);
    else if (from != to)
        memcpy(to, from, width * sizeof(float));
}

inline void rotate_head(const Rotary &rotary, int64_t position, float *head) {
    const float *cosine = rotary.cosine + position * rotary.pairs, *sine = rotary.sine + position * rotary.pairs;
    const int64_t step = rotary.interleaved ? 2 : 1, distance = rotary.interleaved ? 1 : rotary.pairs;
    float *__restrict first = head + rotary.offset;
    for (int64_t pair = 0; pair < rotary.pairs; ++pair) {
        float *x = first + pair * step, *y = x + distance;
        const float before = *x;
        *x = before * cosine[pair] - *y * sine[pair];
        *y = *y * cosine[pair] + before * sine[pair];
    }
}

inline void scale_query(const Rotary &rotary, int64_t position, float *query, int64_t width) {
    if (!rotary.query_factors) return;
    for (int64_t i = 0; i < width; ++i) query[i] *= rotary.query_factors[position];
}

// The error function with an error of 2e-7: Abramowitz and Stegun, 7.1.26.
inline Vector error_function(Vector x) {
    const Vector size = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
    Vector y = spread(1.061405429f);
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    const Vector result = 1.0f - y * t * exponential(-size * size);
    return x < 0 ? -result : result;
}

template <Activation KIND>
inline Vector activate(Vector x) {
    if constexpr (KIND == SILU) return x / (1.0f + exponential(-x));
    if constexpr (KIND == GELU) return 0.5f * x * (1.0f + error_function(x * 0.70710678118654752f));
    if constexpr (KIND == GELU_TANH)
        return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    const Vector positive = x < 0 ? Vector{} : x;
    return KIND == RELU ? positive : positive * positive;
}

// A source of rows: activation(gate + its bias) * (up + its bias); `up` and the biases may be null.
template <Activation KIND>
struct Activated {
    const float *gate, *gate_bias, *up, *up_bias;
    int64_t gate_stride, up_stride, columns;

    // `count` columns of a row from `column` on, padded with zeros.
    inline __attribute__((always_inline)) Vector activated(int64_t row, int64_t column, int64_t count) const {
        Vector values = load_some(gate + row * gate_stride + column, count);
        if (gate_bias) values += load_some(gate_bias + column, count);
        values = activate<KIND>(values);
        if (!up) return values;
        const Vector more = load_some(up + row * up_stride + column, count);
        return values * (up_bias ? more + load_some(up_bias + column, count) : more);
    }
    void write_row(int64_t row, float *to) const {
        for_vectors(columns, [&](int64_t i, int64_t count) { store_some(to + i, activated(row, i, count), count); });
    }
    // A group of a row to be quantised (quantised_rows.h).
    void fetch(int64_t row, int64_t group, Vector *to) const {
        const int64_t first = group * GROUP;
        if (first + GROUP > columns) return fetch_part(row, first, to);
        for (int64_t i = first; i < first + GROUP; i += LANES) *to++ = activated(row, i, LANES);
    }

  private:
    __attribute__((noinline)) void fetch_part(int64_t row, int64_t first, Vector *to) const {
        for (int64_t i = first; i < first + GROUP; i += LANES)
            *to++ = i < columns ? activated(row, i, lesser(columns - i, LANES)) : Vector{};
    }
};

// function(activation), a compile-time constant.
template <class Function>
inline void for_activation(Activation kind, Function function) {
    switch (kind) {
        case SILU: return function(std::integral_constant<Activation, SILU>());
        case GELU: return function(std::integral_constant<Activation, GELU>());
        case GELU_TANH: return function(std::integral_constant<Activation, GELU_TANH>());
        case RELU: return function(std::integral_constant<Activation, RELU>());
        case RELU_SQUARED: return function(std::integral_constant<Activation, RELU_SQUARED>());
    }
}

template <Activation KIND>
inline void activate_row(const float *gate, const float *gate_bias, const float *up, const float *up_bias, float *to,
                         int64_t width) {
    Activated<KIND>{gate, gate_bias, up, up_bias, 0, 0, width}.write_row(0, to);
}

inline void activate_row(Activation kind, const float *gate, const float *gate_bias, const float *up, const float *up_bias,
                         float *to, int64_t width) {
    for_activation(kind, [&](auto kind) { activate_row<decltype(kind)::value>(gate, gate_bias, up, up_bias, to, width); });
}

}  // namespace
