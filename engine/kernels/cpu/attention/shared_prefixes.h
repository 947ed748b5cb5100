// Sequences of a batch that share a prefix of cells: its keys and values are read once for all of them.
//
//     first    | a b c d e f g h | k l     a stack of three sequences: their first 8 cells are the same,
//     second   | a b c d e f g h | m       and are read once for the queries of all three
//     third    | a b c d e f g h i n
//
// A row has the same bits in any stack (attention_blocks.h): stacks change the time only.
#pragma once

#include "attention/attention_blocks.h"

namespace {

// The shortest prefix that is shared.
constexpr int64_t MIN_SHARED_POSITIONS = 2 * TILE;
// The most lines of a stack. A segment that can share is one block for each head.
constexpr int64_t MAX_SHARED_LINES = MIN_BLOCK_LINES;

// A segment in a stack.
struct PrefixMember {
    int64_t next;  // the next segment of the stack, or -1
    // Of the first segment of a stack:
    int64_t shared;  // positions that all of its segments share; 0: it is alone
    int64_t last;    // the last segment; -1 in other segments than the first
    int64_t count, lines;
};

inline bool have_same_cells(const Segment &a, const Segment &b, int64_t start) {
    if (a.cells && b.cells) return !memcmp(a.cells + start, b.cells + start, TILE * sizeof(int64_t));
    for (int64_t at = start; at < start + TILE; ++at)
        if ((a.cells ? a.cells[at] : a.first_cell + at) != (b.cells ? b.cells[at] : b.first_cell + at)) return false;
    return true;
}

// The length of the shared prefix before the rows of both, a multiple of TILE.
inline int64_t common(const Segment &a, const Segment &b) {
    const int64_t most = lesser(a.start, b.start) / TILE * TILE;
    int64_t length = 0;
    while (length < most && have_same_cells(a, b, length)) length += TILE;
    return length;
}

// The stacks of the segments of a call; `members` has an embedder for each segment.
class SharedPrefixes {
  public:
    SharedPrefixes(const AttentionCall &call, PrefixMember *members) : call(call), members(members) {}

    void find() {
        for (int64_t at = 0; at < call.segment_count; ++at) sharing += can_share(call, call.segments[at]);
        for (int64_t at = 0; at < call.segment_count; ++at) {
            members[at] = {-1, 0, at, 1, lines(call, call.segments[at])};
            if (can_share(call, call.segments[at])) place(at);
        }
    }

    // Whether a segment can share: full attention from position 0, and at most half of the lines of a stack.
    static bool can_share(const AttentionCall &call, const Segment &segment) {
        const int64_t own = lines(call, segment);
        return call.attention_range == FULL && segment.first == 0 && own > 0 && 2 * own <= MAX_SHARED_LINES;
    }
    static int64_t lines(const AttentionCall &call, const Segment &segment) {
        return segment.rows * (call.heads / call.key_heads);
    }

  private:
    // Add a segment to the stack with the longest shared prefix, if that is worthwhile.
    void place(int64_t at) {
        int64_t best = -1, most = MIN_SHARED_POSITIONS - 1;
        for (int64_t leader = 0; leader < at; ++leader) {
            if (!has_capacity_for(leader, at)) continue;
            const int64_t length = common(call.segments[leader], call.segments[at]);
            if (length > most && is_worthwhile(leader, at, length)) best = leader, most = length;
        }
        if (best >= 0) append(best, at, most);
    }

    // The stacks are small enough to leave every thread one.
    bool has_capacity_for(int64_t leader, int64_t at) const {
        const PrefixMember &own = members[leader];
        return own.last >= 0 && can_share(call, call.segments[leader]) && own.lines + members[at].lines <= MAX_SHARED_LINES &&
               (own.count + 1) * call.threads <= larger(sharing * call.key_heads, call.threads);
    }

    // Not for a segment that halves the prefix of a stack, nor for a new stack with less than a quarter shared.
    bool is_worthwhile(int64_t leader, int64_t at, int64_t length) const {
        if (members[leader].count > 1) return 2 * length >= members[leader].shared;
        return 4 * length >= lesser(call.segments[leader].start, call.segments[at].start);
    }

    void append(int64_t leader, int64_t at, int64_t length) {
        PrefixMember &first = members[leader];
        first.shared = first.count > 1 ? lesser(first.shared, length) : length;
        members[first.last].next = at;
        first.last = at, first.lines += members[at].lines, ++first.count;
        members[at].last = -1;
    }

    const AttentionCall &call;
    PrefixMember *members;
    int64_t sharing = 0;
};

}  // namespace
