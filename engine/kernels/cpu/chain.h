// Steps that follow each other without a word to Python in between: a row for each token that was said in the one before.
#pragma once

#include "choice.h"
#include "memory.h"
#include "vector.h"

namespace {

// What a step of the chain reads by its address, in memory of its own.
class Links {
  public:
    using Take = int64_t (*)(const Step &);

    explicit Links(const Chain &chain) : chain(chain), whole(*chain.step), own(whole) {
        for (int64_t at = 0; at < chain.links_count; ++at) read_first += chain.links[at].length;
    }

    // Tokens that are read first.
    int64_t count() const { return read_first; }

    int64_t size() const {
        const int64_t numbers = chain.links_count * (whole.width + 3 * whole.head.outputs);
        return numbers * sizeof(float) + (most() + 2 * chain.links_count) * sizeof(int64_t) +
               whole.cells_count * (sizeof(Cells) + chain.links_count * sizeof(Segment)) + 64 * 16;
    }

    void begin(char *memory) {
        Slices slices(memory);
        const int64_t links = chain.links_count;
        own.tokens = tokens = slices.take<int64_t>(most());
        own.kept_states = slices.take<float>(links * whole.width);
        own.logits = slices.take<float>(links * whole.head.outputs);
        room = slices.take<float>(2 * links * whole.head.outputs);
        kept = slices.take<int64_t>(links), going = slices.take<int64_t>(links);
        cells = slices.take<Cells>(whole.cells_count);
        segments = slices.take<Segment>(whole.cells_count * links);
        own.cells = cells, own.kept = kept;
        std::fill(chain.said, chain.said + links * chain.deepest, -1);
    }

    int64_t run(Take step) {
        int64_t outcome = DONE;
        for (int64_t number = 0; number < larger(chain.deepest, 1) && outcome == DONE; ++number) {
            gather(number);
            if (!own.rows) break;
            outcome = step(own);
            if (outcome == DONE) say(number);
        }
        return outcome;
    }

  private:
    // Rows of one step.
    int64_t most() const { return larger(read_first, chain.links_count); }

    bool goes_on(int64_t at, int64_t number) const {
        return number < chain.links[at].count && (!number || chain.said[at * chain.deepest + number - 1] >= 0);
    }

    // The rows of one step: those that are read first, or what was said last.
    void gather(int64_t number) {
        const int64_t *next = chain.tokens;
        own.rows = own.kept_count = parts = 0;
        for (int64_t at = 0; at < chain.links_count; ++at) {
            const Link &link = chain.links[at];
            const bool goes = goes_on(at, number);
            if (!number) {
                add(at, 0, link.length, next);
                next += link.length;
            } else if (goes) {
                add(at, link.length + number - 1, 1, chain.said + at * chain.deepest + number - 1);
            }
            if (goes) kept[own.kept_count] = own.rows - 1, going[own.kept_count++] = at;
        }
        own.wanted_count = own.kept_count;
        for (int64_t at = 0; at < whole.cells_count; ++at)
            cells[at] = {segments + at * chain.links_count, parts, whole.cells[at].cells};
    }

    // Some rows of a sequence, from its row `start` on.
    void add(int64_t link, int64_t start, int64_t length, const int64_t *from) {
        std::copy(from, from + length, tokens + own.rows);
        for (int64_t at = 0; at < whole.cells_count; ++at) {
            Segment part = whole.cells[at].segments[link];
            part.row = own.rows, part.rows = length, part.start += start;
            segments[at * chain.links_count + parts] = part;
        }
        ++parts;
        own.rows += length;
    }

    void say(int64_t number) {
#pragma omp parallel for num_threads((int)whole.threads) schedule(static) if (own.kept_count > 1)
        for (int64_t at = 0; at < own.kept_count; ++at) {
            const int64_t link = going[at], begin = at * whole.head.outputs;
            float *logits = own.logits + begin;
            if (chain.logits_scale != 1 || chain.softcap != 0) bound(logits);
            chain.said[link * chain.deepest + number] =
                choose(chain.links[link], number, logits, chain.choices, room + 2 * begin);
        }
    }

    void bound(float *logits) const {
        for (int64_t at = 0; at < chain.choices; ++at) {
            logits[at] *= chain.logits_scale;
            if (chain.softcap != 0) logits[at] = chain.softcap * tanhf(logits[at] / chain.softcap);
        }
    }

    const Chain &chain;
    const Step &whole;
    Step own;
    int64_t read_first = 0, parts = 0;
    float *room = nullptr;
    int64_t *tokens = nullptr;
    int64_t *kept = nullptr, *going = nullptr;  // rows that logits are wanted of, and whose they are
    Cells *cells = nullptr;
    Segment *segments = nullptr;
};

}  // namespace
