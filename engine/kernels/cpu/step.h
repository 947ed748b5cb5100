// The C interface of the native step. engine/native/library.py mirrors these structures field by field.
//
// One call is one step: the rows of a packed batch go through all layers of a decoder, whose weights are read where they
// lie. What a layer does with the rows, from their states:
//
//     states > (norm) > projections > (norm) > turn > cells > attention > output > (norm) > + states
//     states > (norm) > inner matrices > activation (times up) > down > (norm) > + states
//
// The second line begins behind the first, or beside it from the same states where a layer is `parallel`.
#pragma once

#include "attention.h"

enum Weights : int64_t { PLAIN, HALVES, BYTES, NIBBLES };
enum NormKind : int64_t { NO_NORM, ROOT_MEAN_SQUARE, LAYER_NORM };
enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED };
enum Scoring : int64_t { SOFTMAX, SIGMOID };

// A matrix: of float32 or bfloat16 numbers [outputs][columns], `stride` numbers from output to output, or of codes (linear.h).
struct Linear {
    const void *weights;
    const uint16_t *scales;  // of codes
    const float *bias;       // [outputs], or null
    Weights kind;
    int64_t outputs, columns, stride;
};

struct Norm {
    const float *weight, *bias;  // [width], or null: the one is 1, the other 0
    NormKind kind;
    int64_t width;
    float epsilon;
};

// Where the heads of queries, keys or values lie in what a matrix makes of a row.
struct Heads {
    int64_t matrix, offset, stride, count, width;
};

// The angles of the rows by which a layer turns its queries and keys: pairs of columns (i, i + pairs), or (2i, 2i + 1).
struct Turn {
    const float *cosine, *sine;  // [rows][pairs]
    int64_t pairs, offset, interleaved;
};

// The cells of the rows, in the layers that share them.
struct Cells {
    const Segment *segments;
    int64_t count, cells;
};

// Matrices of which every row goes through a few: activation(gate) * up, weighted by the router's scores (experts.h).
struct Experts {
    Linear router;            // as many outputs as there are experts
    const float *correction;  // [experts], added to the scores by which experts are chosen alone; or null
    Scoring scoring;
    int64_t chosen, renormalised;  // by so many a row, whose weights are brought to a sum of 1
    float factor;                  // what weights are multiplied by
    const void *inner, *down;      // [experts][2 * width][columns], the gate first, and [experts][columns][width]
    Weights kind;                  // PLAIN or HALVES
    int64_t width, columns;
    Activation activation;
    Linear gate;  // where the layer's own matrices stand beside its experts, what they make is sigmoid(gate) of; may be null
};

struct Layer {
    Norm before_attention, of_queries, of_keys, after_attention, before_mlp, after_mlp;
    Linear projections[3], output, inner[2], down;
    int64_t projection_count, inner_count;
    Heads queries, keys, values;
    int64_t norms_whole;  // of_queries and of_keys are norms of all heads of a row at once, which lie side by side
    int64_t turns_first;  // heads turn before their norms, not after
    int64_t gate_matrix, gate_offset;  // where the columns that are activated lie in what the inner matrices make
    int64_t up_matrix, up_offset;      // and those they are multiplied by; matrix -1: there are none
    Activation activation;
    const Experts *experts;            // or null; then the inner matrices may be none
    int64_t parallel;
    float attention_share, mlp_share;  // how many times what a half makes is added
    const float *sinks;                // [queries.count], or null
    float scale, softcap;              // softcap 0: none
    int64_t turn, cells;               // which of the step's
    Plane key_plane, value_plane;
    Kind reach;
    int64_t reach_size;
};

struct Step {
    float *states;  // [rows][width], the embeddings of the rows; overwritten
    int64_t rows, width;
    const Layer *layers;
    int64_t layer_count;
    const Turn *turns;
    const Cells *cells;
    int64_t cells_count;
    Format format;  // of all planes
    Norm last;
    Linear head;
    const int64_t *kept;  // rows whose states behind the last norm are told
    int64_t kept_count, wanted_count;  // of them, the first ones get logits
    float *kept_states;  // [kept_count][width]
    float *logits;       // [wanted_count][outputs of the head]
    int64_t rounds;      // whether rows may be rounded to bfloat16 to meet weights in it (plain.h)
    int64_t threads;
};

extern "C" int64_t cellar_step(const Step *step);
