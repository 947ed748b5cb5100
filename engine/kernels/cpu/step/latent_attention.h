// Attention over latents with absorbed projections (MLA, arXiv 2405.04434).
//
//     expanded  [row][head][key width | rotary width]       of the query expansion
//     inputs    [head][row][key width], then [head][row][latent width]
//     outputs   [head][row][latent width], then [head][row][value width]
//     queries   [head][row][latent width | rotary width]    inputs * keys, and rotated columns
//     attended  [row][head][latent width]                   of the attention over cells
//
// All rows of a head are multiplied at once, in an order that depends neither on the batch nor on the threads.
#pragma once

#include "step/embedder.h"
#include "step/kv_cells.h"
#include "step/multiplier.h"
#include "step/row_operations.h"

namespace {

// The latent attention of a layer; its KV buffers hold `Element`.
template <class Element>
class LatentAttentionLayer {
  public:
    static int64_t size(const Step &step, const Layer &layer) {
        const int64_t lines = step.rows * layer.queries.count;
        const int64_t numbers = lines * (layer.keys.width + layer.values.width + 2 * widest(layer)) +
                                step.rows * (layer.latents->query_expansion.columns + layer.latents->query_expansion.outputs) +
                                step.threads * layer.keys.width;
        return numbers * sizeof(float) + layer.queries.count * share_size(step, layer) + 8 * 64;
    }

    // targets    [rows], the cells of the rows
    // projected  outputs of the layer's projections
    LatentAttentionLayer(const Step &step, const Layer &layer, const Embedder &embedder, const int64_t *targets,
                         float *projected, char *memory, bool rounds_to_bfloat16)
        : step(step),
          layer(layer),
          latents(*layer.latents),
          embedder(embedder),
          targets(targets),
          projected(projected),
          rows(step.rows),
          heads(layer.queries.count),
          rounds_to_bfloat16(rounds_to_bfloat16) {
        Arena arena(memory);
        queries = arena.allocate<float>(rows * heads * layer.keys.width);
        attended = arena.allocate<float>(rows * heads * layer.values.width);
        inputs = arena.allocate<float>(rows * heads * widest(layer));
        outputs = arena.allocate<float>(rows * heads * widest(layer));
        query_latents = arena.allocate<float>(rows * latents.query_expansion.columns);
        expanded = arena.allocate<float>(rows * latents.query_expansion.outputs);
        cells = arena.allocate<float>(step.threads * layer.keys.width);
        shares = arena.allocate<char>(heads * share_size(step, layer));
    }

    // The queries and the output of an attention call.
    void describe(AttentionCall &call) const {
        call.query = queries, call.query_head_stride = rows * layer.keys.width, call.query_row_stride = layer.keys.width;
        call.output = attended;
    }

    // Write the cells and the queries of all rows. Called by all threads of a team.
    // multiply(matrix, from, to)  all rows times a matrix, by the team
    template <class Multiply>
    void prepare(Multiply multiply) const {
        if (latents.query_expansion.weights) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) norm_query(row);
            multiply(latents.query_expansion, query_latents, expanded);
        }
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < rows; ++row) write_cell_of(row);
        multiply_heads(latents.keys, [&](int64_t head, int64_t row, float *to) {
            query_columns(head, row, 0).copy(latents.keys->columns, to);
        });
#pragma omp for schedule(static) collapse(2)
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t row = 0; row < rows; ++row) absorb(head, row);
    }

    // Write the values [rows][heads][value width] of the attended latents to `to`. Called by all threads of a team.
    void project(float *to) const {
        const int64_t width = latents.values->outputs;
        multiply_heads(latents.values, [&](int64_t head, int64_t row, float *to) { read_attended(head, row, to); });
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t head = 0; head < heads; ++head)
                memcpy(to + (row * heads + head) * width, outputs + (head * rows + row) * width, width * sizeof(float));
    }

  private:
    static int64_t widest(const Layer &layer) { return larger(layer.values.width, layer.queries.width); }
    // Bytes of multiplier memory for the rows of a head.
    static int64_t share_size(const Step &step, const Layer &layer) {
        return (Multiplier::size(step.rows, widest(layer)) + 63) / 64 * 64;
    }

    // Columns of the output of a matrix for a row, without its bias.
    struct Columns {
        const float *numbers, *bias;

        float at(int64_t column) const { return numbers[column] + (bias ? bias[column] : 0); }
        void copy(int64_t width, float *to) const {
            for (int64_t i = 0; i < width; ++i) to[i] = this->at(i);
        }
    };
    static Columns columns_of(const Linear &matrix, const float *outputs, int64_t row, int64_t first) {
        return {outputs + row * matrix.outputs + first, matrix.bias ? matrix.bias + first : nullptr};
    }
    Columns projected_columns(int64_t matrix, int64_t row, int64_t first) const {
        return columns_of(layer.projections[matrix], output_of(projected, layer.projections, matrix, rows), row, first);
    }
    // Columns of a query from `first` on.
    Columns query_columns(int64_t head, int64_t row, int64_t first) const {
        const Linear &expansion = latents.query_expansion;
        first += layer.queries.offset + head * layer.queries.stride;
        return expansion.weights ? columns_of(expansion, expanded, row, first)
                                 : projected_columns(layer.queries.matrix, row, first);
    }

    void norm_query(int64_t row) const {
        float *query_latent = query_latents + row * latents.query_expansion.columns;
        projected_columns(layer.queries.matrix, row, 0).copy(latents.query_expansion.columns, query_latent);
        if (latents.query_norm.kind != NO_NORM) normalise(latents.query_norm, query_latent, query_latent);
    }

    void read_attended(int64_t head, int64_t row, float *to) const {
        const int64_t width = layer.values.width;
        memcpy(to, attended + (row * heads + head) * width, width * sizeof(float));
        if (std::is_same_v<Element, int8_t>) transform(to, width);
    }

    // Append the rotary part of a row to its first columns, those of latents, and rotate it.
    void finish(const Columns &rotary, int64_t row, float *cell) const {
        const int64_t width = layer.values.width, rotary_width = layer.keys.width - width, half = rotary_width / 2;
        for (int64_t i = 0; i < rotary_width; ++i)
            cell[width + i] = rotary.at(!latents.separates_pairs ? i : i < half ? 2 * i : 2 * (i - half) + 1);
        rotate_head(step.rotaries[layer.rotary], embedder.rotary_row(row), cell);
        if (!std::is_same_v<Element, int8_t>) return;
        transform(cell, width);
        transform(cell + width, rotary_width);
    }

    void write_cell_of(int64_t row) const {
        const int64_t width = layer.values.width;
        float *cell = cells + omp_get_thread_num() * layer.keys.width;
        projected_columns(latents.latents.matrix, row, latents.latents.offset).copy(width, cell);
        normalise(latents.latent_norm, cell, cell);
        finish(projected_columns(latents.rotary_columns.matrix, row, latents.rotary_columns.offset), row, cell);
        KVBuffer rotary = layer.key_buffer;
        rotary.data = (const Element *)rotary.data + width;
        if (rotary.scales) ++rotary.scales;
        write_cell<Element>(layer.key_buffer, 0, targets[row], cell, width);
        write_cell<Element>(rotary, 0, targets[row], cell + width, layer.keys.width - width);
    }

    // The query of a row with absorbed projection, from the products with its head's keys.
    void absorb(int64_t head, int64_t row) const {
        const int64_t line = head * rows + row, width = layer.values.width;
        float *query = queries + line * layer.keys.width;
        memcpy(query, outputs + line * width, width * sizeof(float));
        finish(query_columns(head, row, latents.keys->columns), row, query);
        scale_query(step.rotaries[layer.rotary], embedder.rotary_row(row), query, layer.keys.width);
    }

    Multiplier multiplier(int64_t head) const {
        return Multiplier(shares + head * share_size(step, layer), rows, widest(layer), rounds_to_bfloat16);
    }

    // The rows of each head times its matrix, from `inputs`, which read(head, row, to) fills, to `outputs`.
    template <class Read>
    void multiply_heads(const Linear *matrices, Read read) const {
        const int64_t columns = matrices->columns, width = matrices->outputs, units = ::ceil_div(width, SHARE);
#pragma omp for schedule(static) collapse(2)
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t row = 0; row < rows; ++row) {
                float *head_inputs = inputs + head * rows * columns;
                read(head, row, head_inputs + row * columns);
                multiplier(head).prepare_row(matrices[head], head_inputs, row, rows);
            }
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t unit = 0; unit < units; ++unit)
                multiplier(head).multiply_share(matrices[head], unit, inputs + head * rows * columns,
                                                outputs + head * rows * width, rows);
    }

    const Step &step;
    const Layer &layer;
    const LatentAttention &latents;
    const Embedder &embedder;
    const int64_t *targets;
    float *projected;
    const int64_t rows, heads;
    const bool rounds_to_bfloat16;
    float *queries, *attended, *inputs, *outputs, *query_latents, *expanded, *cells;
    char *shares;
};

}  // namespace
