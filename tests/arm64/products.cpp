// Products of a library of the linear kernel, for files of cases:
//
//     products LIBRARY CASES RESULTS
//
// A case: 6 int64 (rows, columns, outputs, weight format, bytes of codes, bytes of scales), then rows [rows][columns] of
// float32, codes and scales. A result: [rows][outputs] of float32.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "products/linear.h"

namespace {

int fail(const char *reason) {
    fprintf(stderr, "%s\n", reason);
    return 1;
}

void *read_bytes(FILE *from, size_t bytes) {
    void *const memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!memory || fread(memory, 1, bytes, from) != bytes) exit(fail("a case is truncated"));
    return memory;
}

}  // namespace

int main(int, char **arguments) {
    void *const library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fail(dlerror());
    const auto multiply = (decltype(&cellar_multiply))dlsym(library, "cellar_multiply");
    FILE *const cases = fopen(arguments[2], "rb"), *const results = fopen(arguments[3], "wb");
    int64_t own[6];
    while (fread(own, sizeof own, 1, cases) == 1) {
        const int64_t rows = own[0], columns = own[1], outputs = own[2];
        void *const input = read_bytes(cases, rows * columns * sizeof(float));
        void *const codes = read_bytes(cases, own[4]), *const scales = read_bytes(cases, own[5]);
        float *const output = (float *)calloc(rows * outputs, sizeof(float));
        const QuantisedMatrix matrix = {(uint8_t *)codes, (uint8_t *)scales, (WeightFormat)own[3], outputs, output};
        const LinearCall call = {input, FLOAT32, columns, rows, columns, &matrix, 1, 2};
        if (multiply(&call) != DONE) return fail("no memory");
        fwrite(output, sizeof(float), rows * outputs, results);
        free(input), free(codes), free(scales), free(output);
    }
    return fclose(results) ? fail("a result is not written") : 0;
}
