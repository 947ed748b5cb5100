// The C interface of the native step. engine/native/step_library.py mirrors these structures field by field.
//
// One call is one step: the rows of a packed batch go through all layers of a decoder, whose weights are read where they
// lie. What a layer does with the rows, from their states:
//
//     states > (norm) > projections > (norm) > turn > cells > attention > (gate) > output > (norm) > + states
//     states > (norm) > inner matrices > activation (times up) > down > (norm) > + states
//
// The second line begins behind the first, or beside it from the same states where a layer is `parallel`. In place of
// attention over cells, a layer may have a recurrence over states (delta.h, space.h, convolution.h).
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

// What rows begin as (entry.h): the rows of a table that their tokens name, `scale` times as large.
struct Embedding {
    const void *table;  // [count][width], PLAIN or HALVES
    Weights kind;
    int64_t count;
    float scale;
};

// The angles by which a layer turns its queries and keys: pairs of columns (i, i + pairs), or (2i, 2i + 1).
struct Turn {
    const float *cosine, *sine;  // [positions][pairs], of all positions that there may be
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
    const Linear *inner, *down;    // of each expert; what the inner one makes is gates, and ups behind them
    Activation activation;         // activation(slope * gate) / slope * (up + shift) enters the other
    int64_t alternating;           // gates and ups stand in turns
    float limit, slope, shift;     // gates are at most the limit, and ups no further from 0
    Linear share;  // where the layer's own matrices stand beside its experts, what they make is sigmoid(share) of; may be null
};

// Rows of one sequence, behind which its states are told. Pieces of a sequence, which is `span` of the step, stand one
// behind the other and follow each other.
struct Piece {
    int64_t row, rows;  // of the batch: [row, row + rows)
    int64_t span;
};

// Columns of what a matrix makes of a row, and the first place that they go to.
struct Run {
    int64_t matrix, offset, first, count;
};

// A causal convolution of every channel by itself (convolution.h); before and after are its last inputs [channels][kernel - 1].
struct Convolution {
    const float *weights, *bias;  // [kernel][channels], and [channels] or null
    int64_t kernel, channels;
    const float *const *before;  // [spans], of which any may be null: zeros
    float *const *after;         // [pieces]
};

// Linear attention by the gated delta rule (delta.h); before and after are its states [value_heads][key_width][value_width].
struct Delta {
    const Run *runs;    // from projections to channels of queries, keys and values; then of each head what makes its decay,
    int64_t run_count;  // its rate, and its gate
    Convolution convolution;
    int64_t key_heads, value_heads, key_width, value_width;
    const float *speed, *shift;  // [value_heads]: a decay is exp(-speed * softplus(column + shift))
    float most;                  // a rate is so many times sigmoid(column)
    Norm norm;                   // of a head's values, before its gate
    const float *const *before;  // as a convolution's
    float *const *after;
};

// A state space whose numbers are chosen by each token (space.h); before and after are its states
// [heads][value_width][key_width].
struct Space {
    const Run *runs;    // from projections to channels of values, keys and queries; then of each head what makes its pace,
    int64_t run_count;  // room for as many numbers, and gates
    Convolution convolution;
    int64_t heads, groups, value_width, key_width;  // a group of heads shares keys and queries
    const float *speed, *shift, *direct;  // [heads]: a decay is exp(-speed * pace), a pace is softplus(column + shift)
    float slowest, fastest;               // between which paces are held
    Norm norm;                            // of so many values at a time, behind their gates; its weight is of all values
    const float *const *before;           // as a convolution's
    float *const *after;
};

// A convolution between two products (convolution.h).
struct Sieve {
    const Run *runs;  // from projections to channels, what they are multiplied by, and what comes out is multiplied by
    int64_t run_count;
    Convolution convolution;
};

constexpr int MOST_PROJECTIONS = 6;

struct Layer {
    Norm before_attention, of_queries, of_keys, after_attention, before_mlp, after_mlp;
    Linear projections[MOST_PROJECTIONS], output, inner[2], down;
    int64_t projection_count, inner_count;
    Heads queries, keys, values;
    Heads gates;          // of which the sigmoid weights what attention makes; count 0: there are none
    const Delta *delta;   // in place of attention, or null
    const Sieve *sieve;   // the same
    const Space *space;   // the same
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
    const int64_t *tokens;  // [rows]
    int64_t rows, width;
    Embedding embedding;
    const Layer *layers;
    int64_t layer_count;
    const Turn *turns;
    const int64_t *angles;  // [rows], the rows' places in the tables of cosines and sines; null: their positions
    const Cells *cells;
    int64_t cells_count;
    const Piece *pieces;  // where layers have recurrences
    int64_t piece_count;
    Format format;  // of all planes
    Norm last;
    Linear head;
    const int64_t *kept;  // rows whose states behind the last norm are told
    int64_t kept_count, wanted_count;  // of them, the first ones get logits
    float *kept_states;  // [kept_count][width]
    float *logits;       // [wanted_count][outputs of the head]
    int64_t rounds;      // whether rows may be rounded to bfloat16 to meet weights, keys and values in it
    int64_t threads;
};

extern "C" int64_t cellar_step(const Step *step);

// What one sequence reads, and then says: one token after the other, each read in its turn but for the last (choice.h).
struct Link {
    int64_t length, count;  // tokens to read first, and to say
    int64_t seed, position;  // of the noise that the first one is drawn with
    double temperature;      // 0: the highest logit is said
    int64_t top_k;           // 0: off
    double top_p, min_p;     // 1 and 0: off
};

// Steps that follow each other. `step` has the rows of all of them, those of a sequence side by side: a segment
// for each, but no tokens and nothing kept. The cells of rows that are not reached are left as they are.
struct Chain {
    const Step *step;
    const Link *links;  // one for each segment
    int64_t links_count;
    const int64_t *tokens;  // that are read first, of all sequences
    float logits_scale, softcap;  // logits are so many times what the head makes, between -softcap and softcap; 0: anywhere
    int64_t choices;  // the tokens that may be said are the first ones, so many; all of them have embeddings
    int64_t deepest;  // the largest count
    int64_t *said;    // [links_count][deepest]; -1 where a row of logits has no finite maximum, and behind it
};

extern "C" int64_t cellar_chain(const Chain *chain);

// Rows of logits, and how a token is drawn behind each (choice.h).
struct Choices {
    const Link *links;  // [rows]
    int64_t rows;
    const float *logits;  // [rows][outputs]
    int64_t outputs;
    int64_t *said;  // [rows]; -1 where a row has no finite maximum
    int64_t threads;
};

extern "C" int64_t cellar_choose(const Choices *choices);
