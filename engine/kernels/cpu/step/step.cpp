// The native step (step.h), for one instruction set, chosen by compiler flags.
//
// One team of threads computes all layers; loops over rows, heads or outputs are distributed, with a barrier after each. Each
// row is computed independently, in an order that depends neither on the batch nor on the threads.
//
// The operations on a row between two products are done by one thread. A single row is computed by every thread, in a copy of
// its own: that is faster than a barrier.
#include "step/step.h"

#include <optional>

#include "step/draft_loop.h"
#include "step/delta_rule.h"
#include "step/embedder.h"
#include "step/experts.h"
#include "step/head_preparation.h"
#include "step/latent_attention.h"
#include "build/layout.h"
#include "step/multiplier.h"
#include "step/output_layers.h"
#include "step/row_operations.h"
#include "step/state_space.h"
#include "attention/attention_work.h"

namespace {

// The largest number of floats or bytes that a layer needs of each kind.
struct Sizes {
    int64_t projected = 0, attended = 0, inner = 0, activated = 0, columns = 0, work = 0, moe = 0, recurrence = 0, latents = 0;
    int64_t expert_rows = 0;
};

template <class Tiles>
class StepRunner {
    typedef typename Tiles::Element Element;
    typedef LatentAttentionLayer<Element> Latents;

  public:
    explicit StepRunner(const Step &step) : step(step), rows(step.rows), sizes(measure()) {}

    // Bytes of memory for `begin`.
    int64_t size() const {
        const int64_t numbers = rows * (3 * step.width + 1 + 2 * per_layer_columns() + sizes.projected + sizes.attended + sizes.inner + sizes.activated + sizes.expert_rows) +
                                copies() * (4 * step.width + pair_columns());
        return numbers * sizeof(float) + sizes.work + step.cell_group_count * rows * sizeof(int64_t) +
               Multiplier::size(most_rows(), sizes.columns) + step.threads * alone_size() + sizes.moe + Sequences::size(step) +
               sizes.recurrence + sizes.latents + Embedder::size(step) + LowRankProducts::size(step) + 4096;
    }

    void begin(char *memory) {
        Arena arena(memory);
        const auto bytes = [&](int64_t size) { return arena.allocate<char>(size); };
        const auto numbers = [&](int64_t count) { return arena.allocate<float>(count); };
        embedder = Embedder(step, bytes(Embedder::size(step)));
        states = numbers(copies() * step.width), residual_scratch = numbers(copies() * step.width);
        normed = numbers(copies() * step.width), parallel_normed = numbers(copies() * step.width);
        pairs = numbers(copies() * pair_columns());
        attention_output = numbers(rows * step.width), mlp_output = numbers(rows * step.width);
        projected = numbers(rows * sizes.projected), attended = numbers(rows * sizes.attended);
        inner = numbers(rows * sizes.inner), activated = numbers(rows * sizes.activated);
        per_layer_inputs = numbers(rows * per_layer_columns()), per_layer_rows = numbers(rows * per_layer_columns());
        experts_output = numbers(rows * step.width), shared_gates = numbers(rows);
        expert_rows = numbers(rows * sizes.expert_rows);
        moe = MixtureOfExperts(bytes(sizes.moe));
        sequences = Sequences(step, bytes(Sequences::size(step)));
        recurrence_memory = (float *)bytes(sizes.recurrence);
        latent_memory = bytes(sizes.latents);
        work_memory = bytes(sizes.work);
        adapters = LowRankProducts(step, bytes(LowRankProducts::size(step)));
        char *const multiplier_memory = bytes(Multiplier::size(most_rows(), sizes.columns));
        multiplier = Multiplier(multiplier_memory, most_rows(), sizes.columns, step.rounds_to_bfloat16, adapters);
        alone_memory = bytes(step.threads * alone_size());
        targets = arena.allocate<int64_t>(step.cell_group_count * rows);
        for (int64_t i = 0; i < step.cell_group_count; ++i) find_targets(step.cell_groups[i], targets + i * rows);
    }

    // Called by all threads of a team.
    void run() {
        by_rows([&](int64_t row) { embedder.embed(row, states_of(row)); });
        if (step.per_layer_inputs) compute_per_layer_inputs(*step.per_layer_inputs);
        if (step.pair_input)
            project_pairs(*step.pair_input);
        else if (step.initial_states)
            by_rows([&](int64_t row) {
                memcpy(states_of(row), step.initial_states + row * step.width, step.width * sizeof(float));
            });
        for (int64_t i = 0; i < step.layer_count; ++i) {
            const Layer &layer = step.layers[i];
            begin_layer(layer, i);
            if (has_mixer(layer)) mix(layer);
            if (has_mixer(layer) && has_mlp(layer) && !layer.parallel) finish_attention(layer);
            if (has_mlp(layer)) run_mlp(layer);
            if (layer.per_layer) run_per_layer(layer, *layer.per_layer);
        }
        compute_logits(step.layers[step.layer_count - 1]);
    }

  private:
    static bool has_mixer(const Layer &layer) { return layer.output.weights; }
    static bool has_mlp(const Layer &layer) { return layer.inner_count || layer.experts; }

    // The output of the first half of a layer, which is not yet added to the states.
    void mix(const Layer &layer) {
        if (layer.delta_rule)
            DeltaRuleLayer(step, sequences, layer, recurrence_memory).run(projected, attended);
        else if (layer.state_space)
            StateSpaceLayer(step, sequences, layer, recurrence_memory).run(projected, attended);
        else if (layer.gated_convolution)
            run_gated_convolution(step, sequences, layer, recurrence_memory, projected, attended);
        else if (layer.latents)
            attend_latents(layer);
        else
            attend(layer);
        multiply(&layer.output, 1, attended, attention_output, rows);
    }

    Sizes measure() const {
        Sizes largest;
        largest.columns = pair_columns();
        for (int64_t i = 0; i < step.layer_count; ++i) {
            const Layer &layer = step.layers[i];
            largest.projected = larger(largest.projected, outputs(layer.projections, layer.projection_count));
            largest.attended = larger(largest.attended, layer.output.columns);
            largest.inner = larger(largest.inner, outputs(layer.inner, layer.inner_count));
            largest.activated = larger(largest.activated, layer.down.columns);
            if (layer.per_layer) {
                largest.inner = larger(largest.inner, layer.per_layer->gate.outputs);
                largest.activated = larger(largest.activated, layer.per_layer->projection.columns);
                largest.columns = larger(largest.columns, layer.per_layer->projection.columns);
            }
            if (layer.latents) {
                largest.latents = larger(largest.latents, Latents::size(step, layer));
                largest.columns = larger(largest.columns, layer.latents->query_expansion.columns);
            }
            if (layer.experts && layer.experts->norms) largest.expert_rows = 2 * step.width;
            if (layer.experts) largest.moe = larger(largest.moe, MixtureOfExperts::size(*layer.experts, rows));
            largest.columns = larger(largest.columns, larger(larger(step.width, layer.output.columns), layer.down.columns));
            if (layer.delta_rule)
                largest.recurrence = larger(largest.recurrence, DeltaRuleLayer::size(step, *layer.delta_rule));
            else if (layer.state_space)
                largest.recurrence = larger(largest.recurrence, StateSpaceLayer::size(step, *layer.state_space));
            else if (layer.gated_convolution)
                largest.recurrence = larger(largest.recurrence, gated_convolution_size(step, *layer.gated_convolution));
            else if (has_mixer(layer))
                largest.work = larger(largest.work, AttentionWork<Tiles>::size(describe(layer)));
        }
        return largest;
    }

    // A row may be in `output_rows` more than once.
    int64_t most_rows() const { return larger(rows, step.logit_count); }

    // Columns of the per-layer inputs of a row.
    int64_t per_layer_columns() const { return step.per_layer_inputs ? step.per_layer_inputs->projection.outputs : 0; }

    // Columns of the input of the projection of pairs.
    int64_t pair_columns() const { return step.pair_input ? step.pair_input->projection.columns : 0; }

    // Copies of the hidden states, and the index of a row's copy for this thread.
    int64_t copies() const { return rows == 1 ? step.threads : rows; }
    int64_t place(int64_t row) const { return rows == 1 ? omp_get_thread_num() : row; }
    float *states_of(int64_t row) const { return states + place(row) * step.width; }

    // function(row) for all rows; a single row is computed by every thread.
    template <class Function>
    void by_rows(Function function) const {
        if (rows == 1) return function(0);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) function(row);
    }

    int64_t alone_size() const { return Multiplier::size(1, sizes.columns); }

    // Rows times matrices; `from` is complete before.
    void multiply(const Linear *matrices, int64_t count, const float *from, float *to, int64_t rows) const {
        if (rows != 1) return multiplier.multiply(matrices, count, from, to, rows);
        alone().multiply_alone(matrices, count, from, to);
    }

    // This thread's multiplier for a single row.
    Multiplier alone() const {
        char *const memory = alone_memory + omp_get_thread_num() * alone_size();
        return Multiplier(memory, 1, sizes.columns, step.rounds_to_bfloat16, adapters);
    }

    void find_targets(const CellGroup &cells, int64_t *to) const {
        for (int64_t i = 0; i < cells.count; ++i) {
            const Segment &segment = cells.segments[i];
            for (int64_t row = 0; row < segment.rows; ++row) {
                const int64_t place = segment.start + row - segment.first;
                to[segment.row + row] = segment.cells ? segment.cells[place] : segment.first_cell + place;
            }
        }
    }

    // The attention call of a layer, with queries from the outputs of its projections.
    AttentionCall describe(const Layer &layer) const {
        AttentionCall call = {};
        if (layer.latents) {
            latents(layer).describe(call);
        } else {
            call.query = output_of(projected, layer.projections, layer.queries.matrix, rows) + layer.queries.offset;
            call.query_head_stride = layer.queries.stride;
            call.query_row_stride = layer.projections[layer.queries.matrix].outputs;
            call.output = attended;
        }
        call.segments = step.cell_groups[layer.cell_group].segments,
        call.segment_count = step.cell_groups[layer.cell_group].count;
        call.heads = layer.queries.count, call.key_heads = layer.keys.count,
        call.cells = step.cell_groups[layer.cell_group].cells;
        call.keys = layer.key_buffer, call.values = layer.value_buffer, call.format = step.format;
        call.attention_range = layer.attention_range, call.attention_range_size = layer.attention_range_size;
        call.scale = layer.scale, call.softcap = layer.softcap, call.sinks = layer.sinks;
        call.threads = step.threads;
        return call;
    }

    // Add an output of a layer to the hidden states of a row.
    void add(const float *output, const Linear &projection, const Norm &post_norm, float residual_scale, int64_t row) const {
        float *const states = states_of(row), *const addend = residual_scratch + place(row) * step.width;
        if (post_norm.kind == NO_NORM && residual_scale == 1)
            return add_row(states, output + row * step.width, projection.bias, step.width);
        memcpy(addend, output + row * step.width, step.width * sizeof(float));
        if (projection.bias) add_row(addend, projection.bias, nullptr, step.width);
        if (post_norm.kind != NO_NORM) normalise(post_norm, addend, addend);
        for (int64_t i = 0; i < step.width; ++i) states[i] += residual_scale * addend[i];
    }

    // Add the outputs of the layer before to the hidden states of a row.
    void add_outputs(const Layer *before, int64_t row) const {
        if (!before) return;
        if (before->parallel || !has_mlp(*before))
            add(attention_output, before->output, before->post_attention_norm, before->attention_residual_scale, row);
        if (before->per_layer)
            add(mlp_output, before->per_layer->projection, before->per_layer->norm, 1, row);
        else if (has_mlp(*before))
            add(mlp_output, before->down, before->post_mlp_norm, before->mlp_residual_scale, row);
        if (before->output_scale == 1) return;
        float *const states = states_of(row);
        for (int64_t i = 0; i < step.width; ++i) states[i] *= before->output_scale;
    }

    void compute_per_layer_inputs(const PerLayerInputs &inputs) const {
        const int64_t columns = per_layer_columns(), width = inputs.norm.width, count = columns / width;
        multiply(&inputs.projection, 1, states_of(0), per_layer_inputs, rows);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row)
            Embedder::embed(inputs.table, step.tokens[row], columns, per_layer_rows + row * columns);
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t layer = 0; layer < count; ++layer) {
                const int64_t offset = row * columns + layer * width;
                float *slice = per_layer_inputs + offset, *token = per_layer_rows + offset;
                for (int64_t i = 0; i < width; ++i) slice[i] *= inputs.projection_scale;
                normalise(inputs.norm, slice, slice);
                for (int64_t i = 0; i < width; ++i) slice[i] = inputs.scale * (slice[i] + token[i]);
            }
    }

    void project_pairs(const PairInput &input) const {
        by_rows([&](int64_t row) {
            float *const pair = pairs + place(row) * pair_columns();
            normalise(input.embedding_norm, states_of(row), pair);
            normalise(input.state_norm, step.initial_states + row * step.width, pair + step.width);
        });
        multiply(&input.projection, 1, pairs + place(0) * pair_columns(), attention_output, rows);
        by_rows([&](int64_t row) { memcpy(states_of(row), attention_output + row * step.width, step.width * sizeof(float)); });
    }

    // The third part of a layer. Its output replaces that of the second one, which is added to the states.
    void run_per_layer(const Layer &layer, const PerLayerBlock &block) const {
        by_rows([&](int64_t row) { add(mlp_output, layer.down, layer.post_mlp_norm, layer.mlp_residual_scale, row); });
        multiply(&block.gate, 1, states_of(0), inner, rows);
        for_activation(block.activation, [&](auto kind) {
            Activated<decltype(kind)::value> source = {};
            source.columns = block.projection.columns, source.gate = inner, source.gate_stride = block.gate.outputs;
            source.gate_bias = block.gate.bias, source.up_stride = per_layer_columns();
            source.up = per_layer_inputs + block.layer * block.projection.columns;
            multiplier.multiply_source(block.projection, source, activated, mlp_output, rows);
        });
    }

    // The states of all rows after a norm, or without one.
    const float *after_norm(const Norm &norm, const float *normed) const {
        return (norm.kind == NO_NORM ? states : normed) + place(0) * step.width;
    }

    void normalise_states(const Norm &norm, int64_t row, float *to) const {
        if (norm.kind != NO_NORM) normalise(norm, states_of(row), to + place(row) * step.width);
    }

    // Write the states after a layer, which no thread changes before the next barrier.
    void write_states(int64_t layer) const {
        const int64_t count = step.output_count - step.logit_count;
        for (int64_t index = 0; index < step.state_layer_count; ++index) {
            if (step.state_layers[index] != layer) continue;
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < count; ++i)
                memcpy(step.layer_states + (index * count + i) * step.width, states_of(step.output_rows[step.logit_count + i]),
                       step.width * sizeof(float));
        }
    }

    void add_features(int64_t layer, int64_t row) const {
        if (layer < 0 || layer >= step.feature_layers || step.feature_rows[row] < 0) return;
        const float *const from = step.features + (layer * step.feature_count + step.feature_rows[row]) * step.width;
        float *const to = states_of(row);
        for (int64_t i = 0; i < step.width; ++i) to[i] += from[i];
    }

    void begin_layer(const Layer &layer, int64_t number) {
        const Layer *const before = number > 0 ? &step.layers[number - 1] : nullptr;
        by_rows([&](int64_t row) {
            add_outputs(before, row);
            add_features(number - 1, row);
            normalise_states(has_mixer(layer) ? layer.attention_norm : layer.mlp_norm, row, normed);
            if (layer.parallel) normalise_states(layer.mlp_norm, row, parallel_normed);
        });
        if (before) write_states(number - 1);
        if (!has_mixer(layer)) return;
        if (layer.queries.count) {
            // Read after the barrier of the projections.
#pragma omp single nowait
            work.emplace(describe(layer), work_memory);
        }
        multiply(layer.projections, layer.projection_count, after_norm(layer.attention_norm, normed), projected, rows);
    }

    void finish_attention(const Layer &layer) {
        by_rows([&](int64_t row) {
            add(attention_output, layer.output, layer.post_attention_norm, layer.attention_residual_scale, row);
            normalise_states(layer.mlp_norm, row, normed);
        });
    }

    void attend(const Layer &layer) {
        const HeadPreparation<Element> heads(step, layer, embedder, targets + layer.cell_group * rows, projected);
        if (heads.is_by_groups() && work->is_by_heads()) {
            work->run([&](int64_t head) { heads.prepare_group(head); });
        } else {
            heads.run();
            work->run();
        }
        if (layer.gates.count) heads.gate(attended);
    }

    Latents latents(const Layer &layer) const {
        const int64_t *layer_targets = targets + layer.cell_group * rows;
        return Latents(step, layer, embedder, layer_targets, projected, latent_memory, multiplier.rounds_to_bfloat16);
    }

    void attend_latents(const Layer &layer) {
        const Latents layer_latents = latents(layer);
        layer_latents.prepare([&](const Linear &matrix, const float *from, float *to) { multiply(&matrix, 1, from, to, rows); });
        work->run();
        layer_latents.project(attended);
    }

    void run_mlp(const Layer &layer) {
        const float *from = after_norm(layer.mlp_norm, layer.parallel ? parallel_normed : normed);
        if (layer.inner_count) run_dense(layer, from);
        if (layer.experts) run_experts(layer, *layer.experts, from);
    }

    // Add the experts' output to that of the dense MLP, if the layer has one.
    void run_experts(const Layer &layer, const Experts &experts, const float *from) {
        const ExpertNorms *const norms = experts.norms;
        const float *const routed = norms ? expert_rows + rows * step.width : from;
        if (norms) {
            from = expert_rows;
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) {
                float *const input = expert_rows + row * step.width;
                normalise_or_copy(norms->input, states_of(row), input, step.width);
                normalise_or_copy(norms->router, states_of(row), input + rows * step.width, step.width);
            }
        }
        moe.run(experts, multiplier, routed, from, experts_output, rows);
        if (experts.shared_gate.weights) multiply(&experts.shared_gate, 1, from, shared_gates, rows);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const float share = experts.shared_gate.weights ? 1 / (1 + expf(-shared_gates[row])) : 1;
            float *output = mlp_output + row * step.width, *more = experts_output + row * step.width;
            if (norms) {
                normalise_or_copy(norms->dense, output, output, step.width);
                normalise_or_copy(norms->output, more, more, step.width);
            }
            for (int64_t i = 0; i < step.width; ++i) output[i] = layer.inner_count ? share * output[i] + more[i] : more[i];
        }
    }

    void run_dense(const Layer &layer, const float *from) {
        for_activation(layer.activation, [&](auto kind) {
            const auto source = activation<decltype(kind)::value>(layer);
            if (is_by_groups(layer)) return run_dense_alone(layer, source, from);
            multiply(layer.inner, layer.inner_count, from, inner, rows);
            multiplier.multiply_source(layer.down, source, activated, mlp_output, rows);
        });
    }

    // Whether the input of `down` is a single row that threads can quantise in groups, with columns at the start of blocks.
    bool is_by_groups(const Layer &layer) const {
        return rows == 1 && layer.down.kind >= WEIGHTS_INT8 && layer.down.columns % GROUP == 0 &&
               layer.gate_offset % OUTPUTS == 0 && (layer.up_matrix < 0 || layer.up_offset % OUTPUTS == 0) &&
               !adapters.change(layer.inner, layer.inner_count) && !adapters.change(&layer.down, 1);
    }

    // Each thread computes the gates and ups that it activates, so there is no barrier between them.
    template <class Source>
    void run_dense_alone(const Layer &layer, const Source &source, const float *from) const {
        const int64_t groups = layer.down.columns / GROUP, thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t first = groups * thread / threads, last = groups * (thread + 1) / threads;
        const Multiplier multiplier_alone = alone();
        const auto multiply = [&](int64_t matrix, int64_t offset) {
            multiplier_alone.multiply_outputs(layer.inner[matrix], offset + first * GROUP, offset + last * GROUP, from,
                                 output_of(inner, layer.inner, matrix, rows));
        };
        multiplier_alone.prepare_alone(layer.inner, layer.inner_count, from);
        multiply(layer.gate_matrix, layer.gate_offset);
        if (layer.up_matrix >= 0) multiply(layer.up_matrix, layer.up_offset);
        multiplier.quantise_groups(layer.down, source, first, last);
#pragma omp barrier
        multiplier.multiply_prepared(layer.down, mlp_output);
    }

    // The activation of the inner outputs.
    template <Activation KIND>
    Activated<KIND> activation(const Layer &layer) const {
        const Linear &gate = layer.inner[layer.gate_matrix];
        Activated<KIND> source = {};
        source.columns = layer.down.columns;
        source.gate = output_of(inner, layer.inner, layer.gate_matrix, rows) + layer.gate_offset, source.gate_stride = gate.outputs;
        if (gate.bias) source.gate_bias = gate.bias + layer.gate_offset;
        if (layer.up_matrix < 0) return source;
        const Linear &up = layer.inner[layer.up_matrix];
        source.up = output_of(inner, layer.inner, layer.up_matrix, rows) + layer.up_offset, source.up_stride = up.outputs;
        if (up.bias) source.up_bias = up.bias + layer.up_offset;
        return source;
    }

    void compute_logits(const Layer &before) {
        by_rows([&](int64_t row) {
            add_outputs(&before, row);
            add_features(step.layer_count - 1, row);
        });
        write_states(step.layer_count - 1);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < step.output_count; ++index)
            normalise(step.final_norm, states_of(step.output_rows[index]), step.hidden_states + index * step.width);
        multiply(&step.head, 1, step.hidden_states, step.logits, step.logit_count);
        if (!step.head.bias) return;
#pragma omp for schedule(static)
        for (int64_t index = 0; index < step.logit_count; ++index)
            for (int64_t i = 0; i < step.head.outputs; ++i) step.logits[index * step.head.outputs + i] += step.head.bias[i];
    }

    const Step &step;
    const int64_t rows;
    const Sizes sizes;
    Embedder embedder;
    float *states = nullptr, *residual_scratch = nullptr, *normed = nullptr, *parallel_normed = nullptr;  // `copies` each
    float *pairs = nullptr;  // [copies][pair_columns]
    float *attention_output = nullptr, *mlp_output = nullptr;
    float *projected = nullptr, *attended = nullptr, *inner = nullptr, *activated = nullptr;
    char *work_memory = nullptr;
    std::optional<AttentionWork<Tiles>> work;  // of the current layer
    float *per_layer_inputs = nullptr, *per_layer_rows = nullptr;
    float *experts_output = nullptr, *shared_gates = nullptr;
    float *expert_rows = nullptr;  // normed inputs of the experts, then those of the router
    LowRankProducts adapters;
    Multiplier multiplier;
    char *alone_memory = nullptr;  // of each thread's multiplier for a single row
    MixtureOfExperts moe;
    Sequences sequences;
    float *recurrence_memory = nullptr;
    char *latent_memory = nullptr;
    int64_t *targets = nullptr;
};

template <class Tiles>
int64_t run_layers(const Step &step) {
    StepRunner<Tiles> runner(step);
    const Memory memory(runner.size());
    if (!memory.start) return NO_MEMORY;
    runner.begin((char *)memory.start);
#pragma omp parallel num_threads((int)step.threads)
    runner.run();
    return DONE;
}

template <class Tiles>
int64_t run_step(const Step &step) {
    if (!OutputLayers::apply(step)) return run_layers<Tiles>(step);
    const Memory memory(OutputLayers::size(step));
    if (!memory.start) return NO_MEMORY;
    const OutputLayers parts(step, (char *)memory.start);
    const int64_t outcome = run_layers<Tiles>(parts.lower);
    return outcome == DONE && step.output_count ? run_layers<Tiles>(parts.upper) : outcome;
}

// Check the cells and tokens of a step.
Outcome check(const Step &step, const int64_t *tokens, int64_t count) {
    AttentionCall call = {};
    for (int64_t i = 0; i < step.cell_group_count; ++i) {
        call.segments = step.cell_groups[i].segments, call.segment_count = step.cell_groups[i].count,
        call.cells = step.cell_groups[i].cells;
        if (!in_pool(call)) return BAD_CELL;
    }
    if (step.per_layer_inputs && !are_in_vocabulary(step.per_layer_inputs->table, tokens, count)) return BAD_TOKEN;
    return are_in_vocabulary(step.embedding, tokens, count) ? DONE : BAD_TOKEN;
}

DraftLoopRunner::RunStep step_function(const Step &step) {
    if (step.format == FLOAT32) return run_step<FloatTiles<float>>;
    if (step.format == INT8) return run_step<FloatTiles<int8_t>>;
    return step.rounds_to_bfloat16 ? run_step<RoundedTiles> : run_step<FloatTiles<bfloat16>>;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void cellar_set_products(MultiplyBlocks *products) {
    multiply_blocks = products;
}

extern "C" __attribute__((visibility("default"))) int64_t cellar_step(const Step *step) {
    const Outcome outcome = check(*step, step->tokens, step->rows);
    return outcome == DONE ? step_function(*step)(*step) : outcome;
}

extern "C" __attribute__((visibility("default"))) int64_t cellar_draft_loop(const DraftLoop *loop) {
    DraftLoopRunner runner(*loop);
    const Outcome outcome = check(*loop->step, loop->tokens, runner.count());
    if (outcome != DONE) return outcome;
    const Memory memory(runner.size());
    if (!memory.start) return NO_MEMORY;
    runner.begin(memory.start);
    return runner.run(step_function(*loop->step));
}

extern "C" __attribute__((visibility("default"))) int64_t cellar_sample(const SamplingCall *call) {
    const int64_t outputs = call->outputs;
    const Memory memory(call->threads * 2 * outputs * sizeof(float));
    if (!memory.start) return NO_MEMORY;
#pragma omp parallel for num_threads((int)call->threads) schedule(dynamic) if (call->rows > 1)
    for (int64_t row = 0; row < call->rows; ++row) {
        float *const scratch = (float *)memory.start + omp_get_thread_num() * 2 * outputs;
        call->sampled[row] = sample(call->contexts[row], 0, call->logits + row * outputs, outputs, scratch);
    }
    return DONE;
}

EXPORT_LAYOUT(
    LAYOUT(Segment, row, rows, start, first, first_cell, cells)
    LAYOUT(KVBuffer, data, scales, width, head_stride, cell_stride, scale_head_stride, scale_cell_stride, part_width)
    LAYOUT(Linear, weights, scales, bias, kind, outputs, columns, stride, low_rank)
    LAYOUT(LowRank, down, up, kind, rank)
    LAYOUT(AdapterRange, row, rows, factors)
    LAYOUT(Norm, weight, bias, kind, width, epsilon)
    LAYOUT(Heads, matrix, offset, stride, count, width)
    LAYOUT(Embedding, table, scales, kind, count, rounds_to_bfloat16, scale)
    LAYOUT(Rotary, cosine, sine, query_factors, pairs, offset, interleaved)
    LAYOUT(CellGroup, segments, count, cells)
    LAYOUT(ExpertNorms, router, input, output, dense)
    LAYOUT(Experts, router, score_correction, scoring, top_k, normalised, scales_inputs, scaling_factor, expert_scales,
           inner, up, down, activation, interleaved, limit, slope, shift, shared_gate, norms)
    LAYOUT(StateRange, row, rows, span)
    LAYOUT(ColumnRange, matrix, offset, target, count)
    LAYOUT(Convolution, weights, bias, kernel, channels, states_before, states_after)
    LAYOUT(DeltaRule, ranges, range_count, convolution, key_heads, value_heads, key_width, value_width, decay_scale,
           dt_bias, max_beta, head_norm, states_before, states_after)
    LAYOUT(StateSpace, ranges, range_count, convolution, heads, groups, value_width, key_width, decay_scale, dt_bias,
           skip, min_dt, max_dt, group_norm, states_before, states_after)
    LAYOUT(LatentAttention, query_norm, query_expansion, latents, latent_norm, rotary_columns, separates_pairs, keys, values)
    LAYOUT(GatedConvolution, ranges, range_count, convolution)
    LAYOUT(PerLayerBlock, gate, projection, activation, norm, layer)
    LAYOUT(PerLayerInputs, table, projection, projection_scale, norm, scale)
    LAYOUT(PairInput, embedding_norm, state_norm, projection)
    LAYOUT(Layer, attention_norm, query_norm, key_norm, value_norm, post_attention_norm, mlp_norm, post_mlp_norm, projections,
           output, inner, down, projection_count, inner_count, queries, keys, values, gates, latents, delta_rule,
           gated_convolution, state_space, stores_cells, values_are_keys, norms_all_heads, rotates_before_norm, gate_matrix, gate_offset, up_matrix,
           up_offset, activation, experts, parallel, per_layer, attention_residual_scale, mlp_residual_scale, output_scale, sinks, scale,
           softcap, rotary, cell_group, key_buffer, value_buffer, attention_range, attention_range_size)
    LAYOUT(Step, tokens, rows, width, embedding, per_layer_inputs, pair_input, initial_states, features, feature_rows,
           feature_layers, feature_count, layers, layer_count, rotaries, rotary_rows, cell_groups,
           cell_group_count, state_ranges, state_range_count, adapter_ranges, adapter_range_count, max_rank, format, final_norm, head, output_rows, output_count,
           logit_count, hidden_states, state_layers, state_layer_count, layer_states, logits, rounds_to_bfloat16,
           threads)
    LAYOUT(SamplingContext, length, count, seed, position, temperature, top_k, top_p, min_p)
    LAYOUT(DraftLoop, step, contexts, sequence_count, tokens, logits_scale, softcap, vocabulary, max_count, sampled)
    LAYOUT(SamplingCall, contexts, rows, logits, outputs, sampled, threads))
