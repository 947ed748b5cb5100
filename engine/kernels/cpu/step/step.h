// The C interface of the native step. engine/native/step_library.py mirrors these structures and compares sizes and offsets
// with `cellar_layout` when it loads the library.
//
// One call is one step: the rows of a packed batch (one a token) pass through all layers of a decoder. Weights are read from
// the tensors of the loaded model. A layer computes, from the hidden states of the rows:
//
//     states > (norm) > projections > (norm) > rotary > KV cells > attention > (gate) > output > (norm) > + states
//     states > (norm) > inner matrices > activation (* up) > down > (norm) > + states
//
// A layer without `output.weights` has only the second line, one with neither inner matrices nor experts only the first one.
// A `parallel` layer computes both lines from the same states. In place of attention over keys and values a layer may have
// attention over latents (latent_attention.h) or a recurrence over states (delta_rule.h, state_space.h, convolution.h).
#pragma once

#include "attention/attention.h"
#include "products/linear.h"

enum NormKind : int64_t { NO_NORM, ROOT_MEAN_SQUARE, LAYER_NORM };
enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED };
enum Scoring : int64_t { SOFTMAX, SIGMOID };

// A linear layer: float32 or bfloat16 weights [outputs][columns] with `stride` numbers from output to output, or
// quantised codes (linear.h).
struct Linear {
    const void *weights;
    const uint8_t *scales;  // of quantised weights
    const float *bias;      // [outputs], or null
    WeightFormat kind;
    int64_t outputs, columns, stride;
    int64_t low_rank;  // index into the factors of adapters (AdapterRange); 0: adapters never change it
};

// Low-rank factors of a matrix (low_rank.h): its outputs are increased by up * (down * row).
struct LowRank {
    const void *down, *up;  // [rank][columns] and [outputs][rank], float32 or bfloat16
    WeightFormat kind;
    int64_t rank;  // 0: the adapter does not change the matrix
};

// Rows [row, row + rows) of a step with one adapter.
struct AdapterRange {
    int64_t row, rows;
    const LowRank *factors;  // by `Linear::low_rank`
};

struct Norm {
    const float *weight, *bias;  // [width]; null: 1 and 0
    NormKind kind;
    int64_t width;
    float epsilon;
};

// Columns of the queries, keys, values or gates in the output of projection `matrix`: `stride` columns from head to head.
struct Heads {
    int64_t matrix, offset, stride, count, width;
};

// The embedding table; embeddings are multiplied by `scale`.
struct Embedding {
    const void *table;           // [count][width], or quantised codes (linear.h)
    const uint8_t *scales;       // of quantised weights
    WeightFormat kind;
    int64_t count;
    int64_t rounds_to_bfloat16;  // whether quantised weights are rounded
    float scale;
};

// Rotary tables of one kind of layer. Pairs of columns are (i, i + pairs), interleaved: (2i, 2i + 1).
struct Rotary {
    const float *cosine, *sine;  // [positions][pairs]
    const float *query_factors;  // [positions], multiply queries after the rotation; or null
    int64_t pairs, offset, interleaved;
};

// The cells of the batch in one attention group of the cache: layers of a group share them.
struct CellGroup {
    const Segment *segments;
    int64_t count, cells;  // segments; cells of the pool
};

// Norms of experts that read the hidden states, as the dense MLP beside them does after its own norm: of the inputs of router
// and experts, and of both outputs before they are added.
struct ExpertNorms {
    Norm router, input, output, dense;
};

// A mixture of experts (experts.h): activation(gate) * up of the chosen experts, weighted by the router's scores.
struct Experts {
    Linear router;                  // an output for each expert
    const float *score_correction;  // [experts], added to the scores for the choice of experts only; or null
    Scoring scoring;
    int64_t top_k, normalised;   // experts per row; whether their weights are normalised to a sum of 1
    int64_t scales_inputs;       // whether the weights multiply the inputs of the experts, not their outputs
    float scaling_factor;        // multiplies the weights
    const float *expert_scales;  // [experts], multiply the weights of the chosen experts as well; or null
    const Linear *inner, *up;    // of each expert: gates and ups; or gates alone, where `up` has the ups or there are none
    const Linear *down;          // of each expert
    Activation activation;       // input of `down`: activation(slope * gate) / slope * (up + shift)
    int64_t interleaved;         // gates and ups alternate; else all gates come first
    float limit, slope, shift;   // gates are clamped to at most `limit`, ups to [-limit, limit]
    Linear shared_gate;          // the dense MLP beside the experts is multiplied by sigmoid(shared_gate); weights null: by 1
    const ExpertNorms *norms;    // or null: router and experts have the input of the dense MLP
};

// Rows [row, row + rows) of one span, after which recurrent states are written. State ranges of a span are consecutive.
struct StateRange {
    int64_t row, rows;
    int64_t span;
};

// `count` columns from `offset` of the output of projection `matrix`, copied to columns from `target`.
struct ColumnRange {
    int64_t matrix, offset, target, count;
};

// A depthwise causal convolution (convolution.h); its state are the last inputs [channels][kernel - 1].
struct Convolution {
    const float *weights, *bias;  // [kernel][channels]; [channels] or null
    int64_t kernel, channels;
    const float *const *states_before;  // [spans]; null: zeros
    float *const *states_after;         // [state_ranges]
};

// Linear attention by the gated delta rule (delta_rule.h); states are [value_heads][key_width][value_width].
struct DeltaRule {
    const ColumnRange *ranges;  // channels of queries, keys and values, then the decay, beta and gate inputs of each head
    int64_t range_count;
    Convolution convolution;
    int64_t key_heads, value_heads, key_width, value_width;
    const float *decay_scale, *dt_bias;  // [value_heads]: decay = exp(-decay_scale * softplus(input + dt_bias))
    float max_beta;                      // beta = max_beta * sigmoid(input)
    Norm head_norm;                      // of the values of a head, before its gate
    const float *const *states_before;   // as in Convolution
    float *const *states_after;
};

// A selective state space (Mamba-2, state_space.h); states are [heads][value_width][key_width].
struct StateSpace {
    const ColumnRange *ranges;  // channels of values, keys and queries, then the dt inputs of the heads, a gap of `heads`
    int64_t range_count;        // columns (for decays), and the gates
    Convolution convolution;
    int64_t heads, groups, value_width, key_width;  // a group of heads shares keys and queries
    const float *decay_scale, *dt_bias, *skip;      // [heads]: decay = exp(-decay_scale * dt), dt = softplus(input + dt_bias)
    float min_dt, max_dt;                           // dt is clamped to this range
    Norm group_norm;                                // of `width` values at a time, after their gates; weight: of all values
    const float *const *states_before;              // as in Convolution
    float *const *states_after;
};

// Attention over latents (MLA, arXiv 2405.04434), with absorbed projections (latent_attention.h): a cell holds
// [latent, rotary part], the key of all heads, and its latent is their value.
struct LatentAttention {
    Norm query_norm;         // of the output of projection `queries.matrix` before the expansion
    Linear query_expansion;  // weights null: the queries are outputs of the projection
    Heads latents;           // one head; normed by latent_norm
    Norm latent_norm;
    Heads rotary_columns;         // one head
    int64_t separates_pairs;      // columns of rotary parts alternate before the rotation: first and second of a pair
    const Linear *keys, *values;  // of each head: [latent width][key width] and [value width][latent width]
};

// A gated short convolution (convolution.h): third * convolution(first * second).
struct GatedConvolution {
    const ColumnRange *ranges;  // the three factors, `channels` columns each
    int64_t range_count;
    Convolution convolution;
};

// A third part of a layer: states + norm(projection(activation(gate(states)) * the layer's per-layer input)).
struct PerLayerBlock {
    Linear gate, projection;
    Activation activation;
    Norm norm;
    int64_t layer;
};

// The inputs of these parts: scale * (table[token] + norm(projection_scale * projection(embeddings))); the columns of all layers
// one after the other, `norm.width` each.
struct PerLayerInputs {
    Embedding table;
    Linear projection;
    float projection_scale;
    Norm norm;
    float scale;
};

// The input of a drafting layer (MTP), from a token and the hidden state of the token before it: projection of
// [embedding_norm(embedding), state_norm(state)].
struct PairInput {
    Norm embedding_norm, state_norm;
    Linear projection;  // without a bias
};

constexpr int MAX_PROJECTIONS = 6;
constexpr int MAX_VALUES_FROM_KEYS = 1024;

struct Layer {
    Norm attention_norm, query_norm, key_norm, value_norm, post_attention_norm, mlp_norm, post_mlp_norm;
    Linear projections[MAX_PROJECTIONS], output, inner[2], down;
    int64_t projection_count, inner_count;
    Heads queries, keys, values;
    Heads gates;                     // the attention output is multiplied by their sigmoid; count 0: no gates
    const LatentAttention *latents;  // or null; with it `queries` is [key width | rotary width] a head, before absorption, and
                                     // `keys` and `values` are of cells
    const DeltaRule *delta_rule;  // at most one of these three is set, and replaces attention
    const GatedConvolution *gated_convolution;
    const StateSpace *state_space;
    int64_t stores_cells;              // whether keys and values are written; else the cells are an earlier layer's
    int64_t values_are_keys;           // values are keys before their norm, of at most MAX_VALUES_FROM_KEYS columns
    int64_t norms_all_heads;           // query_norm and key_norm are over all heads of a row at once, which are contiguous
    int64_t rotates_before_norm;       // rotary embedding comes before the norms of the heads
    int64_t gate_matrix, gate_offset;  // columns of the inner outputs that are activated
    int64_t up_matrix, up_offset;      // columns that multiply them; matrix -1: none
    Activation activation;
    const Experts *experts;  // or null; with experts there may be no inner matrices
    int64_t parallel;
    const PerLayerBlock *per_layer;                      // or null; not in parallel layers
    float attention_residual_scale, mlp_residual_scale;  // multiply an output before it is added to the states
    float output_scale;                                  // multiplies the states after the layer
    const float *sinks;                                  // [queries.count], or null
    float scale, softcap;                                // of the scores; softcap 0: none
    int64_t rotary, cell_group;                          // indices into the arrays of Step
    KVBuffer key_buffer, value_buffer;
    AttentionRangeKind attention_range;
    int64_t attention_range_size;
};

struct Step {
    const int64_t *tokens;  // [rows]
    int64_t rows, width;
    Embedding embedding;
    const PerLayerInputs *per_layer_inputs;  // or null
    const PairInput *pair_input;             // or null
    const float *initial_states;             // [rows][width] before the first layer; null: the embeddings; of pairs: the states
    const float *features;                   // [feature_layers][feature_count][width], added to the states after the first layers
    const int64_t *feature_rows;             // [rows], of the features of a layer; -1: none
    int64_t feature_layers, feature_count;
    const Layer *layers;
    int64_t layer_count;
    const Rotary *rotaries;
    const int64_t *rotary_rows;  // [rows], row of each token in the rotary tables; null: its position
    const CellGroup *cell_groups;
    int64_t cell_group_count;
    const StateRange *state_ranges;  // of recurrent layers
    int64_t state_range_count;
    const AdapterRange *adapter_ranges;  // ascending; rows outside of them have no adapter
    int64_t adapter_range_count, max_rank;
    Format format;  // of all KV buffers
    Norm final_norm;
    Linear head;
    const int64_t *output_rows;         // rows whose hidden states after the final norm are written
    int64_t output_count, logit_count;  // the first `logit_count` of them get logits too
    float *hidden_states;               // [output_count][width]
    const int64_t *state_layers;        // layers after which the states of the rows without logits are written too
    int64_t state_layer_count;
    float *layer_states;                // [state_layer_count][output_count - logit_count][width]
    float *logits;                      // [logit_count][outputs of the head]
    int64_t rounds_to_bfloat16;         // rows may be rounded to bfloat16 for products with bfloat16 weights, keys and values
    int64_t threads;
};

// Sets the products of quantised weights, for all later calls (linear.h).
extern "C" void cellar_set_products(MultiplyBlocks *products);

extern "C" int64_t cellar_step(const Step *step);

// How tokens of one sequence are sampled (sampling.h); `length` and `count` belong to a draft loop only.
struct SamplingContext {
    int64_t length, count;   // tokens to compute first; tokens to sample
    int64_t seed, position;  // of the noise of the first sampled token
    double temperature;      // 0: greedy
    int64_t top_k;           // 0: off
    double top_p, min_p;     // off: 1 and 0
};

// Several steps in one call (draft_loop.h): every sequence computes its tokens, then samples and computes one token a step.
// `step` has one segment for each sequence with the rows of all steps, but neither tokens nor output rows. Cells of rows that
// are not reached (after logits that are not finite) stay unwritten. With a pair input, `initial_states` of `step` are those of
// the tokens computed first; each later token is paired with the hidden state that it was sampled from.
struct DraftLoop {
    const Step *step;
    const SamplingContext *contexts;  // [sequence_count]
    int64_t sequence_count;
    const int64_t *tokens;        // computed first, of all sequences
    float logits_scale, softcap;  // as in DecoderSpec.output_head; softcap 0: none
    int64_t vocabulary;           // only the first `vocabulary` tokens are sampled; all of them have embeddings
    int64_t max_count;            // the largest count
    int64_t *sampled;             // [sequence_count][max_count]; -1 from a row on whose logits have no finite maximum
};

extern "C" int64_t cellar_draft_loop(const DraftLoop *loop);

// Rows of logits to sample from (sampling.h).
struct SamplingCall {
    const SamplingContext *contexts;  // [rows]
    int64_t rows;
    const float *logits;  // [rows][outputs]
    int64_t outputs;
    int64_t *sampled;  // [rows]; -1 where a row has no finite maximum
    int64_t threads;
};

extern "C" int64_t cellar_sample(const SamplingCall *call);
