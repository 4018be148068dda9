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
enum { MAX_DIMS = 4, MAX_ARGUMENTS = 64, CLASSES = 48, LABEL = 64, ARGUMENT_SHIFT = 48, MANY = -1, LINE = 64 };

static const int64_t BIAS = (int64_t)1 << 40;

// Who wrote and who read each byte of a line of memory. As long as one program alone, or several the same bytes, did
// either: a name (the program's number from 1, or MANY) and a bit a byte. Else `bytes` says it of each.
typedef struct { int32_t writer[LINE], reader[LINE]; } bytewise;
typedef struct {
    uint32_t launch;  // an entry of an earlier launch counts as empty
    uint32_t bytes;   // number, from 1, of the bytewise
    int32_t writer, reader;
    uint64_t written, read;
} line;

typedef struct {
    char *base;
    int64_t extent, shared;  // shared: two programs may write one byte
    int64_t dims, inner;     // of a view with gaps: how many dims, and the bytes of a row
    struct { int64_t size, stride; } dim[MAX_DIMS];
    line *lines;                 // the first is base's
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
    line *lines;
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

static inline int other_than(int32_t who, int32_t me) {
    return (who != 0) & (who != me);
}

static void race(state *s, argument *a, int64_t offset, int64_t access, int32_t other) {
    fail(s, RACE, a - s->argument, offset, 1, access, other);
}

static void note_bytes(state *s, argument *a, bytewise *of, uint64_t these, int64_t at, int64_t access) {
    int32_t me = (int32_t)s->program, *mine = access & WRITE ? of->writer : of->reader;
    int write = access & WRITE, alone = !(write && a->shared);
    for (; these; these &= these - 1) {
        int b = __builtin_ctzll(these), wrote = alone & other_than(of->writer[b], me);
        if (wrote | (write & other_than(of->reader[b], me)))
            race(s, a, at + b, access, wrote ? of->writer[b] : of->reader[b]);
        mine[b] = other_than(mine[b], me) ? MANY : me;
    }
}

static bytewise *split(state *s, line *l) {
    if (!l->bytes) {
        l->bytes = ++s->bytewise_used;
        bytewise *of = &s->bytewise[l->bytes - 1];
        for (int b = 0; b < LINE; b++) {
            of->writer[b] = l->written >> b & 1 ? l->writer : 0;
            of->reader[b] = l->read >> b & 1 ? l->reader : 0;
        }
    }
    return &s->bytewise[l->bytes - 1];
}

// `these` bytes of a line that starts `at` bytes from the argument's base.
static inline void note_line(state *s, argument *a, line *l, uint64_t these, int64_t at, int64_t access) {
    int32_t me = (int32_t)s->program;
    int write = access & WRITE;
    if (l->launch != (uint32_t)s->launch) {
        *l = (line){(uint32_t)s->launch, 0, write ? me : 0, write ? 0 : me, write ? these : 0, write ? 0 : these};
        return;
    }
    int32_t *who = write ? &l->writer : &l->reader;
    uint64_t *which = write ? &l->written : &l->read;
    if (!l->bytes) {
        int alone = !(write && a->shared);
        uint64_t wrote = alone & other_than(l->writer, me) ? l->written & these : 0;
        uint64_t raced = wrote | (write & other_than(l->reader, me) ? l->read & these : 0);
        if (raced) {
            int b = __builtin_ctzll(raced);
            race(s, a, at + b, access, wrote >> b & 1 ? l->writer : l->reader);
        }
        if (!other_than(*who, me)) {
            *who = me;
            *which |= these;
            return;
        }
        if (*which == these || (*who == MANY && !(these & ~*which))) {
            *who = MANY;
            return;
        }
    }
    note_bytes(s, a, split(s, l), these, at, access);
}

// The programs run one after the other, yet a race is found in any order: each byte knows who wrote and who read it.
static void note(state *s, argument *a, int64_t offset, int64_t size, int64_t access) {
    int64_t skip = (int64_t)((uint64_t)a->base % LINE), from = skip + offset, to = from + size, n = from / LINE;
    uint64_t these = ~(uint64_t)0 << from % LINE;
    for (; (n + 1) * LINE <= to; n++, these = ~(uint64_t)0)
        note_line(s, a, a->lines + n, these, n * LINE - skip, access);
    if (n * LINE < to)
        note_line(s, a, a->lines + n, these & (((uint64_t)1 << to % LINE) - 1), n * LINE - skip, access);
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
    note(s, a, offset, size, access);
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
    if (step == row)
        note(s, a, offset, whole, access);
    else
        for (int64_t r = 0; r < rows; r++)
            note(s, a, offset + r * step, row, access);
    return a->base + offset;
}

static void copy_rows(state *s, char *to, char *from, int64_t rows, int64_t to_step, int64_t from_step, int64_t row) {
    // Of rows that overlap one another, and of a copy inside one argument, the order matters.
    char *source = NULL, *target = NULL;
    if (from_step >= row && to_step >= row && (in_arena(s, (uint64_t)from, row) || in_arena(s, (uint64_t)to, row)))
        source = all_rows(s, from, rows, from_step, row, COPY);
    if (source)
        target = all_rows(s, to, rows, to_step, row, COPY | WRITE);
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

// Lines for all bytes that the arguments span; arguments that share memory share them.
static void spread(state *s) {
    argument *by_base[MAX_ARGUMENTS];
    int64_t n = 0;
    for (argument *a = s->argument; a < s->argument + s->arguments; a++) {
        if (!a->extent)
            continue;
        int64_t j = n++;
        for (; j > 0 && by_base[j - 1]->base > a->base; j--)
            by_base[j] = by_base[j - 1];
        by_base[j] = a;
    }
    line *next = s->lines;  // of memory's line `reach`, or of a later one: between arguments there are none
    int64_t reach = 0;
    for (int64_t i = 0; i < n; i++) {
        argument *a = by_base[i];
        int64_t first = (uint64_t)a->base / LINE, end = ((uint64_t)a->base + a->extent - 1) / LINE + 1;
        if (first > reach)
            reach = first;
        a->lines = next - (reach - first);
        if (end > reach) {
            next += end - reach;
            reach = end;
        }
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
