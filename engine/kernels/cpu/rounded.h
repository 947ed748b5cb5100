// Rows rounded to bfloat16, to meet weights in it: as they lie, or taken apart (apart.h).
#pragma once

#include "plain.h"
#include "quantised.h"

namespace {

// Rows up to which they are met in pairs everywhere: they wait for memory (measured: 1 to 3 of them are 3 to 5 % faster than
// apart, 4 as fast, 5 or more slower).
constexpr int64_t ROWS_IN_PAIRS = 4;

class Rounded {
  public:
    Rounded() = default;
    explicit Rounded(char *memory) : memory(memory) {}

    // Bytes of memory that so many rows and columns need.
    static int64_t size(int64_t rows, int64_t columns) {
        return rows * (takes_apart() ? whole(columns) * sizeof(Apart) : columns * sizeof(bfloat16));
    }

    // Take number `row` of so many rows.
    void take(const float *from, int64_t columns, int64_t row, int64_t rows) const {
        if (!are_apart(rows)) return put(in_pairs() + row * columns, from, columns);
        Apart *const to = apart() + row * whole(columns);
        for (int64_t at = 0; at < columns; at += COLUMNS) {
            bfloat16 some[COLUMNS] = {};
            put(some, from + at, lesser(columns - at, COLUMNS));
            const Vector pairs = read<Vector>(some), parts[] = {seconds(pairs), firsts(pairs)};
            memcpy(to + at, parts, sizeof parts);
        }
    }

    // multiply(all rows, numbers from row to row). Where some would be apart, all are met without numbers too small for it.
    template <class Multiply>
    void meet(int64_t columns, int64_t rows, Multiply multiply) const {
        if (!takes_apart()) return multiply(in_pairs(), columns);
        const Flushed flushed;
        are_apart(rows) ? multiply((const Apart *)apart(), whole(columns)) : multiply(in_pairs(), columns);
    }

  private:
    static constexpr int64_t COLUMNS = 2 * LANES;  // of a vector of pairs

    static int64_t whole(int64_t columns) { return parts(columns, COLUMNS) * COLUMNS; }
    static bool are_apart(int64_t rows) { return takes_apart() && rows > ROWS_IN_PAIRS; }

    bfloat16 *in_pairs() const { return (bfloat16 *)memory; }
    Apart *apart() const { return (Apart *)memory; }

    char *memory = nullptr;
};

}  // namespace
