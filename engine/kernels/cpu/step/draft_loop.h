// Several steps in one native call: each step after the first computes the token that the step before sampled, of each
// sequence.
#pragma once

#include "step/sampling.h"
#include "vector/memory.h"
#include "vector/vector.h"

namespace {

// Builds the steps of a draft loop in memory of its current.
class DraftLoopRunner {
  public:
    using RunStep = int64_t (*)(const Step &);

    explicit DraftLoopRunner(const DraftLoop &loop) : loop(loop), all_rows(*loop.step), current(all_rows) {
        for (int64_t i = 0; i < loop.sequence_count; ++i) first_tokens += loop.contexts[i].length;
    }

    // Tokens of the first step.
    int64_t count() const { return first_tokens; }

    int64_t size() const {
        const int64_t numbers = loop.sequence_count * (2 * all_rows.width + 3 * all_rows.head.outputs);
        return numbers * sizeof(float) + (max_tokens() + 2 * loop.sequence_count) * sizeof(int64_t) +
               all_rows.cell_group_count * (sizeof(CellGroup) + loop.sequence_count * sizeof(Segment)) + 64 * 16;
    }

    void begin(char *memory) {
        Arena arena(memory);
        const int64_t sequences = loop.sequence_count;
        current.tokens = tokens = arena.allocate<int64_t>(max_tokens());
        current.hidden_states = arena.allocate<float>(sequences * all_rows.width);
        current.logits = arena.allocate<float>(sequences * all_rows.head.outputs);
        states = arena.allocate<float>(sequences * all_rows.width);
        scratch = arena.allocate<float>(2 * sequences * all_rows.head.outputs);
        output_rows = arena.allocate<int64_t>(sequences), sampled_sequences = arena.allocate<int64_t>(sequences);
        cells = arena.allocate<CellGroup>(all_rows.cell_group_count);
        segments = arena.allocate<Segment>(all_rows.cell_group_count * sequences);
        current.cell_groups = cells, current.output_rows = output_rows;
        std::fill(loop.sampled, loop.sampled + sequences * loop.max_count, -1);
    }

    int64_t run(RunStep step) {
        int64_t outcome = DONE;
        for (int64_t number = 0; number < larger(loop.max_count, 1) && outcome == DONE; ++number) {
            prepare_step(number);
            if (!current.rows) break;
            outcome = step(current);
            if (outcome != DONE) break;
            sample_tokens(number);
            if (all_rows.pair_input) keep_states();
        }
        return outcome;
    }

  private:
    // Rows of the largest step.
    int64_t max_tokens() const { return larger(first_tokens, loop.sequence_count); }

    bool is_active(int64_t sequence, int64_t number) const {
        return number < loop.contexts[sequence].count && (!number || loop.sampled[sequence * loop.max_count + number - 1] >= 0);
    }

    // The hidden states after a step, by sequence.
    void keep_states() {
        for (int64_t i = 0; i < current.output_count; ++i)
            copy_state(current.hidden_states, i, states, sampled_sequences[i]);
        current.initial_states = states;
    }

    void copy_state(const float *from, int64_t source, float *to, int64_t target) const {
        memmove(to + target * all_rows.width, from + source * all_rows.width, all_rows.width * sizeof(float));
    }

    // The rows of one step: the given tokens, or the last sampled ones.
    void prepare_step(int64_t number) {
        const int64_t *next = loop.tokens;
        current.rows = current.output_count = parts = 0;
        for (int64_t i = 0; i < loop.sequence_count; ++i) {
            const SamplingContext &sequence = loop.contexts[i];
            const bool active = is_active(i, number);
            if (!number) {
                add(i, 0, sequence.length, next);
                next += sequence.length;
            } else if (active) {
                // A row is at most the index of its sequence, so the states of later sequences are not overwritten.
                if (all_rows.pair_input) copy_state(states, i, states, current.rows);
                add(i, sequence.length + number - 1, 1, loop.sampled + i * loop.max_count + number - 1);
            }
            if (active) output_rows[current.output_count] = current.rows - 1, sampled_sequences[current.output_count++] = i;
        }
        current.logit_count = current.output_count;
        for (int64_t i = 0; i < all_rows.cell_group_count; ++i)
            cells[i] = {segments + i * loop.sequence_count, parts, all_rows.cell_groups[i].cells};
    }

    // Rows of a sequence, from row `start` of its segment.
    void add(int64_t sequence, int64_t start, int64_t length, const int64_t *from) {
        std::copy(from, from + length, tokens + current.rows);
        for (int64_t i = 0; i < all_rows.cell_group_count; ++i) {
            Segment part = all_rows.cell_groups[i].segments[sequence];
            part.row = current.rows, part.rows = length, part.start += start;
            segments[i * loop.sequence_count + parts] = part;
        }
        ++parts;
        current.rows += length;
    }

    void sample_tokens(int64_t number) {
#pragma omp parallel for num_threads((int)all_rows.threads) schedule(static) if (current.output_count > 1)
        for (int64_t i = 0; i < current.output_count; ++i) {
            const int64_t sequence = sampled_sequences[i], begin = i * all_rows.head.outputs;
            float *logits = current.logits + begin;
            if (loop.logits_scale != 1 || loop.softcap != 0) scale_and_cap(logits);
            loop.sampled[sequence * loop.max_count + number] =
                sample(loop.contexts[sequence], number, logits, loop.vocabulary, scratch + 2 * begin);
        }
    }

    void scale_and_cap(float *logits) const {
        for (int64_t i = 0; i < loop.vocabulary; ++i) {
            logits[i] *= loop.logits_scale;
            if (loop.softcap != 0) logits[i] = loop.softcap * tanhf(logits[i] / loop.softcap);
        }
    }

    const DraftLoop &loop;
    const Step &all_rows;
    Step current;
    int64_t first_tokens = 0, parts = 0;
    float *states = nullptr;  // of pairs
    float *scratch = nullptr;
    int64_t *tokens = nullptr;
    int64_t *output_rows = nullptr, *sampled_sequences = nullptr;  // rows with logits, and their sequences
    CellGroup *cells = nullptr;
    Segment *segments = nullptr;
};

}  // namespace
