// Who touched which memory, of runtime.c: by blocks, by their lines where programs share a block or touch less than a
// GRAIN of it, and by bytes where they share a line.

static inline int other_than(int32_t who, int32_t me) {
    return (who != 0) & (who != me);
}

static void race(state *s, argument *a, int64_t at, int64_t access, int32_t other) {
    fail(s, RACE, a - s->argument, at - a->first, 1, access, other);
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

// `these` parts, of `unit` bytes, of what starts `at` bytes into the trace. False: its entry can't say that, and is to
// be split.
static inline int note_whole(
    state *s, argument *a, entry *e, uint64_t these, int64_t at, int64_t unit, int64_t access) {
    int32_t me = (int32_t)s->program;
    int write = access & WRITE;
    if (e->launch != (uint32_t)s->launch) {
        *e = (entry){(uint32_t)s->launch, 0, write ? me : 0, write ? 0 : me, write ? these : 0, write ? 0 : these};
        return 1;
    }
    if (e->split)
        return 0;
    int32_t *who = write ? &e->writer : &e->reader;
    uint64_t *which = write ? &e->written : &e->read;
    int alone = !(write && a->shared);
    uint64_t wrote = alone & other_than(e->writer, me) ? e->written & these : 0;
    uint64_t raced = wrote | (write & other_than(e->reader, me) ? e->read & these : 0);
    if (raced) {
        int b = __builtin_ctzll(raced);
        race(s, a, at + b * unit, access, wrote >> b & 1 ? e->writer : e->reader);
    }
    if (!other_than(*who, me)) {
        *who = me;
        *which |= these;
        return 1;
    }
    if (*which != these && (*who != MANY || these & ~*which))
        return 0;
    *who = MANY;
    return 1;
}

// `these` bytes of line n.
static void note_line(state *s, argument *a, int64_t n, uint64_t these, int64_t access) {
    entry *e = s->lines + n;
    if (note_whole(s, a, e, these, n * LINE, 1, access))
        return;
    if (!e->split) {
        e->split = ++s->bytewise_used;
        bytewise *of = &s->bytewise[e->split - 1];
        for (int b = 0; b < LINE; b++) {
            of->writer[b] = e->written >> b & 1 ? e->writer : 0;
            of->reader[b] = e->read >> b & 1 ? e->reader : 0;
        }
    }
    note_bytes(s, a, &s->bytewise[e->split - 1], these, n * LINE, access);
}

// The bytes of line `n` of a block, of whose grains `these` are given.
static inline uint64_t bytes_of(uint64_t these, int n) {
    uint64_t grains = these >> n * (LINE / GRAIN);
    return (-(grains & 1) & 0xffff) | (-(grains >> 1 & 1) & 0xffff0000) | (-(grains >> 2 & 1) & 0xffff00000000)
        | (-(grains >> 3 & 1) & 0xffff000000000000);
}

static void split(state *s, int64_t block) {
    entry *e = s->blocks + block;
    if (e->launch != (uint32_t)s->launch) {
        e->launch = (uint32_t)s->launch;
    } else if (!e->split) {
        for (int i = 0; i < LINES; i++) {
            uint64_t written = bytes_of(e->written, i), read = bytes_of(e->read, i);
            if (written | read)
                s->lines[block * LINES + i] = (entry){
                    (uint32_t)s->launch, 0, written ? e->writer : 0, read ? e->reader : 0, written, read};
        }
    }
    e->split = 1;
}

// `these` grains of a block.
static void note_block(state *s, argument *a, int64_t block, uint64_t these, int64_t access) {
    if (!these || note_whole(s, a, s->blocks + block, these, block * BLOCK, GRAIN, access))
        return;
    split(s, block);
    for (int i = 0; i < LINES; i++) {
        uint64_t bytes = bytes_of(these, i);
        if (bytes)
            note_line(s, a, block * LINES + i, bytes, access);
    }
}

// The `size` lowest bits, 1 to 64 of them.
static inline uint64_t ones(int64_t size) {
    return ~(uint64_t)0 >> (64 - size);
}

// The programs run one after the other, yet a race is found in any order: each byte knows who wrote and who read it.
static void note(
    state *s, argument *a, int64_t offset, int64_t rows, int64_t step, int64_t row, int64_t access) {
    int64_t at = a->first + offset;
    if (step == row) {
        row *= rows;
        rows = 1;
    }
    if ((at | row | (rows > 1 ? step : 0)) % GRAIN) {
        for (; rows > 0; rows--, at += step)
            for (int64_t from = at, to = at + row, end; from < to; from = end) {
                int64_t n = from / LINE;
                end = (n + 1) * LINE < to ? (n + 1) * LINE : to;
                split(s, n / LINES);
                note_line(s, a, n, ones(end - from) << from % LINE, access);
            }
        return;
    }
    // What one block has of all rows is noted at once.
    int64_t block = at / BLOCK, end;
    uint64_t these = 0;
    for (; rows > 0; rows--, at += step)
        for (int64_t from = at / GRAIN, to = from + row / GRAIN; from < to; from = end) {
            if (from / 64 != block) {
                note_block(s, a, block, these, access);
                block = from / 64;
                these = 0;
            }
            end = (block + 1) * 64 < to ? (block + 1) * 64 : to;
            these |= ones(end - from) << from % 64;
        }
    note_block(s, a, block, these, access);
}

// A place in the trace for all bytes that the arguments span. Arguments that share memory share it; else each begins
// with a block of its own, whatever its address: then programs that take a row each seldom share a block.
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
    int64_t blocks = 0;
    char *start = NULL, *reach = NULL;
    for (int64_t i = 0; i < n; i++) {
        argument *a = by_base[i];
        if (!i || a->base >= reach) {
            blocks += (reach - start + BLOCK - 1) / BLOCK;
            start = reach = a->base;
        }
        a->first = blocks * BLOCK + (a->base - start);
        if (a->base + a->extent > reach)
            reach = a->base + a->extent;
    }
}
