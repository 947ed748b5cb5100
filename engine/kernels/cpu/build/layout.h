// Exports the sizes and offsets of the structures of a C interface: layout.py compares them with the
// structures of the callers when it loads a library.
#pragma once

#include <cstddef>
#include <cstdint>

// A field; without a name, the whole structure.
struct FieldLayout {
    const char *structure, *field;
    int64_t offset, size;
};

// LAYOUT(structure, fields...): the entries of a structure. A macro cannot call itself, so FIELDS continues through
// NEXT_FIELDS, and RESCAN lets the preprocessor expand that up to 64 times.
#define PARENTHESES ()
#define RESCAN(...) RESCAN_16(RESCAN_16(RESCAN_16(RESCAN_16(__VA_ARGS__))))
#define RESCAN_16(...) RESCAN_4(RESCAN_4(RESCAN_4(RESCAN_4(__VA_ARGS__))))
#define RESCAN_4(...) RESCAN_1(RESCAN_1(RESCAN_1(RESCAN_1(__VA_ARGS__))))
#define RESCAN_1(...) __VA_ARGS__
#define FIELDS(structure, field, ...)                                                    \
    {#structure, #field, offsetof(structure, field), sizeof(structure::field)},          \
        __VA_OPT__(NEXT_FIELDS PARENTHESES(structure, __VA_ARGS__))
#define NEXT_FIELDS() FIELDS
#define LAYOUT(structure, ...) {#structure, nullptr, 0, sizeof(structure)}, RESCAN(FIELDS(structure, __VA_ARGS__))

// The table ends with a null structure.
#define EXPORT_LAYOUT(...)                                                                                                   \
    extern "C" __attribute__((visibility("default"))) const FieldLayout cellar_layout[] = {__VA_ARGS__{nullptr, nullptr, 0, 0}};
