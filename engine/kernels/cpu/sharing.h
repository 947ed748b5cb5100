// Which sequences of a batch begin with the same cells: what they share is read once for all of them.
//
//     first    | a b c d e f g h | k l     a stack of three: their tables begin with the same 8 cells,
//     second   | a b c d e f g h | m       which are walked with the queries of all three
//     third    | a b c d e f g h i n
//
// A row comes out the same bit for bit with whomever it is stacked (blocks.h): so this decides about time alone.
#pragma once

#include "blocks.h"

namespace {

// Positions from which on it pays to walk them together.
constexpr int64_t SHARED_AT_LEAST = 2 * TILE;
// Lines of a stack, at most. A segment that can be stacked is one block a head.
constexpr int64_t STACK = LEAST_BLOCK;

// A segment's place in a stack.
struct Member {
    int64_t next;    // the segment behind it, or -1
    // Of the first one:
    int64_t shared;  // positions that all have in common; 0 where it is alone
    int64_t last;    // the last segment; -1 of all others
    int64_t count, lines;
};

inline bool same_cells(const Segment &a, const Segment &b, int64_t start) {
    if (a.cells && b.cells) return !memcmp(a.cells + start, b.cells + start, TILE * sizeof(int64_t));
    for (int64_t at = start; at < start + TILE; ++at)
        if ((a.cells ? a.cells[at] : a.run + at) != (b.cells ? b.cells[at] : b.run + at)) return false;
    return true;
}

// Positions, whole tiles of them, that stand before the rows of both and are the same cells.
inline int64_t common(const Segment &a, const Segment &b) {
    const int64_t most = lesser(a.start, b.start) / TILE * TILE;
    int64_t length = 0;
    while (length < most && same_cells(a, b, length)) length += TILE;
    return length;
}

// Stacks of a call's segments; `members` are as many as these.
class Stacks {
  public:
    Stacks(const Call &call, Member *members) : call(call), members(members) {}

    void find() {
        for (int64_t at = 0; at < call.segment_count; ++at) few += is_few(call, call.segments[at]);
        for (int64_t at = 0; at < call.segment_count; ++at) {
            members[at] = {-1, 0, at, 1, lines(call, call.segments[at])};
            if (is_few(call, call.segments[at])) place(at);
        }
    }

    // Whether a segment can be stacked: it sees all cells from the first on, and a stack has room for two of its size.
    static bool is_few(const Call &call, const Segment &segment) {
        const int64_t own = lines(call, segment);
        return call.reach == FULL && segment.first == 0 && own > 0 && 2 * own <= STACK;
    }
    static int64_t lines(const Call &call, const Segment &segment) { return segment.rows * (call.heads / call.key_heads); }

  private:
    // Put a segment behind the one with which it shares most, if that is worth it.
    void place(int64_t at) {
        int64_t best = -1, most = SHARED_AT_LEAST - 1;
        for (int64_t leader = 0; leader < at; ++leader) {
            if (!takes(leader, at)) continue;
            const int64_t length = common(call.segments[leader], call.segments[at]);
            if (length > most && is_worth(leader, at, length)) best = leader, most = length;
        }
        if (best >= 0) append(best, at, most);
    }

    // Stacks are no larger than leaves every thread some.
    bool takes(int64_t leader, int64_t at) const {
        const Member &own = members[leader];
        return own.last >= 0 && is_few(call, call.segments[leader]) && own.lines + members[at].lines <= STACK &&
               (own.count + 1) * call.threads <= larger(few * call.key_heads, call.threads);
    }

    // A stack is not spoiled for one that shares little with it, nor begun by two that do.
    bool is_worth(int64_t leader, int64_t at, int64_t length) const {
        if (members[leader].count > 1) return 2 * length >= members[leader].shared;
        return 4 * length >= lesser(call.segments[leader].start, call.segments[at].start);
    }

    void append(int64_t leader, int64_t at, int64_t length) {
        Member &first = members[leader];
        first.shared = first.count > 1 ? lesser(first.shared, length) : length;
        members[first.last].next = at;
        first.last = at, first.lines += members[at].lines, ++first.count;
        members[at].last = -1;
    }

    const Call &call;
    Member *members;
    int64_t few = 0;
};

}  // namespace
