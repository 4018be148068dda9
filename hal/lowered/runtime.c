// What a kernel of the lowered lane calls instead of memory: its buffers, its copies, and the check of every access.
//
// A pointer argument comes as a handle, 1 << 62 | argument << 48 | (offset + 2^40): arithmetic on it keeps the
// argument that it came from, and no processor can follow it. hal_check makes an address of it.
// The structs are those of runtime.py, word for word.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BOUNDS = 1, RACE, WILD, MEMORY };  // state.error
enum { WRITE = 1, COPY = 2 };             // bits of an access
enum { MAX_DIMS = 4, MAX_ARGUMENTS = 64, CLASSES = 48, LABEL = 64, ARGUMENT_SHIFT = 48, MANY = -1 };

static const int64_t BIAS = (int64_t)1 << 40;

typedef struct {
    char *base;
    int64_t extent;
    int32_t *writers, *readers;  // a program's number + 1 for each byte of the extent; 0: nobody's; MANY
    int64_t shared;              // two programs may write one byte
    int64_t dims, inner;         // of a view with gaps: how many dims, and the bytes of a row
    struct { int64_t size, stride; } dim[MAX_DIMS];
    int64_t count[4], bytes[4];  // by access
    int64_t copies[2];           // reads, writes
} argument;

typedef struct {
    int64_t program;  // the number, from 1, of the one that runs
    int64_t error, error_argument, error_offset, error_size, error_access, error_program, error_other;
    int64_t arena, arena_next, arena_end;
    char *sink;
    const char *const *constants;  // start and end of each, then a null
    int64_t traced, arguments;
    void *free[CLASSES];
    argument argument[MAX_ARGUMENTS];
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

static int in_a_gap(const argument *a, int64_t offset, int64_t size) {
    for (int64_t d = 0; d < a->dims; d++) {
        if (offset / a->dim[d].stride >= a->dim[d].size)
            return 1;
        offset %= a->dim[d].stride;
    }
    return a->dims && offset + size > a->inner;
}

static inline int other_than(int32_t who, int32_t me) {
    return (who != 0) & (who != me);
}

// The programs run one after the other, yet a race is found in any order: each byte knows who wrote and who read it.
static void note(state *s, argument *a, int64_t offset, int64_t size, int64_t access) {
    int32_t *writers = a->writers + offset, *readers = a->readers + offset, me = (int32_t)s->program;
    int write = access & WRITE, alone = !(write && a->shared), race = 0;
    for (int64_t b = 0; b < size; b++)
        race |= (alone & other_than(writers[b], me)) | (write & other_than(readers[b], me));
    for (int64_t b = 0; race; b++) {
        int wrote = alone & other_than(writers[b], me);
        if (wrote | (write & other_than(readers[b], me))) {
            fail(s, RACE, a - s->argument, offset + b, 1, access, wrote ? writers[b] : readers[b]);
            break;
        }
    }
    int32_t *mine = write ? writers : readers;
    for (int64_t b = 0; b < size; b++)
        mine[b] = other_than(mine[b], me) ? MANY : me;
}

static int is_constant(const state *s, const char *p, int64_t size) {
    for (const char *const *c = s->constants; *c; c += 2)
        if (p >= c[0] && p + size <= c[1])
            return 1;
    return 0;
}

// The address behind a pointer, if the access is allowed; else what `sink` gives.
void *hal_check(state *s, char *pointer, int64_t size, int64_t access) {
    uint64_t p = (uint64_t)pointer;
    if (!s->traced || p - s->arena <= (uint64_t)(s->arena_end - s->arena - size))
        return pointer;
    argument *a = argument_of(s, p);
    if (!a) {
        if (!(access & WRITE) && is_constant(s, pointer, size))
            return pointer;
        fail(s, WILD, 0, (int64_t)p, size, access, 0);
        return sink(s, access);
    }
    int64_t offset = (int64_t)(p & (((uint64_t)1 << ARGUMENT_SHIFT) - 1)) - BIAS;
    if (offset < 0 || offset + size > a->extent || in_a_gap(a, offset, size)) {
        fail(s, BOUNDS, a - s->argument, offset, size, access, 0);
        return sink(s, access);
    }
    a->count[access]++;
    a->bytes[access] += size;
    note(s, a, offset, size, access);
    return a->base + offset;
}

// Buffers of a program: power-of-two blocks, a free list for each size, all forgotten between programs. They are
// filled with 0x7f (large in every integer type, large or NaN in every float): a program must not depend on what
// its buffers held before. Where the arena is full, the launch has failed, but the program goes on to its end.
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
    int64_t row = item;
    if (rank && from_step[rank - 1] == 1 && to_step[rank - 1] == 1)
        row *= sizes[--rank];
    for (;;) {
        copy_row(s, target + at_to * item, source + at_from * item, row);
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

void hal_run(kernel *run, state *s, const int64_t *args, int32_t gx, int32_t gy, int32_t gz) {
    for (int32_t i = 0; !s->error && i < gx * gy * gz; i++) {
        s->program = i + 1;
        s->arena_next = s->arena;
        memset(s->free, 0, sizeof s->free);
        run(s, args, gx, gy, gz, i % gx, i / gx % gy, i / gx / gy);
    }
}

// fp32 -> bf16 to nearest even, NaN kept quiet; not every C library has it. Its result is the low half of the
// register that a float is returned in.
float hal_truncsfbf2(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    memcpy(&x, &bits, 4);
    return x;
}
