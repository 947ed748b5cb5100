// The native step (step.h), for one instruction set: the compiler's flags say which.
//
// One team of threads goes through all layers; a loop over rows, heads or outputs is shared out, and all meet behind it.
// Each row is computed as if it were alone, in an order that neither its neighbours nor the threads change.
//
// What is done to a row between two products is done by one thread. Where there is but one row, every thread does it for
// itself, to a copy of its own: that takes less time than to wait for who does.
#include "step.h"

#include <optional>

#include "chain.h"
#include "delta.h"
#include "entry.h"
#include "experts.h"
#include "heads.h"
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
        const int64_t numbers = rows * (3 * step.width + 1 + sizes.projected + sizes.attended + sizes.inner + sizes.activated) +
                                copies() * 4 * step.width;
        return numbers * sizeof(float) + sizes.work + step.cells_count * rows * sizeof(int64_t) +
               Multiplier::size(most_rows(), sizes.columns) + step.threads * alone_size() + sizes.mixture + Sequences::size(step) +
               sizes.recurrence + Entry::size(step) + 4096;
    }

    void begin(char *memory) {
        Slices slices(memory);
        const auto take = [&](int64_t bytes) { return slices.take<char>(bytes); };
        const auto numbers = [&](int64_t count) { return slices.take<float>(count); };
        entry = Entry(step, take(Entry::size(step)));
        states = numbers(copies() * step.width), spare = numbers(copies() * step.width);
        normed = numbers(copies() * step.width), beside = numbers(copies() * step.width);
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
        alone_memory = take(step.threads * alone_size());
        targets = slices.take<int64_t>(step.cells_count * rows);
        for (int64_t at = 0; at < step.cells_count; ++at) find_targets(step.cells[at], targets + at * rows);
    }

    // To be run by all threads of a team.
    void run() {
        by_rows([&](int64_t row) { entry.embed(row, states_of(row)); });
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
            multiply(&layer.output, 1, attended, attention_made, rows);
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

    // Copies of what is done to rows, and which of them is a row's for this thread.
    int64_t copies() const { return rows == 1 ? step.threads : rows; }
    int64_t place(int64_t row) const { return rows == 1 ? omp_get_thread_num() : row; }
    float *states_of(int64_t row) const { return states + place(row) * step.width; }

    // Run work(row) for all rows; a row alone is every thread's.
    template <class Work>
    void by_rows(Work work) const {
        if (rows == 1) return work(0);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) work(row);
    }

    int64_t alone_size() const { return Multiplier::size(1, sizes.columns); }

    // Rows times some matrices; all that `from` names is made.
    void multiply(const Linear *matrices, int64_t count, const float *from, float *to, int64_t rows) const {
        if (rows != 1) return multiplier.multiply(matrices, count, from, to, rows);
        alone().multiply_alone(matrices, count, from, to);
    }

    // This thread's multiplier of a row alone.
    Multiplier alone() const {
        return Multiplier(alone_memory + omp_get_thread_num() * alone_size(), 1, sizes.columns, step.rounds);
    }

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

    // Add to a row's states what a half of a layer made of them.
    void add(const float *made, const Linear &last, const Norm &after, float share, int64_t row) const {
        float *const states = states_of(row), *const own = spare + place(row) * step.width;
        if (after.kind == NO_NORM && share == 1) return add_row(states, made + row * step.width, last.bias, step.width);
        memcpy(own, made + row * step.width, step.width * sizeof(float));
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
    const float *behind(const Norm &norm, const float *normed) const {
        return (norm.kind == NO_NORM ? states : normed) + place(0) * step.width;
    }

    // What a norm, if it is one, makes of a row's states.
    void normalise_states(const Norm &norm, int64_t row, float *to) const {
        if (norm.kind != NO_NORM) normalise(norm, states_of(row), to + place(row) * step.width);
    }

    void enter(const Layer &layer, const Layer *before) {
        by_rows([&](int64_t row) {
            settle(before, row);
            normalise_states(layer.before_attention, row, normed);
            if (layer.parallel) normalise_states(layer.before_mlp, row, beside);
        });
        if (layer.queries.count) {
            // All threads meet behind the projections, before it is looked at.
#pragma omp single nowait
            work.emplace(describe(layer), work_memory);
        }
        multiply(layer.projections, layer.projection_count, behind(layer.before_attention, normed), projected, rows);
    }

    void go_on(const Layer &layer) {
        by_rows([&](int64_t row) {
            add(attention_made, layer.output, layer.after_attention, layer.attention_share, row);
            normalise_states(layer.before_mlp, row, normed);
        });
    }

    void attend(const Layer &layer) {
        const Making<Element> heads(step, layer, entry, targets + layer.cells * rows, projected);
        if (heads.is_by_groups() && work->is_by_heads()) {
            work->run([&](int64_t head) { heads.make_group(head); });
        } else {
            heads.run();
            work->run();
        }
        if (layer.gates.count) heads.gate(attended);
    }

    void feed(const Layer &layer) {
        const float *from = behind(layer.before_mlp, layer.parallel ? beside : normed);
        if (layer.inner_count) feed_own(layer, from);
        if (layer.experts) feed_experts(layer, *layer.experts, from);
    }

    // What a layer's own matrices make, if it has any, is added to what its experts make.
    void feed_experts(const Layer &layer, const Experts &experts, const float *from) {
        mixture.run(experts, multiplier, from, mixed, rows);
        if (experts.share.weights) multiply(&experts.share, 1, from, shares, rows);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const float share = experts.share.weights ? 1 / (1 + expf(-shares[row])) : 1;
            float *own = mlp_made + row * step.width;
            const float *more = mixed + row * step.width;
            for (int64_t at = 0; at < step.width; ++at) own[at] = layer.inner_count ? share * own[at] + more[at] : more[at];
        }
    }

    void feed_own(const Layer &layer, const float *from) {
        by_kind(layer.activation, [&](auto kind) {
            const auto made = activation<decltype(kind)::value>(layer);
            if (is_by_groups(layer)) return feed_alone(layer, made, from);
            multiply(layer.inner, layer.inner_count, from, inner, rows);
            multiplier.multiply_made(layer.down, made, activated, mlp_made, rows);
        });
    }

    // Whether what enters a layer's last matrix is a row alone, in groups whose columns begin where blocks do.
    bool is_by_groups(const Layer &layer) const {
        return rows == 1 && layer.down.kind >= BYTES && layer.down.columns % GROUP == 0 && layer.gate_offset % OUTPUTS == 0 &&
               (layer.up_matrix < 0 || layer.up_offset % OUTPUTS == 0);
    }

    // Each thread makes both parts of the columns that it activates: so nobody waits between the two.
    template <class Made>
    void feed_alone(const Layer &layer, const Made &made, const float *from) const {
        const int64_t groups = layer.down.columns / GROUP, thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t first = groups * thread / threads, last = groups * (thread + 1) / threads;
        const Multiplier own = alone();
        const auto multiply = [&](int64_t matrix, int64_t offset) {
            own.multiply_outputs(layer.inner[matrix], offset + first * GROUP, offset + last * GROUP, from,
                                 made_by(inner, layer.inner, matrix, rows));
        };
        own.take_alone(layer.inner, layer.inner_count, from);
        multiply(layer.gate_matrix, layer.gate_offset);
        if (layer.up_matrix >= 0) multiply(layer.up_matrix, layer.up_offset);
        multiplier.take_groups(layer.down, made, first, last);
#pragma omp barrier
        multiplier.multiply_taken(layer.down, mlp_made);
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
        by_rows([&](int64_t row) { settle(&before, row); });
#pragma omp for schedule(static)
        for (int64_t at = 0; at < step.kept_count; ++at)
            normalise(step.last, states_of(step.kept[at]), step.kept_states + at * step.width);
        multiply(&step.head, 1, step.kept_states, step.logits, step.wanted_count);
        if (!step.head.bias) return;
#pragma omp for schedule(static)
        for (int64_t at = 0; at < step.wanted_count; ++at)
            for (int64_t i = 0; i < step.head.outputs; ++i) step.logits[at * step.head.outputs + i] += step.head.bias[i];
    }

    const Step &step;
    const int64_t rows;
    const Sizes sizes;
    Entry entry;
    float *states = nullptr, *spare = nullptr, *normed = nullptr, *beside = nullptr;  // a copy each
    float *attention_made = nullptr, *mlp_made = nullptr;
    float *projected = nullptr, *attended = nullptr, *inner = nullptr, *activated = nullptr;
    char *work_memory = nullptr;
    std::optional<Work<Tiles>> work;  // the attention of the layer that is being computed
    float *mixed = nullptr, *shares = nullptr;
    Multiplier multiplier;
    char *alone_memory = nullptr;  // of the multiplier of a row alone that each thread has
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
    if (step.format == INT8) return take<FloatTiles<int8_t>>;
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
