// What a kernel of the lowered lane calls instead of memory: its buffers, its copies, and the check of every access.
//
// A pointer argument comes as a handle, 1 << 62 | argument << 48 | (offset + 2^40): arithmetic on it keeps the
// argument that it came from, and no processor can follow it. hal_check makes an address of it.
// The structs are those of runtime.py, word for word.

#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BOUNDS = 1, RACE, WILD, MEMORY, STRAY };  // state.error
enum { WRITE = 1, COPY = 2 };                    // bits of an access
enum { MAX_DIMS = 4, MAX_ARGUMENTS = 64, CLASSES = 48, LABEL = 64, ARGUMENT_SHIFT = 48 };
// What the trace keeps one entry for: blocks of so many bytes, and where programs share one, its lines.
enum { MANY = -1, LINE = 64, GRAIN = 16, BLOCK = 64 * GRAIN, LINES = BLOCK / LINE };

static const int64_t BIAS = (int64_t)1 << 40;

// Who wrote and who read each part of a piece of memory: each GRAIN of a block, each byte of a line. As long as one
// program alone, or several the same parts, did either: a name (the program's number from 1, or MANY) and a bit a part.
typedef struct {
    uint32_t launch;  // an entry of an earlier launch counts as empty
    uint32_t split;   // it is told elsewhere: a block's by its lines, a line's by the bytewise of this number, from 1
    int32_t writer, reader;
    uint64_t written, read;
} entry;
typedef struct { int32_t writer[LINE], reader[LINE]; } bytewise;

typedef struct {
    char *base;
    int64_t extent, shared;  // shared: two programs may write one byte
    int64_t dims, inner;     // of a view with gaps: how many dims, and the bytes of a row
    struct { int64_t size, stride; } dim[MAX_DIMS];
    int64_t first;               // where base is in the trace
    int64_t count[4], bytes[4];  // by access
    int64_t copies[2];           // reads, writes
} argument;

enum { GIVEN = 5 + 2 * MAX_DIMS };  // words of an argument that the launch gives

typedef struct {
    int64_t program;  // the number, from 1, of the one that runs
    int64_t error, error_argument, error_offset, error_size, error_access, error_program, error_other;
    int64_t arena, arena_next, arena_end;
    char *sink;
    const char *const *constants;  // start and end of each, then a null
    int64_t traced, arguments;
    entry *blocks, *lines;
    bytewise *bytewise;
    int64_t bytewise_used, launch;
    void *free[CLASSES];
    argument argument[MAX_ARGUMENTS];
    jmp_buf *stop;
} state;

static void fail(state *s, int64_t error, int64_t arg, int64_t offset, int64_t size, int64_t access, int64_t other) {
    if (s->error)
        return;  // the first is the one to tell
    s->error = error;
    s->error_argument = arg;
    s->error_offset = offset;
    s->error_size = size;
    s->error_access = access;
    s->error_program = s->program;
    s->error_other = other;
}

// What a refused access gets instead: zeros to read (a loop bound read there ends its loop), a page to write.
static char *sink(state *s, int64_t access) {
    return s->sink + (access & WRITE) * 4096;
}

static argument *argument_of(state *s, uint64_t pointer) {
    uint64_t i = pointer >> ARGUMENT_SHIFT & 0x3fff;
    return pointer >> 62 == 1 && i < (uint64_t)s->arguments ? &s->argument[i] : NULL;
}

static int64_t offset_of(uint64_t pointer) {
    return (int64_t)(pointer & (((uint64_t)1 << ARGUMENT_SHIFT) - 1)) - BIAS;
}

static int in_arena(const state *s, uint64_t pointer, int64_t size) {
    uint64_t room = s->arena_end - s->arena;
    return (uint64_t)size <= room && pointer - s->arena <= room - size;
}

static int in_a_gap(const argument *a, int64_t offset, int64_t size) {
    for (int64_t d = 0; d < a->dims; d++) {
        if (offset / a->dim[d].stride >= a->dim[d].size)
            return 1;
        offset %= a->dim[d].stride;
    }
    return a->dims && offset + size > a->inner;
}

#include "trace.c"

static int is_constant(const state *s, const char *p, int64_t size) {
    for (const char *const *c = s->constants; *c; c += 2)
        if (p >= c[0] && p + size <= c[1])
            return 1;
    return 0;
}

// The address behind a pointer, if the access is allowed; else what `sink` gives.
void *hal_check(state *s, char *pointer, int64_t size, int64_t access) {
    uint64_t p = (uint64_t)pointer;
    if (!s->traced || in_arena(s, p, size))
        return pointer;
    argument *a = argument_of(s, p);
    if (!a) {
        if (!(access & WRITE) && is_constant(s, pointer, size))
            return pointer;
        fail(s, WILD, 0, (int64_t)p, size, access, 0);
        return sink(s, access);
    }
    int64_t offset = offset_of(p);
    if (offset < 0 || offset + size > a->extent || in_a_gap(a, offset, size)) {
        fail(s, BOUNDS, a - s->argument, offset, size, access, 0);
        return sink(s, access);
    }
    a->count[access]++;
    a->bytes[access] += size;
    note(s, a, offset, 1, size, size, access);
    return a->base + offset;
}

// A loop over a whole buffer of `size` bytes begins, whose accesses have no check of their own, and `p` is none of the
// program's buffers. There is nothing that the loop could be given instead.
_Noreturn void hal_stray(state *s, char *p, int64_t size) {
    fail(s, STRAY, 0, (int64_t)p, size, WRITE, 0);
    longjmp(*s->stop, 1);
}

// Buffers of a program: power-of-two blocks, a free list for each size, all forgotten between programs. They are
// filled with 0x7f (large in every integer type, large or NaN in every float): a program must not depend on what
// its buffers held before. Where the arena is full, the launch has failed, but the program goes on to its end, or to a
// loop over what it did not get.
void *hal_alloc(state *s, int64_t size) {
    int64_t class = 64 - __builtin_clzll((uint64_t)(size < 64 ? 64 : size) - 1), block = LABEL + ((int64_t)1 << class);
    char *p = s->free[class];
    if (p) {
        s->free[class] = *(void **)p;
    } else {
        char *label = (char *)s->arena_next;
        if (s->arena_next + block <= s->arena_end) {
            s->arena_next += block;
        } else {
            fail(s, MEMORY, 0, 0, size, 0, 0);
            label = aligned_alloc(LABEL, block);
        }
        *(int64_t *)label = class;
        p = label + LABEL;
    }
    return memset(p, 0x7f, size);
}

void hal_free(state *s, char *p) {
    int64_t class = *(int64_t *)(p - LABEL);
    *(void **)p = s->free[class];
    s->free[class] = p;
}

static void count_copy(state *s, const char *p, int64_t write) {
    argument *a = argument_of(s, (uint64_t)p);
    if (a && s->traced)
        a->copies[write]++;
}

static void copy_row(state *s, char *to, char *from, int64_t size) {
    char *source = hal_check(s, from, size, COPY), *target = hal_check(s, to, size, COPY | WRITE);
    if (!s->error)
        memmove(target, source, size);
}

void hal_memcpy(state *s, char *to, char *from, int64_t size) {
    if (!size)
        return;
    count_copy(s, from, 0);
    count_copy(s, to, 1);
    copy_row(s, to, from, size);
}

void hal_memset(state *s, char *to, int8_t value, int64_t size) {
    char *target = hal_check(s, to, size, COPY | WRITE);
    if (!s->error)
        memset(target, value, size);
}

typedef struct { char *allocated, *aligned; int64_t offset, sizes_and_strides[]; } descriptor;
typedef struct { int64_t rank; descriptor *of; } unranked;

// Where every one of `rows` rows, `step` bytes apart, may be had as it is: the first one's address, and all are noted
// as so many accesses. Else null: then each has to be looked at by itself, to know the first that is wrong.
static char *all_rows(state *s, char *p, int64_t rows, int64_t step, int64_t row, int64_t access) {
    int64_t whole = (rows - 1) * step + row;
    if (!s->traced || in_arena(s, (uint64_t)p, whole))
        return p;
    argument *a = argument_of(s, (uint64_t)p);
    int64_t offset = offset_of((uint64_t)p);
    if (!a || offset < 0 || offset + whole > a->extent)
        return NULL;
    for (int64_t r = 0; a->dims && r < rows; r++)
        if (in_a_gap(a, offset + r * step, row))
            return NULL;
    a->count[access] += rows;
    a->bytes[access] += rows * row;
    note(s, a, offset, rows, step, row, access);
    return a->base + offset;
}

// Rows of a size that the compiler knows are copied without a call.
static void move_rows(char *to, const char *from, int64_t rows, int64_t to_step, int64_t from_step, int64_t row) {
#define ROWS(size)                                                 \
    case size:                                                     \
        for (; rows > 0; rows--, to += to_step, from += from_step) \
            memcpy(to, from, size);                                \
        return;
    switch (row) {
        ROWS(2) ROWS(4) ROWS(8) ROWS(16) ROWS(32) ROWS(64) ROWS(128)
    }
    for (; rows > 0; rows--, to += to_step, from += from_step)
        memcpy(to, from, row);
}

static void copy_rows(state *s, char *to, char *from, int64_t rows, int64_t to_step, int64_t from_step, int64_t row) {
    char *source = NULL, *target = NULL;
    int from_own = in_arena(s, (uint64_t)from, row), to_own = in_arena(s, (uint64_t)to, row);
    // Of rows that overlap one another, and of a copy inside one memory, the order matters.
    if (from_step >= row && to_step >= row && (from_own || to_own))
        source = all_rows(s, from, rows, from_step, row, COPY);
    if (source)
        target = all_rows(s, to, rows, to_step, row, COPY | WRITE);
    if (target && from_own != to_own && !s->error) {
        move_rows(target, source, rows, to_step, from_step, row);
        return;
    }
    for (int64_t r = 0; r < rows && !s->error; r++) {
        if (target)
            memmove(target + r * to_step, source + r * from_step, row);
        else
            copy_row(s, to + r * to_step, from + r * from_step, row);
    }
}

// MLIR's memrefCopy.
void hal_copy(state *s, int64_t item, unranked *from, unranked *to) {
    int64_t rank = from->rank, index[16] = {0}, at_from = 0, at_to = 0;
    const int64_t *sizes = from->of->sizes_and_strides, *from_step = sizes + rank;
    const int64_t *to_step = to->of->sizes_and_strides + rank;
    char *source = from->of->aligned + from->of->offset * item, *target = to->of->aligned + to->of->offset * item;
    for (int64_t d = 0; d < rank; d++)
        if (sizes[d] <= 0)
            return;
    count_copy(s, source, 0);
    count_copy(s, target, 1);
    int64_t row = item, rows = 1, from_rows = item, to_rows = item;
    if (rank && from_step[rank - 1] == 1 && to_step[rank - 1] == 1)
        row *= sizes[--rank];
    if (rank) {
        rows = sizes[--rank];
        from_rows = from_step[rank] * item;
        to_rows = to_step[rank] * item;
    }
    for (;;) {
        copy_rows(s, target + at_to * item, source + at_from * item, rows, to_rows, from_rows, row);
        int64_t d = rank;
        for (; d > 0; d--) {
            at_from += from_step[d - 1];
            at_to += to_step[d - 1];
            if (++index[d - 1] < sizes[d - 1])
                break;
            at_from -= sizes[d - 1] * from_step[d - 1];
            at_to -= sizes[d - 1] * to_step[d - 1];
            index[d - 1] = 0;
        }
        if (!d || s->error)
            return;
    }
}

typedef void kernel(state *, const int64_t *args, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t);

// `given`: GIVEN words of each argument.
void hal_run(kernel *run, state *s, const int64_t *given, const int64_t *args, int32_t gx, int32_t gy, int32_t gz) {
    jmp_buf stop;
    s->stop = &stop;
    s->error = s->bytewise_used = 0;
    s->launch++;
    for (int64_t i = 0; i < s->arguments; i++) {
        memset(&s->argument[i], 0, sizeof s->argument[i]);
        memcpy(&s->argument[i], given + i * GIVEN, GIVEN * sizeof *given);
    }
    if (s->traced)
        spread(s);
    if (setjmp(stop))
        return;
    for (int32_t i = 0; !s->error && i < gx * gy * gz; i++) {
        s->program = i + 1;
        s->arena_next = s->arena;
        memset(s->free, 0, sizeof s->free);
        run(s, args, gx, gy, gz, i % gx, i / gx % gy, i / gx / gy);
    }
}
