// The native step (step.h), for one instruction set: the compiler's flags say which.
//
// One team of threads goes through all layers; a loop over rows, heads or outputs is shared out, and all meet behind it.
// Each row is computed as if it were alone, in an order that neither its neighbours nor the threads change.
#include "step.h"

#include <omp.h>

#include "blocks.h"
#include "plain.h"
#include "quantised.h"
#include "rows.h"

namespace {

// Outputs that a thread takes at a time: whole blocks of quantised ones.
constexpr int64_t SHARE = 32;

inline int64_t outputs(const Linear *matrices, int64_t count) {
    int64_t sum = 0;
    for (int64_t at = 0; at < count; ++at) sum += matrices[at].outputs;
    return sum;
}

// What matrix number `at` makes: they stand one behind the other, each [rows][outputs].
inline float *made_by(float *start, const Linear *matrices, int64_t at, int64_t rows) {
    return start + rows * outputs(matrices, at);
}

// The most numbers that any layer needs of each kind.
struct Sizes {
    int64_t projected = 0, attended = 0, inner = 0, activated = 0, groups = 0, desk = 0, part = 0;
};

template <class Element>
class Walk {
  public:
    explicit Walk(const Step &step) : step(step), rows(step.rows), sizes(measure()) {}

    // Bytes of memory that `begin` needs.
    int64_t size() const {
        const int64_t numbers = rows * (5 * step.width + sizes.projected + sizes.attended + sizes.inner + sizes.activated) +
                                step.threads * sizes.desk + parted() * most_parts() * sizes.part;
        return numbers * sizeof(float) + most_blocks() * sizeof(Block) + step.cells_count * rows * sizeof(int64_t) + Rows::size(most_rows(), sizes.groups) + 4096;
    }

    void begin(char *memory) {
        const auto take = [&](int64_t bytes) {
            char *own = memory;
            memory += (bytes + 63) / 64 * 64;
            return own;
        };
        const auto numbers = [&](int64_t count) { return (float *)take(count * sizeof(float)); };
        normed = numbers(rows * step.width), beside = numbers(rows * step.width);
        attention_made = numbers(rows * step.width), mlp_made = numbers(rows * step.width);
        projected = numbers(rows * sizes.projected), attended = numbers(rows * sizes.attended);
        inner = numbers(rows * sizes.inner), activated = numbers(rows * sizes.activated);
        desks = numbers(step.threads * sizes.desk), parts = numbers(parted() * most_parts() * sizes.part);
        blocks = (Block *)take(most_blocks() * sizeof(Block));
        codes = take(Rows::size(most_rows(), sizes.groups));
        targets = (int64_t *)take(step.cells_count * rows * sizeof(int64_t));
        for (int64_t at = 0; at < step.cells_count; ++at) find_targets(step.cells[at], targets + at * rows);
    }

    // To be run by all threads of a team.
    void run() {
        for (int64_t at = 0; at < step.layer_count; ++at) {
            const Layer &layer = step.layers[at];
            enter(layer, at > 0 ? &step.layers[at - 1] : nullptr);
            attend(layer);
            multiply(&layer.output, 1, attended, attention_made, rows);
            if (!layer.parallel) go_on(layer);
            feed(layer, layer.parallel ? beside : normed);
        }
        leave(step.layers[step.layer_count - 1]);
    }

  private:
    Sizes measure() const {
        Sizes most;
        for (int64_t at = 0; at < step.layer_count; ++at) {
            const Layer &layer = step.layers[at];
            const Call call = describe(layer);
            const Kernel<Element> kernel(call);
            most.projected = larger(most.projected, outputs(layer.projections, layer.projection_count));
            most.attended = larger(most.attended, layer.queries.count * layer.values.width);
            most.inner = larger(most.inner, outputs(layer.inner, layer.inner_count));
            most.activated = larger(most.activated, layer.down.columns);
            const int64_t columns = larger(larger(step.width, layer.output.columns), layer.down.columns);
            most.groups = larger(most.groups, ::parts(columns, GROUP));
            most.desk = larger(most.desk, padded(kernel.desk_size()));
            most.part = larger(most.part, kernel.part_size(BLOCK));
        }
        return most;
    }

    int64_t most_blocks() const {
        int64_t most = 0;
        for (int64_t at = 0; at < step.layer_count; ++at) most = larger(most, cut(describe(step.layers[at]), nullptr));
        return most;
    }

    // A row may be wanted more than once.
    int64_t most_rows() const { return larger(rows, step.wanted_count); }

    // The most blocks that are cut into parts.
    int64_t parted() const { return step.threads > 1 ? lesser(most_blocks(), BLOCKS_A_THREAD * step.threads) : 0; }

    int64_t most_parts() const {
        int64_t most = 0;
        for (int64_t at = 0; at < step.cells_count; ++at)
            for (int64_t i = 0; i < step.cells[at].count; ++i) {
                const Segment &segment = step.cells[at].segments[i];
                most = larger(most, (segment.start + segment.rows - 1) / PART + 1);
            }
        return most;
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
        call.scale = layer.scale, call.threads = step.threads;
        return call;
    }

    // Add to a row's states what the layer before has left to be added.
    void settle(const Layer *before, int64_t row) const {
        if (!before) return;
        float *states = step.states + row * step.width;
        if (before->parallel) add_row(states, attention_made + row * step.width, before->output.bias, step.width);
        add_row(states, mlp_made + row * step.width, before->down.bias, step.width);
    }

    void enter(const Layer &layer, const Layer *before) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            settle(before, row);
            const float *states = step.states + row * step.width;
            normalise(layer.before_attention, states, normed + row * step.width);
            if (layer.parallel) normalise(layer.before_mlp, states, beside + row * step.width);
        }
        multiply(layer.projections, layer.projection_count, normed, projected, rows);
    }

    void go_on(const Layer &layer) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            float *states = step.states + row * step.width;
            add_row(states, attention_made + row * step.width, layer.output.bias, step.width);
            normalise(layer.before_mlp, states, normed + row * step.width);
        }
    }

    void attend(const Layer &layer) {
        const Heads *kinds[] = {&layer.queries, &layer.keys, &layer.values};
        const int64_t heads = layer.queries.count + layer.keys.count + layer.values.count;
        const Call call = describe(layer);
        const Kernel<Element> kernel(call);
#pragma omp single nowait
        {
            block_count = cut(call, blocks);
            parts_at_most = 0;
            for (int64_t at = 0; at < block_count; ++at) parts_at_most = larger(parts_at_most, blocks[at].parts);
        }
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t number = 0; number < heads; ++number) {
                int64_t head = number, kind = 0;
                while (head >= kinds[kind]->count) head -= kinds[kind++]->count;
                make_head(layer, *kinds[kind], kind, row, head);
            }
        Desk desk;
        kernel.furnish(desk, desks + omp_get_thread_num() * sizes.desk);
        const auto part_at = [&](int64_t block, int64_t part) {
            return parts + block * parts_at_most * kernel.part_size(BLOCK) + part * kernel.part_size(blocks[block].lines);
        };
        if (step.threads > 1 && block_count < BLOCKS_A_THREAD * step.threads && parts_at_most > 1) {
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (int64_t at = 0; at < block_count; ++at)
                for (int64_t part = 0; part < parts_at_most; ++part)
                    if (part < blocks[at].parts) kernel.run_part(blocks[at], part, desk, part_at(at, part));
#pragma omp for schedule(static)
            for (int64_t at = 0; at < block_count; ++at) kernel.join(blocks[at], part_at(at, 0), desk);
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t at = 0; at < block_count; ++at) kernel.run(blocks[at], desk);
        }
    }

    // One head of one row: its bias, norm and turn, and a key's or value's way to its cell.
    void make_head(const Layer &layer, const Heads &heads, int64_t kind, int64_t row, int64_t head) {
        const Linear &matrix = layer.projections[heads.matrix];
        const int64_t at = heads.offset + head * heads.stride;
        float *own = made_by(projected, layer.projections, heads.matrix, rows) + row * matrix.outputs + at;
        if (matrix.bias)
            for (int64_t i = 0; i < heads.width; ++i) own[i] += matrix.bias[at + i];
        if (kind < 2) {
            const Norm &norm = kind == 0 ? layer.of_queries : layer.of_keys;
            if (norm.kind != NO_NORM) normalise(norm, own, own);
            turn_head(step.turns[layer.turn], row, own);
        }
        if (kind == 0) return;
        const Plane &plane = kind == 1 ? layer.key_plane : layer.value_plane;
        const int64_t cell = targets[layer.cells * rows + row];
        put((Element *)plane.data + head * plane.head_stride + cell * plane.cell_stride, own, heads.width);
    }

    void feed(const Layer &layer, const float *from) {
        multiply(layer.inner, layer.inner_count, from, inner, rows);
        const Linear &gate = layer.inner[layer.gate_matrix], &up = layer.inner[layer.up_matrix < 0 ? 0 : layer.up_matrix];
        const float *gates = made_by(inner, layer.inner, layer.gate_matrix, rows) + layer.gate_offset;
        const float *ups = layer.up_matrix < 0 ? nullptr : made_by(inner, layer.inner, layer.up_matrix, rows) + layer.up_offset;
        const float *gate_bias = gate.bias ? gate.bias + layer.gate_offset : nullptr;
        const float *up_bias = ups && up.bias ? up.bias + layer.up_offset : nullptr;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row)
            activate_row(layer.activation, gates + row * gate.outputs, gate_bias, ups ? ups + row * up.outputs : nullptr,
                         up_bias, activated + row * layer.down.columns, layer.down.columns);
        multiply(&layer.down, 1, activated, mlp_made, rows);
    }

    void leave(const Layer &before) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) settle(&before, row);
#pragma omp for schedule(static)
        for (int64_t at = 0; at < step.kept_count; ++at)
            normalise(step.last, step.states + step.kept[at] * step.width, step.kept_states + at * step.width);
        multiply(&step.head, 1, step.kept_states, step.logits, step.wanted_count);
        if (!step.head.bias) return;
#pragma omp for schedule(static)
        for (int64_t at = 0; at < step.wanted_count; ++at)
            for (int64_t i = 0; i < step.head.outputs; ++i) step.logits[at * step.head.outputs + i] += step.head.bias[i];
    }

    // Rows times some matrices of as many columns; what they make stands one behind the other.
    void multiply(const Linear *matrices, int64_t count, const float *from, float *to, int64_t own_rows) {
        const int64_t columns = matrices->columns;
        const Rows quantised(own_rows, ::parts(columns, GROUP), codes);
        int64_t shares = 0;
        bool coded = false;
        for (int64_t at = 0; at < count; ++at) {
            shares += ::parts(matrices[at].outputs, SHARE);
            coded = coded || matrices[at].kind >= BYTES;
        }
        if (coded) {
            Product product = {};
            product.input = from, product.stride = product.columns = columns;
#pragma omp for schedule(static)
            for (int64_t row = 0; row < own_rows; ++row) quantise_row<float>(product, row, quantised);
        }
#pragma omp for schedule(static)
        for (int64_t share = 0; share < shares; ++share) {
            int64_t at = 0, own = share;
            for (; own >= ::parts(matrices[at].outputs, SHARE); ++at) own -= ::parts(matrices[at].outputs, SHARE);
            multiply_share(matrices[at], own * SHARE, from, quantised, made_by(to, matrices, at, own_rows));
        }
    }

    // A matrix's outputs from `first` on.
    void multiply_share(const Linear &matrix, int64_t first, const float *from, const Rows &quantised, float *to) {
        const int64_t last = lesser(first + SHARE, matrix.outputs);
        const auto plain = [&](auto *weights) {
            multiply_plain(from, quantised.rows, matrix.columns, weights, matrix.stride, matrix.columns, first, last, to,
                           matrix.outputs);
        };
        if (matrix.kind == PLAIN) return plain((const float *)matrix.weights);
        if (matrix.kind == HALVES) return plain((const bfloat16 *)matrix.weights);
        const Matrix own = {(const uint8_t *)matrix.weights, matrix.scales, matrix.kind == BYTES ? 8 : 4, matrix.outputs, to};
        for (int64_t block = first / OUTPUTS; block < ::parts(last, OUTPUTS); ++block) {
            if (matrix.kind == BYTES)
                multiply_block<float, 8>(own, block, quantised);
            else
                multiply_block<float, 4>(own, block, quantised);
        }
    }

    const Step &step;
    const int64_t rows;
    const Sizes sizes;
    float *normed = nullptr, *beside = nullptr, *attention_made = nullptr, *mlp_made = nullptr;
    float *projected = nullptr, *attended = nullptr, *inner = nullptr, *activated = nullptr;
    float *desks = nullptr, *parts = nullptr;
    Block *blocks = nullptr;
    char *codes = nullptr;
    int64_t *targets = nullptr;
    int64_t block_count = 0, parts_at_most = 0;
};

template <class Element>
int64_t take(const Step &step) {
    Walk<Element> walk(step);
    const Memory memory(walk.size());
    if (!memory.start) return NO_MEMORY;
    walk.begin((char *)memory.start);
#pragma omp parallel num_threads((int)step.threads)
    walk.run();
    return DONE;
}

bool fits(const Cells &cells) {
    Call call = {};
    call.segments = cells.segments, call.segment_count = cells.count, call.cells = cells.cells;
    return in_pool(call);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cellar_step(const Step *step) {
    for (int64_t at = 0; at < step->cells_count; ++at)
        if (!fits(step->cells[at])) return BAD_CELL;
    return step->format == BFLOAT16 ? take<bfloat16>(*step) : take<float>(*step);
}
