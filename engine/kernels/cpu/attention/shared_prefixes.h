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
    for (int64_t i = start; i < start + TILE; ++i)
        if ((a.cells ? a.cells[i] : a.first_cell + i) != (b.cells ? b.cells[i] : b.first_cell + i)) return false;
    return true;
}

// The length of the shared prefix before the rows of both, a multiple of TILE.
inline int64_t common(const Segment &a, const Segment &b) {
    const int64_t max_length = lesser(a.start, b.start) / TILE * TILE;
    int64_t length = 0;
    while (length < max_length && have_same_cells(a, b, length)) length += TILE;
    return length;
}

// The stacks of the segments of a call; `members` has an embedder for each segment.
class SharedPrefixes {
  public:
    SharedPrefixes(const AttentionCall &call, PrefixMember *members) : call(call), members(members) {}

    void find() {
        for (int64_t i = 0; i < call.segment_count; ++i) sharing += can_share(call, call.segments[i]);
        for (int64_t i = 0; i < call.segment_count; ++i) {
            members[i] = {-1, 0, i, 1, lines(call, call.segments[i])};
            if (can_share(call, call.segments[i])) place(i);
        }
    }

    // Whether a segment can share: full attention from position 0, and at most half of the lines of a stack.
    static bool can_share(const AttentionCall &call, const Segment &segment) {
        const int64_t segment_lines = lines(call, segment);
        return call.attention_range == FULL && segment.first == 0 && segment_lines > 0 && 2 * segment_lines <= MAX_SHARED_LINES;
    }
    static int64_t lines(const AttentionCall &call, const Segment &segment) {
        return segment.rows * (call.heads / call.key_heads);
    }

  private:
    // Add a segment to the stack with the longest shared prefix, if that is worthwhile.
    void place(int64_t index) {
        int64_t best = -1, longest = MIN_SHARED_POSITIONS - 1;
        for (int64_t leader = 0; leader < index; ++leader) {
            if (!has_capacity_for(leader, index)) continue;
            const int64_t length = common(call.segments[leader], call.segments[index]);
            if (length > longest && is_worthwhile(leader, index, length)) best = leader, longest = length;
        }
        if (best >= 0) append(best, index, longest);
    }

    // The stacks are small enough to leave every thread one.
    bool has_capacity_for(int64_t leader, int64_t index) const {
        const PrefixMember &stack = members[leader];
        return stack.last >= 0 && can_share(call, call.segments[leader]) &&
               stack.lines + members[index].lines <= MAX_SHARED_LINES &&
               (stack.count + 1) * call.threads <= larger(sharing * call.key_heads, call.threads);
    }

    // Not for a segment that halves the prefix of a stack, nor for a new stack with less than a quarter shared.
    bool is_worthwhile(int64_t leader, int64_t index, int64_t length) const {
        if (members[leader].count > 1) return 2 * length >= members[leader].shared;
        return 4 * length >= lesser(call.segments[leader].start, call.segments[index].start);
    }

    void append(int64_t leader, int64_t index, int64_t length) {
        PrefixMember &first = members[leader];
        first.shared = first.count > 1 ? lesser(first.shared, length) : length;
        members[first.last].next = index;
        first.last = index, first.lines += members[index].lines, ++first.count;
        members[index].last = -1;
    }

    const AttentionCall &call;
    PrefixMember *members;
    int64_t sharing = 0;
};

}  // namespace
