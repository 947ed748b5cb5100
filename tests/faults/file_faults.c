// Preloaded into a test process: the k-th call that changes files below a folder kills the process or fails.
// It sees the calls of Python, SQLite, safetensors and all other libraries that call libc.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[4096];
static size_t root_length;
static long chosen, calls;
// 0: only count; KILL; TEAR: write the first half, then kill; CUT: kill as a power cut would; else an error number.
enum { KILL = -1, TEAR = -2, CUT = -3 };
static int action, sticky;
// Writes that were not synchronised since, in their order, with what was there before: a power cut undoes the later half of
// those of each file. The file keeps its length, as where only the file system's journal was written.
struct unsaved { dev_t device; ino_t number; int file; off_t start; size_t count; char *before; };
static struct unsaved *unsaved;
static int unsaved_count, unsaved_capacity;

// The calls below `folder` from now on count from 1; `call` 0 chooses none. Sticky: it and all later calls fail.
void file_faults_arm(const char *folder, long call, int what, int stays) {
    snprintf(root, sizeof(root), "%s", folder);
    root_length = strlen(root);
    calls = 0, action = what, sticky = stays, chosen = call;
}

// The number of calls since then; from now on none is counted.
long file_faults_disarm(void) {
    root_length = 0;
    return calls;
}

// The number of calls so far.
long file_faults_calls(void) { return calls; }

static int is_below(const char *path) { return !strncmp(path, root, root_length); }

static int is_inside(int directory, const char *path) {
    if (!root_length) return 0;
    if (path && path[0] == '/') return is_below(path);
    char link[64], target[4096];
    if (directory == AT_FDCWD) snprintf(link, sizeof(link), "/proc/self/cwd");
    else snprintf(link, sizeof(link), "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, target, sizeof(target) - 1);
    if (length < 0) return 0;
    target[length] = 0;
    return is_below(target);
}

static int is_same(const struct unsaved *write, const struct stat *status) {
    return write->device == status->st_dev && write->number == status->st_ino;
}

// Called before a write of `count` bytes; `start` -1: where the file is.
static void mark_unsaved(int file, off_t start, size_t count) {
    struct stat status;
    if (action != CUT || !count || fstat(file, &status)) return;
    if (start < 0) start = fcntl(file, F_GETFL) & O_APPEND ? status.st_size : lseek(file, 0, SEEK_CUR);
    char link[64];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    const int copy = syscall(SYS_openat, AT_FDCWD, link, O_RDWR | O_CLOEXEC);
    if (copy < 0) return;
    if (unsaved_count == unsaved_capacity) {
        unsaved_capacity = 2 * unsaved_capacity + 64;
        unsaved = realloc(unsaved, unsaved_capacity * sizeof(*unsaved));
    }
    char *before = calloc(count, 1);
    if (pread(copy, before, count, start) < 0) memset(before, 0, count);
    unsaved[unsaved_count++] = (struct unsaved){status.st_dev, status.st_ino, copy, start, count, before};
}

// Called before a synchronisation.
static void mark_saved(int file) {
    struct stat status;
    if (action != CUT || fstat(file, &status)) return;
    int left = 0;
    for (int i = 0; i < unsaved_count; ++i) {
        if (is_same(&unsaved[i], &status)) {
            close(unsaved[i].file);
            free(unsaved[i].before);
        } else {
            unsaved[left++] = unsaved[i];
        }
    }
    unsaved_count = left;
}

static void undo(const struct unsaved *write) {
    struct stat status;
    if (fstat(write->file, &status) || status.st_size <= write->start) return;
    const size_t left = status.st_size - write->start;
    syscall(SYS_pwrite64, write->file, write->before, write->count < left ? write->count : left, write->start);
}

static void lose_unsaved(void) {
    for (int i = unsaved_count - 1; i >= 0; --i) {
        struct stat status;
        if (fstat(unsaved[i].file, &status)) continue;
        int earlier = 0, later = 0;
        for (int j = 0; j < unsaved_count; ++j)
            if (is_same(&unsaved[j], &status)) j < i ? ++earlier : j > i ? ++later : 0;
        if (later <= earlier) undo(&unsaved[i]);
    }
}

// The fault of a call: 0 for none. Does not return where the process is killed.
static int fault(int directory, const char *path, int is_write) {
    if (!is_inside(directory, path)) return 0;
    const long call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (!action || !chosen || call < chosen || (call > chosen && !sticky)) return 0;
    if (action == CUT) lose_unsaved();
    if (action == KILL || action == CUT || (action == TEAR && !is_write)) {
        kill(getpid(), SIGKILL);
        pause();
    }
    return action;
}

#define REAL(name) ((__typeof__(&name))real(&slot_##name, #name))
static void *real(void **slot, const char *name) {
    if (!*slot) *slot = dlsym(RTLD_NEXT, name);
    return *slot;
}

#define CALL(name, directory, path, parameters, arguments)                \
    static void *slot_##name;                                             \
    int name parameters {                                                 \
        const int number = fault(directory, path, 0);                     \
        if (number) return errno = number, -1;                            \
        return REAL(name) arguments;                                      \
    }

#define WRITE(name, parameters, half, whole, offset, size)               \
    static void *slot_##name;                                             \
    ssize_t name parameters {                                             \
        const int number = fault(file, NULL, 1);                          \
        if (number == TEAR) {                                             \
            if (REAL(name) half < 0) {}                                   \
            kill(getpid(), SIGKILL);                                      \
            pause();                                                      \
        }                                                                 \
        if (number) return errno = number, -1;                            \
        if (is_inside(file, NULL)) mark_unsaved(file, offset, size);      \
        return REAL(name) whole;                                          \
    }

#define OPEN(name)                                                        \
    static void *slot_##name;                                             \
    int name(const char *path, int flags, ...) {                          \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                                     \
        const int changes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR); \
        const int number = changes ? fault(AT_FDCWD, path, 0) : 0;        \
        if (number) return errno = number, -1;                            \
        return REAL(name)(path, flags, mode);                             \
    }

#define OPENAT(name)                                                      \
    static void *slot_##name;                                             \
    int name(int directory, const char *path, int flags, ...) {           \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list);                                                     \
        const int changes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR); \
        const int number = changes ? fault(directory, path, 0) : 0;       \
        if (number) return errno = number, -1;                            \
        return REAL(name)(directory, path, flags, mode);                  \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
WRITE(write, (int file, const void *bytes, size_t count), (file, bytes, count / 2), (file, bytes, count), -1, count)
WRITE(pwrite, (int file, const void *bytes, size_t count, off_t start), (file, bytes, count / 2, start), (file, bytes, count, start),
      start, count)
WRITE(pwrite64, (int file, const void *bytes, size_t count, off64_t start), (file, bytes, count / 2, start),
      (file, bytes, count, start), start, count)
static size_t total(const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
    return bytes;
}
WRITE(writev, (int file, const struct iovec *parts, int count), (file, parts, count / 2), (file, parts, count), -1, total(parts, count))
#define SYNC(name)                                                        \
    static void *slot_##name;                                             \
    int name(int file) {                                                  \
        const int number = fault(file, NULL, 0);                          \
        if (number) return errno = number, -1;                            \
        mark_saved(file);                                                 \
        return REAL(name)(file);                                          \
    }

SYNC(fsync)
SYNC(fdatasync)
CALL(ftruncate, file, NULL, (int file, off_t size), (file, size))
CALL(ftruncate64, file, NULL, (int file, off64_t size), (file, size))
CALL(fallocate, file, NULL, (int file, int mode, off_t start, off_t size), (file, mode, start, size))
CALL(truncate, AT_FDCWD, path, (const char *path, off_t size), (path, size))
CALL(rename, AT_FDCWD, to, (const char *from, const char *to), (from, to))
CALL(renameat, target, to, (int source, const char *from, int target, const char *to), (source, from, target, to))
CALL(renameat2, target, to, (int source, const char *from, int target, const char *to, unsigned flags),
     (source, from, target, to, flags))
CALL(unlink, AT_FDCWD, path, (const char *path), (path))
CALL(unlinkat, directory, path, (int directory, const char *path, int flags), (directory, path, flags))
CALL(rmdir, AT_FDCWD, path, (const char *path), (path))
CALL(mkdir, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode))
CALL(mkdirat, directory, path, (int directory, const char *path, mode_t mode), (directory, path, mode))
CALL(link, AT_FDCWD, to, (const char *from, const char *to), (from, to))
CALL(symlink, AT_FDCWD, to, (const char *from, const char *to), (from, to))
