// The native step (step.h), for one instruction set: the compiler's flags say which.
//
// One team of threads goes through all layers; a loop over rows, heads or outputs is shared out, and all meet behind it.
// Each row is computed as if it were alone, in an order that neither its neighbours nor the threads change.
#include "step.h"

#include <optional>

#include "chain.h"
#include "delta.h"
#include "entry.h"
#include "experts.h"
#include "matrices.h"
#include "rows.h"
#include "space.h"
#include "work.h"

namespace {

// The most numbers that any layer needs of each kind.
struct Sizes {
    int64_t projected = 0, attended = 0, inner = 0, activated = 0, columns = 0, work = 0, mixture = 0, recurrence = 0;
};

template <class Tiles>
class Walk {
    typedef typename Tiles::Element Element;

  public:
    explicit Walk(const Step &step) : step(step), rows(step.rows), sizes(measure()) {}

    // Bytes of memory that `begin` needs.
    int64_t size() const {
        const int64_t numbers = rows * (5 * step.width + 1 + sizes.projected + sizes.attended + sizes.inner + sizes.activated);
        return numbers * sizeof(float) + sizes.work + step.cells_count * rows * sizeof(int64_t) +
               Multiplier::size(most_rows(), sizes.columns) + sizes.mixture + Sequences::size(step) +
               sizes.recurrence + Entry::size(step) + 4096;
    }

    void begin(char *memory) {
        Slices slices(memory);
        const auto take = [&](int64_t bytes) { return slices.take<char>(bytes); };
        const auto numbers = [&](int64_t count) { return slices.take<float>(count); };
        entry = Entry(step, take(Entry::size(step)));
        normed = numbers(rows * step.width), beside = numbers(rows * step.width);
        attention_made = numbers(rows * step.width), mlp_made = numbers(rows * step.width);
        projected = numbers(rows * sizes.projected), attended = numbers(rows * sizes.attended);
        inner = numbers(rows * sizes.inner), activated = numbers(rows * sizes.activated);
        mixed = numbers(rows * step.width), shares = numbers(rows);
        mixture = Mixture(take(sizes.mixture));
        sequences = Sequences(step, take(Sequences::size(step)));
        recurrence_memory = (float *)take(sizes.recurrence);
        work_memory = take(sizes.work);
        char *const own = take(Multiplier::size(most_rows(), sizes.columns));
        multiplier = Multiplier(own, most_rows(), sizes.columns, step.rounds);
        targets = slices.take<int64_t>(step.cells_count * rows);
        for (int64_t at = 0; at < step.cells_count; ++at) find_targets(step.cells[at], targets + at * rows);
    }

    // To be run by all threads of a team.
    void run() {
        entry.run();
        for (int64_t at = 0; at < step.layer_count; ++at) {
            const Layer &layer = step.layers[at];
            enter(layer, at > 0 ? &step.layers[at - 1] : nullptr);
            if (layer.delta)
                Recurrence(step, sequences, layer, recurrence_memory).run(projected, attended);
            else if (layer.space)
                Remembrance(step, sequences, layer, recurrence_memory).run(projected, attended);
            else if (layer.sieve)
                sift(step, sequences, layer, recurrence_memory, projected, attended);
            else
                attend(layer);
            multiplier.multiply(&layer.output, 1, attended, attention_made, rows);
            if (!layer.parallel) go_on(layer);
            feed(layer);
        }
        leave(step.layers[step.layer_count - 1]);
    }

  private:
    Sizes measure() const {
        Sizes most;
        for (int64_t at = 0; at < step.layer_count; ++at) {
            const Layer &layer = step.layers[at];
            most.projected = larger(most.projected, outputs(layer.projections, layer.projection_count));
            most.attended = larger(most.attended, layer.output.columns);
            most.inner = larger(most.inner, outputs(layer.inner, layer.inner_count));
            most.activated = larger(most.activated, layer.down.columns);
            if (layer.experts) most.mixture = larger(most.mixture, Mixture::size(*layer.experts, rows));
            most.columns = larger(most.columns, larger(larger(step.width, layer.output.columns), layer.down.columns));
            if (layer.delta)
                most.recurrence = larger(most.recurrence, Recurrence::size(step, *layer.delta));
            else if (layer.space)
                most.recurrence = larger(most.recurrence, Remembrance::size(step, *layer.space));
            else if (layer.sieve)
                most.recurrence = larger(most.recurrence, sieve_size(step, *layer.sieve));
            else
                most.work = larger(most.work, Work<Tiles>::size(describe(layer)));
        }
        return most;
    }

    // A row may be wanted more than once.
    int64_t most_rows() const { return larger(rows, step.wanted_count); }

    void find_targets(const Cells &cells, int64_t *to) const {
        for (int64_t at = 0; at < cells.count; ++at) {
            const Segment &segment = cells.segments[at];
            for (int64_t row = 0; row < segment.rows; ++row) {
                const int64_t place = segment.start + row - segment.first;
                to[segment.row + row] = segment.cells ? segment.cells[place] : segment.run + place;
            }
        }
    }

    // The attention of a layer, from what its projections make.
    Call describe(const Layer &layer) const {
        Call call = {};
        call.query = made_by(projected, layer.projections, layer.queries.matrix, rows) + layer.queries.offset;
        call.query_head_stride = layer.queries.stride;
        call.query_row_stride = layer.projections[layer.queries.matrix].outputs;
        call.output = attended;
        call.segments = step.cells[layer.cells].segments, call.segment_count = step.cells[layer.cells].count;
        call.heads = layer.queries.count, call.key_heads = layer.keys.count, call.cells = step.cells[layer.cells].cells;
        call.keys = layer.key_plane, call.values = layer.value_plane, call.format = step.format;
        call.reach = layer.reach, call.reach_size = layer.reach_size;
        call.scale = layer.scale, call.softcap = layer.softcap, call.sinks = layer.sinks;
        call.threads = step.threads;
        return call;
    }

    // Add to a row's states what a half of a layer made of them, which is overwritten.
    void add(float *made, const Linear &last, const Norm &after, float share, int64_t row) const {
        float *states = entry.states + row * step.width, *own = made + row * step.width;
        if (after.kind == NO_NORM && share == 1) return add_row(states, own, last.bias, step.width);
        if (last.bias) add_row(own, last.bias, nullptr, step.width);
        if (after.kind != NO_NORM) normalise(after, own, own);
        for (int64_t at = 0; at < step.width; ++at) states[at] += share * own[at];
    }

    // What the layer before has left to be added to a row's states.
    void settle(const Layer *before, int64_t row) const {
        if (!before) return;
        if (before->parallel) add(attention_made, before->output, before->after_attention, before->attention_share, row);
        add(mlp_made, before->down, before->after_mlp, before->mlp_share, row);
    }

    // The states of all rows behind a norm, which may be none.
    const float *behind(const Norm &norm, const float *normed) const { return norm.kind == NO_NORM ? entry.states : normed; }

    void enter(const Layer &layer, const Layer *before) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            settle(before, row);
            const float *states = entry.states + row * step.width;
            if (layer.before_attention.kind != NO_NORM) normalise(layer.before_attention, states, normed + row * step.width);
            if (layer.parallel && layer.before_mlp.kind != NO_NORM)
                normalise(layer.before_mlp, states, beside + row * step.width);
        }
        multiplier.multiply(layer.projections, layer.projection_count, behind(layer.before_attention, normed), projected, rows);
    }

    void go_on(const Layer &layer) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            add(attention_made, layer.output, layer.after_attention, layer.attention_share, row);
            if (layer.before_mlp.kind != NO_NORM)
                normalise(layer.before_mlp, entry.states + row * step.width, normed + row * step.width);
        }
    }

    void attend(const Layer &layer) {
        const Heads *kinds[] = {&layer.queries, &layer.keys, &layer.values};
        const int64_t heads = layer.queries.count + layer.keys.count + layer.values.count;
#pragma omp single nowait
        work.emplace(describe(layer), work_memory);
        if (layer.norms_whole) norm_rows(layer);
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t number = 0; number < heads; ++number) {
                int64_t head = number, kind = 0;
                while (head >= kinds[kind]->count) head -= kinds[kind++]->count;
                make_head(layer, *kinds[kind], kind, row, head);
            }
        work->run();
        if (layer.gates.count) gate(layer);
    }

    // What attention makes, times the sigmoid of its gates.
    void gate(const Layer &layer) const {
        const Heads &heads = layer.gates;
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t head = 0; head < heads.count; ++head) {
                float *own = head_of(layer, heads, row, head), *to = attended + (row * heads.count + head) * heads.width;
                add_bias(layer, heads, own, head, heads.width);
                for (int64_t at = 0; at < heads.width; at += LANES) {
                    const int64_t count = lesser(LANES, heads.width - at);
                    const Vector weight = 1.0f / (1.0f + exponential(-load_some(own + at, count)));
                    store_some(to + at, load_some(to + at, count) * weight, count);
                }
            }
    }

    // Norms of all queries of a row at once, and of all its keys.
    void norm_rows(const Layer &layer) {
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t kind = 0; kind < 2; ++kind) {
                const Heads &heads = kind == 0 ? layer.queries : layer.keys;
                const Norm &norm = kind == 0 ? layer.of_queries : layer.of_keys;
                float *own = head_of(layer, heads, row, 0);
                add_bias(layer, heads, own, 0, norm.width);
                normalise(norm, own, own);
            }
    }

    float *head_of(const Layer &layer, const Heads &heads, int64_t row, int64_t head) const {
        return made_by(projected, layer.projections, heads.matrix, rows) + row * layer.projections[heads.matrix].outputs +
               heads.offset + head * heads.stride;
    }

    void add_bias(const Layer &layer, const Heads &heads, float *own, int64_t head, int64_t width) const {
        const float *bias = layer.projections[heads.matrix].bias;
        if (bias) add_row(own, bias + heads.offset + head * heads.stride, nullptr, width);
    }

    // One head of one row: its bias, norm and turn, and a key's or value's way to its cell.
    void make_head(const Layer &layer, const Heads &heads, int64_t kind, int64_t row, int64_t head) {
        float *own = head_of(layer, heads, row, head);
        const bool whole = kind < 2 && layer.norms_whole;
        if (!whole) add_bias(layer, heads, own, head, heads.width);
        if (kind < 2) {
            const Norm &norm = kind == 0 ? layer.of_queries : layer.of_keys;
            if (layer.turns_first) turn_head(step.turns[layer.turn], entry.positions[row], own);
            if (!whole && norm.kind != NO_NORM) normalise(norm, own, own);
            if (!layer.turns_first) turn_head(step.turns[layer.turn], entry.positions[row], own);
        }
        if (kind == 0) return;
        const Plane &plane = kind == 1 ? layer.key_plane : layer.value_plane;
        const int64_t cell = targets[layer.cells * rows + row];
        put((Element *)plane.data + head * plane.head_stride + cell * plane.cell_stride, own, heads.width);
    }

    void feed(const Layer &layer) {
        const float *from = behind(layer.before_mlp, layer.parallel ? beside : normed);
        if (layer.inner_count) feed_own(layer, from);
        if (layer.experts) feed_experts(layer, *layer.experts, from);
    }

    // What a layer's own matrices make, if it has any, is added to what its experts make.
    void feed_experts(const Layer &layer, const Experts &experts, const float *from) {
        mixture.run(experts, multiplier, from, mixed, rows);
        if (experts.share.weights) multiplier.multiply(&experts.share, 1, from, shares, rows);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const float share = experts.share.weights ? 1 / (1 + expf(-shares[row])) : 1;
            float *own = mlp_made + row * step.width;
            const float *more = mixed + row * step.width;
            for (int64_t at = 0; at < step.width; ++at) own[at] = layer.inner_count ? share * own[at] + more[at] : more[at];
        }
    }

    void feed_own(const Layer &layer, const float *from) {
        multiplier.multiply(layer.inner, layer.inner_count, from, inner, rows);
        by_kind(layer.activation, [&](auto kind) {
            multiplier.multiply_made(layer.down, activation<decltype(kind)::value>(layer), activated, mlp_made, rows);
        });
    }

    // Of what the inner matrices make.
    template <Activation KIND>
    Activated<KIND> activation(const Layer &layer) const {
        const Linear &gate = layer.inner[layer.gate_matrix];
        Activated<KIND> made = {};
        made.columns = layer.down.columns;
        made.gate = made_by(inner, layer.inner, layer.gate_matrix, rows) + layer.gate_offset, made.gate_stride = gate.outputs;
        if (gate.bias) made.gate_bias = gate.bias + layer.gate_offset;
        if (layer.up_matrix < 0) return made;
        const Linear &up = layer.inner[layer.up_matrix];
        made.up = made_by(inner, layer.inner, layer.up_matrix, rows) + layer.up_offset, made.up_stride = up.outputs;
        if (up.bias) made.up_bias = up.bias + layer.up_offset;
        return made;
    }

    void leave(const Layer &before) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) settle(&before, row);
#pragma omp for schedule(static)
        for (int64_t at = 0; at < step.kept_count; ++at)
            normalise(step.last, entry.states + step.kept[at] * step.width, step.kept_states + at * step.width);
        multiplier.multiply(&step.head, 1, step.kept_states, step.logits, step.wanted_count);
        if (!step.head.bias) return;
#pragma omp for schedule(static)
        for (int64_t at = 0; at < step.wanted_count; ++at)
            for (int64_t i = 0; i < step.head.outputs; ++i) step.logits[at * step.head.outputs + i] += step.head.bias[i];
    }

    const Step &step;
    const int64_t rows;
    const Sizes sizes;
    Entry entry;
    float *normed = nullptr, *beside = nullptr, *attention_made = nullptr, *mlp_made = nullptr;
    float *projected = nullptr, *attended = nullptr, *inner = nullptr, *activated = nullptr;
    char *work_memory = nullptr;
    std::optional<Work<Tiles>> work;  // the attention of the layer that is being computed
    float *mixed = nullptr, *shares = nullptr;
    Multiplier multiplier;
    Mixture mixture;
    Sequences sequences;
    float *recurrence_memory = nullptr;
    int64_t *targets = nullptr;
};

template <class Tiles>
int64_t take(const Step &step) {
    Walk<Tiles> walk(step);
    const Memory memory(walk.size());
    if (!memory.start) return NO_MEMORY;
    walk.begin((char *)memory.start);
#pragma omp parallel num_threads((int)step.threads)
    walk.run();
    return DONE;
}

// What of a step names nothing that is there.
Outcome check(const Step &step, const int64_t *tokens, int64_t count) {
    Call call = {};
    for (int64_t at = 0; at < step.cells_count; ++at) {
        call.segments = step.cells[at].segments, call.segment_count = step.cells[at].count, call.cells = step.cells[at].cells;
        if (!in_pool(call)) return BAD_CELL;
    }
    return are_known(step.embedding, tokens, count) ? DONE : BAD_TOKEN;
}

Links::Take taker(const Step &step) {
    if (step.format == FLOAT32) return take<FloatTiles<float>>;
    return step.rounds ? take<RoundedTiles> : take<FloatTiles<bfloat16>>;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_step(const Step *step) {
    const Outcome outcome = check(*step, step->tokens, step->rows);
    return outcome == DONE ? taker(*step)(*step) : outcome;
}

extern "C" __attribute__((visibility("default"))) int64_t cellar_chain(const Chain *chain) {
    Links links(*chain);
    const Outcome outcome = check(*chain->step, chain->tokens, links.count());
    if (outcome != DONE) return outcome;
    const Memory memory(links.size());
    if (!memory.start) return NO_MEMORY;
    links.begin(memory.start);
    return links.run(taker(*chain->step));
}

extern "C" __attribute__((visibility("default"))) int64_t cellar_choose(const Choices *choices) {
    const int64_t outputs = choices->outputs;
    const Memory memory(choices->threads * 2 * outputs * sizeof(float));
    if (!memory.start) return NO_MEMORY;
#pragma omp parallel for num_threads((int)choices->threads) schedule(dynamic) if (choices->rows > 1)
    for (int64_t row = 0; row < choices->rows; ++row) {
        float *const room = (float *)memory.start + omp_get_thread_num() * 2 * outputs;
        choices->said[row] = choose(choices->links[row], 0, choices->logits + row * outputs, outputs, room);
    }
    return DONE;
}
