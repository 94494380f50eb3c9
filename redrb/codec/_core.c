/* The inner loops of the codec: samples' memory to blobs, and blobs into padded memory.
 *
 * `docs/wire-format.md` specifies the bytes, and `redrb/codec/plain` does the same in plain
 * Python: both are held to the same tests. Python keeps tensors alive, checks what users give, and
 * does everything that is rare. Blobs come from anybody: every read of a blob is bounds-checked,
 * numbers out of a header are checked against the limits before memory is taken for them, and
 * nothing here recurses.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__) && \
    !defined(REDRB_NO_CLONES)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

/* Bodies of a blob, and memory that torch borrowed, may begin at any address. */
#if defined(__GNUC__)
#define ANYWHERE __attribute__((aligned(1), may_alias))
#else
#define ANYWHERE
#endif
typedef uint8_t u8;
typedef uint16_t ANYWHERE u16;
typedef uint32_t ANYWHERE u32;
typedef uint64_t ANYWHERE u64;
typedef int8_t i8;
typedef int16_t ANYWHERE i16;
typedef int32_t ANYWHERE i32;
typedef int64_t ANYWHERE i64;

enum { BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64,
       FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, CODES };
enum { BITS, SIGNED, UNSIGNED, FLOATING };

/* Bytes of an element, kind of number, code in DLPack, and the bits that are all set where a float is
 * not finite (0: only Python knows). */
static const struct { uint8_t size, kind, dlpack; uint64_t exponent; } DTYPES[CODES] = {
    [BOOL] = {1, BITS, 6, 0},
    [INT8] = {1, SIGNED, 0, 0}, [INT16] = {2, SIGNED, 0, 0},
    [INT32] = {4, SIGNED, 0, 0}, [INT64] = {8, SIGNED, 0, 0},
    [UINT8] = {1, UNSIGNED, 1, 0}, [UINT16] = {2, UNSIGNED, 1, 0},
    [UINT32] = {4, UNSIGNED, 1, 0}, [UINT64] = {8, UNSIGNED, 1, 0},
    [FLOAT16] = {2, FLOATING, 2, 0x7c00}, [FLOAT32] = {4, FLOATING, 2, 0x7f800000},
    [FLOAT64] = {8, FLOATING, 2, 0x7ff0000000000000}, [BFLOAT16] = {2, FLOATING, 4, 0x7f80},
    [FLOAT8_E4M3FN] = {1, FLOATING, 10, 0}, [FLOAT8_E5M2] = {1, FLOATING, 12, 0},
};

#define INTERFACE 3 /* of these functions; Python uses a core with the same number alone */
#define PREFIX_BYTES 16
#define MAX_BLOB_BYTES ((uint64_t)512 << 20)
#define MAX_SCHEMA_BYTES 65535
#define MAX_HEADER_BYTES (1 << 20)
#define MAX_EXTRAS_BYTES (256u << 20)
#define MAX_SAMPLES 4096
#define MAX_COLUMNS 128
#define MAX_RANK 8
#define MAX_ELEMENTS ((uint64_t)1 << 31)
#define DECODED_LIMIT(BLOB_BYTES) (((uint64_t)256 << 20) + 64 * (uint64_t)(BLOB_BYTES))
#define MIN_RUN 16
#define RELEASE_BYTES (256 << 10) /* work on less than this is done before a lock is handed over */
#define MISSING UINT64_MAX        /* in the place of a shape: the sample has none of this column */

/* The parts of a column's entry in the header, one for each sample or one for all. */
enum { REF, LEAD, LEAD_VALUE, TRAIL, TRAIL_VALUE, PARTS };

typedef struct { uint64_t count, rank; uint32_t sizes[MAX_RANK]; } Shape; /* unused sizes are 0 */

static PyObject *EncodeError, *DecodeError, *name_is_neg, *name_policy_version;

#define WITHOUT_LOCK_IF(LARGE, WORK)                                     \
    do {                                                                 \
        PyThreadState *released = (LARGE) ? PyEval_SaveThread() : NULL;  \
        WORK;                                                            \
        if (released) PyEval_RestoreThread(released);                    \
    } while (0)

static uint64_t body_bytes(int wire, uint64_t count) {
    return wire == BOOL ? (count + 7) >> 3 : count * DTYPES[wire].size;
}

/* Count the elements of a shape whose sizes are known; false where it is too large. */
static bool count_elements(Shape *shape) {
    uint64_t room = shape->count = 1; /* dimensions of 0 count as 1 */
    for (uint64_t i = 0; i < shape->rank; i++) {
        shape->count *= shape->sizes[i];
        room *= shape->sizes[i] ? shape->sizes[i] : 1;
        if (room > MAX_ELEMENTS) return false;
    }
    return true;
}

/* ---------------------------------------------------------------------------------------------
 * Elements: runs, ranges, conversions. Each loop is plain, so that the compiler makes it wide.
 */

/* Which bits occur: `any` of the values as unsigned, `magnitude` of v or -1 - v, as signed. */
typedef struct { uint64_t any, magnitude; } Range;

#define LOOPS(U, I, N)                                                                        \
    /* How many elements at the start, or at the end, are one value. */                       \
    FAST static uint64_t run_##N(const void *from, uint64_t count, bool back) {               \
        const U *at = from;                                                                   \
        const U value = at[back ? count - 1 : 0];                                             \
        uint64_t i = 0;                                                                       \
        for (; i + 64 <= count; i += 64) {                                                    \
            const U *block = back ? at + (count - i - 64) : at + i;                           \
            U differs = 0;                                                                    \
            for (int k = 0; k < 64; k++) differs |= (U)(block[k] ^ value);                    \
            if (differs) break;                                                               \
        }                                                                                     \
        while (i < count && at[back ? count - 1 - i : i] == value) i++;                       \
        return i;                                                                             \
    }                                                                                         \
    FAST static void range_##N(const void *from, uint64_t count, bool sign, Range *range) {   \
        const U *at = from;                                                                   \
        U any = 0, magnitude = 0;                                                             \
        for (uint64_t i = 0; i < count && !(N == 8 && any > 1);) { /* bytes shrink to bits only */ \
            uint64_t end = count - i > 4096 ? i + 4096 : count;                               \
            for (; i < end; i++) any |= at[i];                                                \
        }                                                                                     \
        if (sign && any >> (N - 1) & 1)                                                       \
            for (uint64_t i = 0; i < count; i++) magnitude |= (U)(at[i] ^ (U)((I)at[i] >> (N - 1))); \
        else                                                                                  \
            magnitude = any;                                                                  \
        range->any |= any;                                                                    \
        range->magnitude |= magnitude;                                                        \
    }                                                                                         \
    FAST static void pack_##N(const void *from, u8 *to, uint64_t count) {                     \
        const U *at = from;                                                                   \
        for (uint64_t i = 0; i < count / 8; i++) {                                            \
            U bits = 0;                                                                       \
            for (int k = 0; k < 8; k++) bits |= (U)((U)(at[8 * i + k] != 0) << k);            \
            to[i] = (u8)bits;                                                                 \
        }                                                                                     \
        if (count % 8) to[count / 8] = 0;                                                     \
        for (uint64_t i = count / 8 * 8; i < count; i++) to[i / 8] |= (u8)((at[i] != 0) << i % 8); \
    }                                                                                         \
    FAST static void unpack_##N(const u8 *bits, void *into, uint64_t count) {                 \
        U *to = into;                                                                         \
        for (uint64_t i = 0; i < count / 8; i++)                                              \
            for (int k = 0; k < 8; k++) to[8 * i + k] = (U)(bits[i] >> k & 1);                \
        for (uint64_t i = count / 8 * 8; i < count; i++) to[i] = (U)(bits[i / 8] >> i % 8 & 1); \
    }                                                                                         \
    FAST static void repeat_##N(void *into, uint64_t value, uint64_t count) {                 \
        U *to = into;                                                                         \
        for (uint64_t i = 0; i < count; i++) to[i] = (U)value;                                \
    }
LOOPS(u8, i8, 8)
LOOPS(u16, i16, 16)
LOOPS(u32, i32, 32)
LOOPS(u64, i64, 64)

#define BY_SIZE(SIZE, LOOP, ...)                                              \
    ((SIZE) == 1 ? LOOP##_8(__VA_ARGS__) : (SIZE) == 2 ? LOOP##_16(__VA_ARGS__) \
     : (SIZE) == 4 ? LOOP##_32(__VA_ARGS__) : LOOP##_64(__VA_ARGS__))

/* Narrower: nothing is lost, so signs do not matter. Wider: by the sign of what is stored. */
#define CONVERSIONS(X)                                                              \
    X(u64, u8) X(u64, u16) X(u64, u32) X(u32, u8) X(u32, u16) X(u16, u8)            \
    X(u8, u16) X(u8, u32) X(u8, u64) X(u16, u32) X(u16, u64) X(u32, u64)            \
    X(i8, i16) X(i8, i32) X(i8, i64) X(i16, i32) X(i16, i64) X(i32, i64)
#define CONVERSION(FROM, TO)                                                               \
    FAST static void FROM##_to_##TO(const FROM *restrict from, TO *restrict to, uint64_t count) { \
        for (uint64_t i = 0; i < count; i++) to[i] = (TO)from[i];                          \
    }
CONVERSIONS(CONVERSION)

/* Write integers with another size. */
static void resize(const u8 *from, int size, bool sign, u8 *to, int new_size, uint64_t count) {
#define KEY(SIZE, SIGN, NEW_SIZE) ((SIZE) << 8 | (NEW_SIZE) << 1 | (SIGN))
#define CASE(FROM, TO) \
    case KEY(sizeof(FROM), (FROM)-1 < 1, sizeof(TO)): FROM##_to_##TO((const void *)from, (void *)to, count); break;
    switch (KEY(size, sign && new_size > size, new_size)) { CONVERSIONS(CASE) }
}

/* The value of an element as headers have it: integers by value, floats by bits, bools 0 or 1. */
static uint64_t value_of(const u8 *at, int code, uint64_t index) {
    uint64_t size = DTYPES[code].size, unused = 64 - 8 * size, bits = 0;
    memcpy(&bits, at + index * size, size); /* little-endian, as Python has checked */
    if (code == BOOL) return bits != 0;
    return DTYPES[code].kind == SIGNED ? (uint64_t)((int64_t)(bits << unused) >> unused) : bits;
}

static uint64_t run_of(const u8 *at, int code, uint64_t count, bool back) {
    uint64_t run = BY_SIZE(DTYPES[code].size, run, at, count, back);
    if (code == BOOL) /* in memory, bools may be any byte; all but 0 are true */
        while (run < count && !at[back ? count - 1 - run : run] == !at[back ? count - 1 : 0]) run++;
    return run;
}

static int narrowest(int code, const Range *range) {
    bool negative = DTYPES[code].kind == SIGNED && range->any >> (8 * DTYPES[code].size - 1) & 1;
    uint64_t most = negative ? range->magnitude : range->any;
    if (!negative && most <= 1) return BOOL;
    int steps = 0; /* how often one byte doubles */
    while (steps < 3 && most >> ((8 << steps) - negative)) steps++;
    return 1 << steps >= DTYPES[code].size ? code : (negative ? INT8 : UINT8) + steps;
}

static void repeat(u8 *to, int size, uint64_t value, uint64_t count) {
    if (count) BY_SIZE(size, repeat, to, value, count); /* memory without elements may have no address */
}

/* The float that has the value of a half; a nan keeps its bits. */
static uint32_t half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, part = half & 1023, bits;
    float subnormal = (float)part * 5.9604644775390625e-8f; /* part * 2^-24 */
    memcpy(&bits, &subnormal, 4);
    if (exponent) bits = (exponent == 31 ? 255 : exponent + 112) << 23 | part << 13;
    return sign | bits;
}

static void widen_floats(const u16 *from, int wire, u8 *to, int code, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half = from[i];
        uint32_t bits = wire == BFLOAT16 ? (uint32_t)half << 16 : half_to_float(half);
        if (code == FLOAT32) {
            memcpy(to + 4 * i, &bits, 4);
            continue;
        }
        float value;
        memcpy(&value, &bits, 4);
        double wide = value;
        if (wire == FLOAT16 && (half & 0x7c00) == 0x7c00) { /* a cast would change the bits of nan */
            uint64_t whole = (uint64_t)(half & 0x8000) << 48 | (uint64_t)0x7ff << 52 | (uint64_t)(half & 1023) << 42;
            memcpy(&wide, &whole, 8);
        }
        memcpy(to + 8 * i, &wide, 8);
    }
}

/* Write `count` elements of dtype `code` as a body of dtype `wire`. */
static void store(const u8 *from, int code, u8 *to, int wire, uint64_t count) {
    int size = DTYPES[code].size, stored = DTYPES[wire].size;
    if (wire == BOOL) BY_SIZE(size, pack, from, to, count);
    else if (stored == size) memcpy(to, from, count * size);
    else resize(from, size, false, to, stored, count);
}

/* Write `count` elements of dtype `code` from a body of dtype `wire`. */
static void load(const u8 *from, int wire, u8 *to, int code, uint64_t count) {
    int size = DTYPES[code].size, stored = DTYPES[wire].size;
    if (wire == BOOL) BY_SIZE(size, unpack, from, to, count);
    else if (stored == size) memcpy(to, from, count * size);
    else if (DTYPES[code].kind == FLOATING) widen_floats((const u16 *)from, wire, to, code, count);
    else resize(from, stored, DTYPES[wire].kind == SIGNED, to, size, count);
}

/* ---------------------------------------------------------------------------------------------
 * msgpack: as much of it as headers have. Writers are given room for all that they write.
 */

static void put_tagged(u8 **to, int tag, uint64_t value, int bytes) {
    *(*to)++ = (u8)tag;
    while (bytes--) *(*to)++ = (u8)(value >> 8 * bytes);
}

static void put_number(u8 **to, uint64_t bits, bool sign) {
    bool negative = sign && (int64_t)bits < 0;
    uint64_t most = negative ? ~bits : bits;
    int steps = 0;
    while (steps < 3 && most >> ((8 << steps) - negative)) steps++;
    if (most < (negative ? 32 : 128)) put_tagged(to, (int)(bits & 0xff), 0, 0);
    else put_tagged(to, (negative ? 0xd0 : 0xcc) + steps, bits, 1 << steps);
}

static void put_list(u8 **to, uint64_t count) {
    if (count < 16) put_tagged(to, 0x90 | (int)count, 0, 0);
    else put_tagged(to, count <= UINT16_MAX ? 0xdc : 0xdd, count, count <= UINT16_MAX ? 2 : 4);
}

typedef struct { const u8 *at, *end; } In;

typedef struct {
    enum { OTHER, NUMBER, NEGATIVE, NIL, LIST } kind;
    uint64_t bits;  /* of a negative number: (int64_t)bits is its value; of a list: its elements follow */
} Token;

/* Read one number, nil or list header; all else, and what is cut off, is OTHER and not moved past. */
static Token read_token(In *in) {
    Token token = {OTHER, 0};
    if (in->at >= in->end) return token;
    uint8_t tag = *in->at;
    int bytes = 0;
    bool sign = tag >= 0xd0 && tag <= 0xd3;
    if (tag < 0x80 || tag >= 0xe0) token = (Token){NUMBER, (uint64_t)(int64_t)(int8_t)tag};
    else if ((tag & 0xf0) == 0x90) token = (Token){LIST, tag & 15};
    else if (tag == 0xc0) token.kind = NIL;
    else if ((tag >= 0xcc && tag <= 0xcf) || sign) token.kind = NUMBER, bytes = 1 << (tag & 3);
    else if (tag == 0xdc || tag == 0xdd) token.kind = LIST, bytes = 2 << (tag & 1);
    if (token.kind == OTHER || in->end - in->at < 1 + bytes) return (Token){OTHER, 0};
    for (int i = 1; i <= bytes; i++) token.bits = token.bits << 8 | in->at[i];
    if (sign) token.bits = (uint64_t)((int64_t)(token.bits << (64 - 8 * bytes)) >> (64 - 8 * bytes));
    if ((sign || tag >= 0xe0) && (int64_t)token.bits < 0) token.kind = NEGATIVE;
    in->at += 1 + bytes;
    return token;
}

static bool in_range(const Token *token, uint64_t most) { return token->kind == NUMBER && token->bits <= most; }

/* ---------------------------------------------------------------------------------------------
 * The columns of one group that is to be encoded.
 */

typedef struct {
    const u8 *at;     /* elements, NULL where the sample has none of this column */
    const u8 *body;   /* the same; of rounded floats, these */
    PyObject *owner;  /* the tensor, where it is held here */
    uint64_t count, parts[PARTS];
} Cell;

typedef struct { PyObject *key; int code, wire; bool here; Cell *cells; } EncodedColumn;

typedef struct {
    Py_ssize_t samples, count;
    EncodedColumn *columns;
    Shape *shapes;
    uint64_t shape_count, oldest; /* oldest: token version >= 0, UINT64_MAX where there is none */
    uint32_t *slots, mask;        /* places of shapes by hash, counted from 1 */
    bool sound, is_encoded;
} Columns; /* one piece of memory with its columns, cells, shapes and slots */
#define CAPSULE "redrb.codec.Columns"

static Columns *columns_new(Py_ssize_t samples, Py_ssize_t count) {
    if (samples < 1 || samples > MAX_SAMPLES || count > MAX_COLUMNS)
        return PyErr_SetString(PyExc_ValueError, "too many samples or columns"), NULL;
    size_t cells = (size_t)(count * samples), slots = 16;
    while (slots < 2 * cells) slots *= 2;
    Columns *all = PyMem_Calloc(1, sizeof(Columns) + (size_t)count * sizeof(EncodedColumn) +
                                       cells * (sizeof(Cell) + sizeof(Shape)) + slots * sizeof(uint32_t));
    if (!all) return PyErr_NoMemory(), NULL;
    *all = (Columns){.samples = samples, .count = count, .columns = (EncodedColumn *)(all + 1),
                     .mask = (uint32_t)slots - 1, .oldest = UINT64_MAX, .sound = true};
    Cell *first = (Cell *)(all->columns + count);
    all->shapes = (Shape *)(first + cells);
    all->slots = (uint32_t *)(all->shapes + cells);
    for (Py_ssize_t i = 0; i < count * samples; i++) first[i].parts[REF] = MISSING;
    for (Py_ssize_t i = 0; i < count; i++) all->columns[i].cells = first + i * samples;
    return all;
}

static void columns_free(Columns *all) {
    for (Py_ssize_t i = 0; all && i < all->count; i++) {
        Py_XDECREF(all->columns[i].key);
        for (Py_ssize_t k = 0; k < all->samples; k++) Py_XDECREF(all->columns[i].cells[k].owner);
    }
    PyMem_Free(all);
}

static void capsule_free(PyObject *capsule) { columns_free(PyCapsule_GetPointer(capsule, CAPSULE)); }

/* Return the place of a shape among those of the group, in the order of their first use. */
static uint64_t shape_place(Columns *all, const Shape *shape) {
    uint64_t hash = shape->rank;
    for (uint64_t i = 0; i < shape->rank; i++) hash = (hash ^ shape->sizes[i]) * 0x9e3779b97f4a7c15ULL;
    uint32_t slot = (uint32_t)(hash >> 29) & all->mask;
    for (; all->slots[slot]; slot = (slot + 1) & all->mask)
        if (!memcmp(&all->shapes[all->slots[slot] - 1], shape, sizeof(Shape))) return all->slots[slot] - 1;
    all->shapes[all->shape_count] = *shape;
    all->slots[slot] = (uint32_t)++all->shape_count;
    return all->shape_count - 1;
}

static void set_cell(Columns *all, EncodedColumn *column, Py_ssize_t sample, const void *at, const Shape *shape) {
    Cell *cell = &column->cells[sample];
    cell->at = cell->body = at ? at : (const void *)""; /* torch gives 0 for what has no elements */
    cell->count = shape->count;
    cell->parts[REF] = shape_place(all, shape);
    column->here = true;
}

static int shape_from(PyObject *sizes, Shape *shape) {
    *shape = (Shape){.rank = (uint64_t)PyTuple_GET_SIZE(sizes)};
    bool fits = shape->rank <= MAX_RANK;
    for (uint64_t i = 0; fits && i < shape->rank; i++) {
        uint64_t size = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(sizes, i));
        if (size == (uint64_t)-1 && PyErr_Occurred()) return -1;
        fits = size <= MAX_ELEMENTS;
        shape->sizes[i] = (uint32_t)size;
    }
    if (fits && count_elements(shape)) return 0;
    PyErr_SetString(PyExc_ValueError, "a shape is too large");
    return -1;
}

/* Read what Python says of one column: (key, code, wire or -1, [None or (address, shape[, address])]). */
static int column_from(Columns *all, EncodedColumn *column, PyObject *given) {
    PyObject *cells;
    if (!PyArg_ParseTuple(given, "SiiO!", &column->key, &column->code, &column->wire, &PyList_Type, &cells))
        return column->key = NULL, -1;
    Py_INCREF(column->key);
    if (column->code < 0 || column->code >= CODES || column->wire >= CODES ||
        PyList_GET_SIZE(cells) != all->samples)
        return PyErr_SetString(PyExc_ValueError, "a column has an unknown dtype, or too few samples"), -1;
    for (Py_ssize_t i = 0; i < all->samples; i++) {
        PyObject *cell = PyList_GET_ITEM(cells, i), *sizes;
        unsigned long long at, body = 0;
        Shape shape;
        if (cell == Py_None) continue;
        if (!PyArg_Parse(cell, "(KO!)", &at, &PyTuple_Type, &sizes)) {
            PyErr_Clear();
            if (!PyArg_Parse(cell, "(KO!K)", &at, &PyTuple_Type, &sizes, &body)) return -1;
        }
        if (body && column->wire < 0) return PyErr_SetString(PyExc_ValueError, "rounded as what?"), -1;
        if (shape_from(sizes, &shape)) return -1;
        if (!at && shape.count) return PyErr_SetString(PyExc_ValueError, "elements without an address"), -1;
        set_cell(all, column, i, (const void *)(uintptr_t)at, &shape);
        if (body) column->cells[i].body = (const u8 *)(uintptr_t)body;
    }
    return 0;
}

static Columns *columns_from(PyObject *list, Py_ssize_t samples) {
    Columns *all = columns_new(samples, PyList_GET_SIZE(list));
    for (Py_ssize_t i = 0; all && i < all->count; i++)
        if (column_from(all, &all->columns[i], PyList_GET_ITEM(list, i))) return columns_free(all), NULL;
    return all;
}

/* ---------------------------------------------------------------------------------------------
 * Collecting: one pass over samples finds their tensors' memory, and whether they keep the rules.
 * Whatever is unusual is left to Python, which names it or makes it usual.
 */

/* DLPack's exchange of borrowed tensors (dlpack.h, version 1), as far as it is used here. */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t rank;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t offset;
} Borrowed;
typedef struct {
    struct { uint32_t major, minor; } version;
    void *older;
    void (*unused[3])(void);
    int (*borrow)(void *tensor, Borrowed *to);
} Exchange;
#define DLPACK_CPU 1

/* What a rule says of a standard field: the ranks that it may have; to which of two lengths its first
 * dimension belongs; and more. */
enum { INTEGERS = 1, FINITE = 2, VERSIONS = 4 };
typedef struct { uint8_t least_rank, most_rank, of_actions, needs; } Rule;

/* Take a borrowed tensor's memory as one cell of a column. False where it is not plain. */
static bool take_memory(Columns *all, EncodedColumn *column, Py_ssize_t sample, const Borrowed *tensor, Shape *shape) {
    int code = 0;
    while (code < CODES && (DTYPES[code].dlpack != tensor->dtype.code || 8 * DTYPES[code].size != tensor->dtype.bits))
        code++;
    if (code == CODES || tensor->dtype.lanes != 1 || tensor->device.type != DLPACK_CPU || tensor->rank > MAX_RANK ||
        (column->here && column->code != code))
        return false;
    *shape = (Shape){.rank = (uint64_t)tensor->rank};
    for (int i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] > (int64_t)MAX_ELEMENTS) return false;
        shape->sizes[i] = (uint32_t)tensor->shape[i];
    }
    if (!count_elements(shape) || (shape->count && !tensor->data)) return false;
    int64_t step = 1;
    for (int i = tensor->rank - 1; shape->count && i >= 0; step *= tensor->shape[i--])
        if (tensor->shape[i] != 1 && tensor->strides[i] != step) return false;
    column->code = code;
    column->wire = -1;
    set_cell(all, column, sample, (const u8 *)tensor->data + tensor->offset, shape);
    return true;
}

/* Return whether a field keeps its rule; `lengths` are those of the sample, plus 1, 0 if unknown. */
static bool keeps_rule(const Rule *rule, const EncodedColumn *column, const Cell *cell, const Shape *shape, uint64_t *lengths) {
    int kind = DTYPES[column->code].kind;
    if (shape->rank < rule->least_rank || shape->rank > rule->most_rank) return false;
    if (rule->needs & INTEGERS && kind != SIGNED && kind != UNSIGNED) return false;
    if (rule->needs & FINITE && kind == FLOATING) {
        uint64_t exponent = DTYPES[column->code].exponent;
        if (!exponent || (value_of(cell->at, column->code, 0) & exponent) == exponent) return false;
    }
    if (!shape->rank) return true;
    uint64_t *length = &lengths[rule->of_actions ? 1 : 0];
    if (*length && *length != (uint64_t)shape->sizes[0] + 1) return false;
    *length = (uint64_t)shape->sizes[0] + 1;
    return true;
}

/* Note the oldest version of a sample's tokens; values below 0 stand for unknown ones. */
static void note_versions(Columns *all, const EncodedColumn *column, const Cell *cell) {
    for (uint64_t i = 0; i < cell->count; i++) {
        uint64_t version = value_of(cell->at, column->code, i);
        if (version <= INT64_MAX && version < all->oldest) all->oldest = version;
    }
}

/* Fill in one cell. Returns 1, or 0 where the field is not plain, or -1 with an error. */
static int collect_cell(Columns *all, EncodedColumn *column, Py_ssize_t sample, PyObject *tensor,
                        const Exchange *exchange, const Rule *rule, uint64_t *lengths) {
    Borrowed borrowed;
    Shape shape;
    if (exchange->borrow(tensor, &borrowed)) return PyErr_Clear(), 0; /* Python asks again, and says why */
    Cell *cell = &column->cells[sample];
    cell->owner = Py_NewRef(tensor);
    if (!take_memory(all, column, sample, &borrowed, &shape)) return 0;
    if (DTYPES[column->code].kind == FLOATING) { /* imaginary parts of conjugates have their sign elsewhere */
        PyObject *is_neg = PyObject_CallMethodNoArgs(tensor, name_is_neg);
        if (!is_neg) return -1;
        Py_DECREF(is_neg);
        if (is_neg != Py_False) return 0;
    }
    if (rule && all->sound) all->sound = keeps_rule(rule, column, cell, &shape, lengths);
    if (!rule || !(rule->needs & VERSIONS)) return 1;
    note_versions(all, column, cell);
    return DTYPES[column->code].kind == SIGNED || DTYPES[column->code].kind == UNSIGNED;
}

static int collect_column(Columns *all, EncodedColumn *column, PyObject *rows, PyObject *name, PyObject *type,
                          const Exchange *exchange, const Rule *rule, uint64_t *lengths) {
    int found = 1;
    for (Py_ssize_t i = 0; found == 1 && i < all->samples; i++) {
        PyObject *row = PyTuple_GET_ITEM(rows, i), *tensor;
        if (!rule && !PyDict_Check(row)) return 0;
        if (rule) tensor = PyObject_GetAttr(row, name);
        else tensor = Py_XNewRef(PyDict_GetItemWithError(row, name));
        if (!tensor && (rule || PyErr_Occurred())) return -1;
        if (tensor && tensor != Py_None)
            found = Py_IS_TYPE(tensor, (PyTypeObject *)type)
                        ? collect_cell(all, column, i, tensor, exchange, rule, &lengths[2 * i]) : 0;
        Py_XDECREF(tensor);
    }
    return found;
}

/* Note whether a sample's version is None or an int >= 0, and no more actions than tokens. */
static int check_sample(Columns *all, PyObject *sample, const uint64_t *lengths) {
    PyObject *version = PyObject_GetAttr(sample, name_policy_version);
    if (!version) return -1;
    int overflow = 0;
    if (version != Py_None &&
        (!PyLong_CheckExact(version) || PyLong_AsLongLongAndOverflow(version, &overflow) < 0 || overflow))
        all->sound = false;
    Py_DECREF(version);
    if (lengths[0] && lengths[1] > lengths[0]) all->sound = false;
    return 0;
}

/* Collect all columns. Returns 1, or 0 where a field is not plain, or -1 with an error. */
static int collect_all(Columns *all, PyObject *samples, PyObject *tables, PyObject *names, PyObject *keys,
                       const Rule *rules, Py_ssize_t ruled, PyObject *type, const Exchange *exchange) {
    int found = 1;
    uint64_t *lengths = PyMem_Calloc((size_t)all->samples, 2 * sizeof(uint64_t));
    if (!lengths) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; found == 1 && i < all->count; i++) {
        all->columns[i].key = Py_NewRef(PyTuple_GET_ITEM(keys, i));
        found = collect_column(all, &all->columns[i], i < ruled ? samples : tables, PyTuple_GET_ITEM(names, i), type,
                               exchange, i < ruled ? &rules[i] : NULL, lengths);
    }
    for (Py_ssize_t i = 0; found == 1 && i < all->samples; i++)
        if (check_sample(all, PyTuple_GET_ITEM(samples, i), &lengths[2 * i])) found = -1;
    PyMem_Free(lengths);
    return found;
}

/* collect(samples, tables, names, keys, rules, tensor type, exchange) -> (columns, sound, oldest version); None where
 *     a field is not plain. The names beyond the rules are those of further tensors, in the tables. */
static PyObject *collect(PyObject *module, PyObject *args) {
    PyObject *samples, *tables, *names, *keys, *type, *capsule;
    const Rule *rules;
    Py_ssize_t ruled;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!y#OO", &PyTuple_Type, &samples, &PyTuple_Type, &tables, &PyTuple_Type, &names,
                          &PyTuple_Type, &keys, &rules, &ruled, &type, &capsule))
        return NULL;
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_ssize_t size = PyTuple_GET_SIZE(samples), count = PyTuple_GET_SIZE(names);
    if (!exchange) return NULL;
    if (size < 1 || size > MAX_SAMPLES || size != PyTuple_GET_SIZE(tables) || count > MAX_COLUMNS ||
        count != PyTuple_GET_SIZE(keys) || exchange->version.major != 1 || !exchange->borrow)
        Py_RETURN_NONE;
    Columns *all = columns_new(size, count);
    if (!all) return NULL;
    int found = collect_all(all, samples, tables, names, keys, rules, ruled / (Py_ssize_t)sizeof(Rule), type, exchange);
    PyObject *columns = found == 1 ? PyCapsule_New(all, CAPSULE, capsule_free) : NULL;
    if (!columns) {
        columns_free(all);
        return found ? NULL : Py_NewRef(Py_None);
    }
    PyObject *oldest = all->oldest > INT64_MAX ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(all->oldest);
    return Py_BuildValue("NON", columns, all->sound ? Py_True : Py_False, oldest);
}

/* ---------------------------------------------------------------------------------------------
 * Encoding one group.
 */

/* Find runs and the wire dtype of one column. */
static void measure(EncodedColumn *column, Py_ssize_t samples) {
    Range range = {0, 0};
    int code = column->code, size = DTYPES[code].size, kind = DTYPES[code].kind;
    for (Py_ssize_t i = 0; i < samples; i++) {
        Cell *cell = &column->cells[i];
        uint64_t count = cell->at ? cell->count : 0, lead = 0, trail = 0;
        if (count >= MIN_RUN) lead = run_of(cell->at, code, count, false);
        if (lead < MIN_RUN) lead = 0;
        if (count >= MIN_RUN && lead < count) trail = run_of(cell->at, code, count, true);
        if (trail < MIN_RUN) trail = 0;
        cell->parts[LEAD] = lead;
        cell->parts[TRAIL] = trail;
        if (lead) cell->parts[LEAD_VALUE] = value_of(cell->at, code, 0);
        if (trail) cell->parts[TRAIL_VALUE] = value_of(cell->at, code, count - 1);
        cell->count = count - lead - trail;
        if (cell->count && (kind == SIGNED || kind == UNSIGNED))
            BY_SIZE(size, range, cell->at + lead * size, cell->count, kind == SIGNED, &range);
    }
    if (column->wire < 0) column->wire = kind == SIGNED || kind == UNSIGNED ? narrowest(code, &range) : code;
}

static bool is_one_for_all(const EncodedColumn *column, Py_ssize_t samples, int part) {
    for (Py_ssize_t i = 1; i < samples; i++)
        if (column->cells[i].parts[part] != column->cells[0].parts[part]) return false;
    return true;
}

/* Write a column's entry: of each part one value if all samples have the same, else all. */
static void put_entry(u8 **to, const EncodedColumn *column, Py_ssize_t samples) {
    int parts = 1;
    for (Py_ssize_t i = 0; i < samples && parts < PARTS; i++)
        parts = column->cells[i].parts[TRAIL] ? PARTS : column->cells[i].parts[LEAD] ? TRAIL : parts;
    if (parts > 1 || !is_one_for_all(column, samples, REF)) put_list(to, (uint64_t)parts);
    for (int part = 0; part < parts; part++) {
        bool sign = DTYPES[column->code].kind == SIGNED && (part == LEAD_VALUE || part == TRAIL_VALUE);
        bool one = is_one_for_all(column, samples, part);
        if (!one) put_list(to, (uint64_t)samples);
        for (Py_ssize_t i = 0; i < (one ? 1 : samples); i++) {
            uint64_t value = column->cells[i].parts[part];
            if (part == REF && value == MISSING) put_tagged(to, 0xc0, 0, 0);
            else put_number(to, value, sign);
        }
    }
}

static void put_schema(u8 **to, const Columns *all, uint64_t here) {
    put_list(to, here);
    for (Py_ssize_t i = 0; i < all->count; i++) {
        const EncodedColumn *column = &all->columns[i];
        if (!column->here) continue;
        put_list(to, 3);
        memcpy(*to, PyBytes_AS_STRING(column->key), (size_t)PyBytes_GET_SIZE(column->key));
        *to += PyBytes_GET_SIZE(column->key);
        put_number(to, (uint64_t)column->code, false);
        put_number(to, (uint64_t)column->wire, false);
    }
}

static void put_header(u8 **to, const Columns *all, uint64_t here, const Py_buffer *tail, Py_ssize_t tails) {
    put_list(to, 3 + (uint64_t)tails);
    put_number(to, (uint64_t)all->samples, false);
    put_list(to, here);
    for (Py_ssize_t i = 0; i < all->count; i++)
        if (all->columns[i].here) put_entry(to, &all->columns[i], all->samples);
    put_list(to, all->shape_count);
    for (uint64_t i = 0; i < all->shape_count; i++) {
        put_list(to, all->shapes[i].rank);
        for (uint64_t k = 0; k < all->shapes[i].rank; k++) put_number(to, all->shapes[i].sizes[k], false);
    }
    memcpy(*to, tail->buf, (size_t)tail->len);
    *to += tail->len;
}

static void write_bodies(const Columns *all, u8 *to) {
    for (Py_ssize_t i = 0; i < all->count; i++) {
        const EncodedColumn *column = &all->columns[i];
        for (Py_ssize_t k = 0; column->here && k < all->samples; k++) {
            const Cell *cell = &column->cells[k];
            int code = cell->body == cell->at ? column->code : column->wire;
            if (!cell->count) continue;
            store(cell->body + cell->parts[LEAD] * DTYPES[code].size, code, to, column->wire, cell->count);
            to += body_bytes(column->wire, cell->count);
        }
    }
}

/* Put the sections together; `head` is schema and header. */
static PyObject *join(const Columns *all, const u8 *head, size_t schema, size_t header, uint64_t decoded,
                      const Py_buffer *extras) {
    uint64_t bodies = 0, size = PREFIX_BYTES + schema + header + (uint64_t)extras->len;
    for (Py_ssize_t i = 0; i < all->count; i++)
        for (Py_ssize_t k = 0; k < all->samples; k++)
            bodies += body_bytes(all->columns[i].wire, all->columns[i].cells[k].count);
    if (size + bodies > MAX_BLOB_BYTES)
        return PyErr_Format(EncodeError, "a group has %llu bytes, the limit is %llu: put smaller groups.",
                            (unsigned long long)(size + bodies), (unsigned long long)MAX_BLOB_BYTES);
    if (decoded > DECODED_LIMIT(size + bodies))
        return PyErr_Format(EncodeError, "a group of %llu bytes is little but runs of one value, %llu bytes "
                            "packed: cut its padding off before putting it.",
                            (unsigned long long)decoded, (unsigned long long)(size + bodies));
    PyObject *blob = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(size + bodies));
    if (!blob) return NULL;
    u8 *at = (u8 *)PyBytes_AS_STRING(blob);
    uint16_t schema_bytes = (uint16_t)schema;
    uint32_t lengths[2] = {(uint32_t)header, (uint32_t)extras->len};
    memcpy(at, "RDRB\1\0", 6);
    memcpy(at + 6, &schema_bytes, 2);
    memcpy(at + 8, lengths, 8);
    memcpy(at + PREFIX_BYTES, head, schema + header);
    memcpy(at + PREFIX_BYTES + schema + header, extras->buf, (size_t)extras->len);
    WITHOUT_LOCK_IF(bodies >= RELEASE_BYTES, write_bodies(all, at + size));
    return blob;
}

static PyObject *encode_columns(Columns *all, Py_ssize_t tails, const Py_buffer *tail, const Py_buffer *extras) {
    uint64_t decoded = 0, here = 0;
    size_t room = 64 + (size_t)tail->len;
    if (all->is_encoded) return PyErr_SetString(PyExc_ValueError, "columns are encoded once"), NULL;
    all->is_encoded = true; /* from here on, no other thread changes them */
    for (Py_ssize_t i = 0; i < all->count; i++) {
        const EncodedColumn *column = &all->columns[i];
        if (!PyBytes_Check(column->key)) return PyErr_SetString(PyExc_TypeError, "a key is packed"), NULL;
        room += (size_t)(PyBytes_GET_SIZE(column->key) + 32 + 9 * PARTS * all->samples);
        here += column->here;
        for (Py_ssize_t k = 0; column->here && k < all->samples; k++)
            decoded += column->cells[k].count * DTYPES[column->code].size;
    }
    WITHOUT_LOCK_IF(decoded >= RELEASE_BYTES, for (Py_ssize_t i = 0; i < all->count; i++) {
        if (all->columns[i].here) measure(&all->columns[i], all->samples);
    });
    u8 *head = PyMem_Malloc(room + all->shape_count * (1 + 5 * MAX_RANK)), *end = head;
    if (!head) return PyErr_NoMemory();
    put_schema(&end, all, here);
    size_t schema = (size_t)(end - head);
    put_header(&end, all, here, tail, tails);
    size_t header = (size_t)(end - head) - schema;
    PyObject *blob = NULL;
    if (schema > MAX_SCHEMA_BYTES)
        PyErr_SetString(EncodeError, "the names in `tensors` are too long: shorten them.");
    else if (header > MAX_HEADER_BYTES)
        PyErr_Format(EncodeError, "a group's header has %zu bytes, the limit is %d: use fewer tags or put "
                     "smaller groups.", header, MAX_HEADER_BYTES);
    else
        blob = join(all, head, schema, header, decoded, extras);
    PyMem_Free(head);
    return blob;
}

static PyObject *encode(PyObject *module, PyObject *args) {
    Py_ssize_t samples, tails;
    PyObject *given, *blob = NULL;
    Py_buffer tail, extras;
    (void)module;
    if (!PyArg_ParseTuple(args, "nOny*y*", &samples, &given, &tails, &tail, &extras)) return NULL;
    bool is_list = PyList_Check(given);
    Columns *all = is_list ? columns_from(given, samples) : PyCapsule_GetPointer(given, CAPSULE);
    if (all && (tails < 0 || tails > 4 || all->samples != samples))
        PyErr_SetString(PyExc_ValueError, "a group has at most 4 further elements, and all its samples");
    else if (all)
        blob = encode_columns(all, tails, &tail, &extras);
    if (is_list) columns_free(all);
    PyBuffer_Release(&tail);
    PyBuffer_Release(&extras);
    return blob;
}

/* ---------------------------------------------------------------------------------------------
 * Reading one group: all of its header is checked here, before anything is decoded.
 */

typedef struct { uint64_t parts[PARTS], count, start; } Piece; /* count: elements of the body */

typedef struct {
    int code, wire;
    uint64_t step;  /* bytes from one sample's body to the next, where all samples are alike */
    Piece *pieces;  /* one for each sample, or NULL where `one` is that of all */
    Piece one;
} Column;

typedef struct {
    PyObject_HEAD
    Py_buffer blob;
    PyObject *fields, *version, *tail, *extras;
    Py_ssize_t samples, tails, body_at, decoded, column_count;
    uint64_t shape_count;
    Shape *shapes;
    Column *columns;
} Group;

static int malformed(const char *why) {
    PyErr_Format(DecodeError, "not a valid group: %s", why);
    return -1;
}

static Piece piece_of(const Column *column, Py_ssize_t row) {
    if (column->pieces) return column->pieces[row];
    Piece piece = column->one;
    piece.start += (uint64_t)row * column->step;
    return piece;
}

static bool is_value(int code, const Token *token) {
    int sign = DTYPES[code].kind == SIGNED, bits = code == BOOL ? 1 : 8 * DTYPES[code].size - sign;
    if (token->kind == NEGATIVE && sign) return ~token->bits <= UINT64_MAX >> (64 - bits);
    return in_range(token, UINT64_MAX >> (64 - bits));
}

static int set_part(Piece *piece, int part, int code, const Token *token) {
    static const char *const WHY[PARTS] = {
        "a column refers to no shape", "a column has a run of no length", "a run has a value that its dtype lacks",
        "a column has a run of no length", "a run has a value that its dtype lacks"};
    bool fits = part == REF ? token->kind == NIL || in_range(token, MISSING - 1)
              : part == LEAD || part == TRAIL ? in_range(token, MAX_ELEMENTS) : is_value(code, token);
    piece->parts[part] = token->kind == NIL ? MISSING : token->bits;
    return fits ? 0 : malformed(WHY[part]);
}

static int read_part(In *in, Column *column, Py_ssize_t samples, int part) {
    Token token = read_token(in);
    bool is_list = token.kind == LIST;
    if (is_list && (samples == 1 || token.bits != (uint64_t)samples || in->end - in->at < samples))
        return malformed("a list in a column's entry has not one element a sample");
    if (!is_list && set_part(&column->one, part, column->code, &token)) return -1;
    if (is_list && !column->pieces) {
        column->pieces = PyMem_Malloc((size_t)samples * sizeof(Piece));
        if (!column->pieces) return PyErr_NoMemory(), -1;
        for (Py_ssize_t i = 0; i < samples; i++) column->pieces[i] = column->one;
    }
    for (Py_ssize_t i = 0; column->pieces && i < samples; i++) {
        if (is_list) token = read_token(in);
        if (set_part(&column->pieces[i], part, column->code, &token)) return -1;
    }
    return 0;
}

static int read_entry(In *in, Column *column, Py_ssize_t samples) {
    In ahead = *in;
    Token token = read_token(&ahead);
    bool is_list = token.kind == LIST && token.bits >= 1 && token.bits <= PARTS;
    if (!is_list && token.kind != NUMBER && token.kind != NEGATIVE)
        return malformed("a column is placed by neither a shape nor a short list");
    in->at = ahead.at;
    if (!is_list) return set_part(&column->one, REF, column->code, &token);
    for (int part = 0; part < (int)token.bits; part++)
        if (read_part(in, column, samples, part)) return -1;
    return 0;
}

static int read_shapes(In *in, Group *group) {
    Token list = read_token(in);
    uint64_t room = 0;
    if (list.kind != LIST) return malformed("its shapes are no list");
    for (uint64_t i = 0; i < list.bits; i++) {
        if (i == room) { /* memory grows with what was read, not with what the header claims */
            room = room ? 2 * room : 4;
            Shape *shapes = PyMem_Realloc(group->shapes, room * sizeof(Shape));
            if (!shapes) return PyErr_NoMemory(), -1;
            group->shapes = shapes;
        }
        Shape *shape = &group->shapes[i];
        Token token = read_token(in);
        if (token.kind != LIST || token.bits > MAX_RANK) return malformed("a shape is no short list");
        *shape = (Shape){.rank = token.bits};
        for (uint64_t k = 0; k < shape->rank; k++) {
            token = read_token(in);
            if (!in_range(&token, MAX_ELEMENTS)) return malformed("a dimension is out of range");
            shape->sizes[k] = (uint32_t)token.bits;
        }
        if (!count_elements(shape)) return malformed("a shape is too large");
        group->shape_count = i + 1;
    }
    return 0;
}

/* Place one sample's body at `*end`. Adds the bytes of its decoded elements, `times` over. */
static int place(Group *group, const Column *column, Piece *piece, uint64_t *end, Py_ssize_t times) {
    piece->start = *end;
    if (piece->parts[REF] == MISSING) return 0;
    if (piece->parts[REF] >= group->shape_count) return malformed("a column refers to a shape that is not there");
    uint64_t count = group->shapes[piece->parts[REF]].count;
    group->decoded += (Py_ssize_t)count * DTYPES[column->code].size * times; /* 2^31 x 8 x 4096 x 128 fits */
    if (piece->parts[LEAD] > count || piece->parts[TRAIL] > count - piece->parts[LEAD])
        return malformed("a column has runs longer than its shape");
    piece->count = count - piece->parts[LEAD] - piece->parts[TRAIL];
    *end += body_bytes(column->wire, piece->count);
    return 0;
}

static int place_all(Group *group) {
    uint64_t end = (uint64_t)group->body_at;
    for (Py_ssize_t i = 0; i < group->column_count; i++) {
        Column *column = &group->columns[i];
        if (!column->pieces) {
            uint64_t start = end;
            if (place(group, column, &column->one, &end, group->samples)) return -1;
            column->step = end - start;
            end = start + column->step * (uint64_t)group->samples;
        }
        for (Py_ssize_t k = 0; column->pieces && k < group->samples; k++)
            if (place(group, column, &column->pieces[k], &end, 1)) return -1;
    }
    if (end != (uint64_t)group->blob.len) return malformed("its columns do not end where it ends");
    if ((uint64_t)group->decoded > DECODED_LIMIT(group->blob.len))
        return malformed("it says that it decodes to much more than its bytes");
    return 0;
}

/* Keep the header's elements from the fourth on; the most common, one policy version, is read here. */
static int read_tail(In *in, Group *group) {
    if (group->tails == 0 && in->at != in->end) return malformed("something follows its header");
    In ahead = *in;
    Token token = read_token(&ahead);
    bool is_version = token.kind == NEGATIVE || in_range(&token, INT64_MAX);
    if (group->tails == 1 && is_version && ahead.at == ahead.end)
        group->version = PyLong_FromLongLong((int64_t)token.bits);
    else
        group->tail = PyBytes_FromStringAndSize((const char *)in->at, in->end - in->at);
    return group->version || group->tail ? 0 : -1;
}

static int read_header(In *in, Group *group, const u8 *codes) {
    Token list = read_token(in), samples = read_token(in), columns = read_token(in);
    if (list.kind != LIST || list.bits < 3) return malformed("its header is no list of at least three");
    if (!in_range(&samples, MAX_SAMPLES) || !samples.bits) return malformed("it has an odd number of samples");
    if (columns.kind != LIST || columns.bits != (uint64_t)group->column_count)
        return malformed("its header and its schema have different columns");
    if (list.bits - 3 > (uint64_t)MAX_HEADER_BYTES) return malformed("its header is too long");
    group->samples = (Py_ssize_t)samples.bits;
    group->tails = (Py_ssize_t)list.bits - 3;
    for (Py_ssize_t i = 0; i < group->column_count; i++) {
        group->columns[i].code = codes[2 * i];
        group->columns[i].wire = codes[2 * i + 1];
        if (read_entry(in, &group->columns[i], group->samples)) return -1;
    }
    return read_shapes(in, group) || read_tail(in, group) || place_all(group) ? -1 : 0;
}

/* Find the sections of a blob, and read its header by the columns that `lookup` finds in its schema. */
static int read_group(Group *group, PyObject *lookup) {
    const char *at = group->blob.buf;
    uint16_t schema;
    uint32_t lengths[2]; /* of header and extras */
    if (group->blob.len < PREFIX_BYTES || (uint64_t)group->blob.len > MAX_BLOB_BYTES)
        return PyErr_Format(DecodeError, "not a valid group: it has %zd bytes", group->blob.len), -1;
    if (memcmp(at, "RDRB", 4)) return malformed("it does not start with RDRB");
    if (at[4] != 1 || at[5])
        return PyErr_Format(DecodeError, "not a valid group: it is written in version %d with flags %d, and only "
                            "version 1 without flags is known here: upgrade redrb", (u8)at[4], (u8)at[5]), -1;
    memcpy(&schema, at + 6, 2);
    memcpy(lengths, at + 8, 8);
    uint64_t body = (uint64_t)PREFIX_BYTES + schema + lengths[0] + lengths[1];
    if (lengths[0] > MAX_HEADER_BYTES || lengths[1] > MAX_EXTRAS_BYTES || body > (uint64_t)group->blob.len)
        return malformed("its header or extras are longer than allowed");
    group->body_at = (Py_ssize_t)body;
    group->extras = PyBytes_FromStringAndSize(at + body - lengths[1], lengths[1]);
    if (!group->extras) return -1;
    PyObject *found = PyObject_CallFunction(lookup, "y#", at + PREFIX_BYTES, (Py_ssize_t)schema), *codes;
    if (!found || !PyArg_ParseTuple(found, "O!S", &PyTuple_Type, &group->fields, &codes)) {
        group->fields = NULL;
        Py_XDECREF(found);
        return -1;
    }
    Py_INCREF(group->fields);
    In in = {(const u8 *)at + PREFIX_BYTES + schema, (const u8 *)at + PREFIX_BYTES + schema + lengths[0]};
    group->column_count = PyTuple_GET_SIZE(group->fields);
    group->columns = PyMem_Calloc((size_t)group->column_count + 1, sizeof(Column));
    int failed = -1;
    if (!group->columns) PyErr_NoMemory();
    else if (PyBytes_GET_SIZE(codes) != 2 * group->column_count)
        PyErr_SetString(PyExc_ValueError, "two codes a column are needed");
    else failed = read_header(&in, group, (const u8 *)PyBytes_AS_STRING(codes));
    Py_DECREF(found);
    return failed;
}

static void group_dealloc(PyObject *self) {
    Group *group = (Group *)self;
    for (Py_ssize_t i = 0; group->columns && i < group->column_count; i++) PyMem_Free(group->columns[i].pieces);
    PyMem_Free(group->columns);
    PyMem_Free(group->shapes);
    Py_XDECREF(group->fields);
    Py_XDECREF(group->version);
    Py_XDECREF(group->tail);
    Py_XDECREF(group->extras);
    if (group->blob.obj) PyBuffer_Release(&group->blob);
    PyObject_Free(self);
}

/* ---------------------------------------------------------------------------------------------
 * Decoding.
 */

static void write_piece(const Group *group, const Column *column, const Piece *piece, u8 *to) {
    int size = DTYPES[column->code].size;
    repeat(to, size, piece->parts[LEAD_VALUE], piece->parts[LEAD]);
    to += piece->parts[LEAD] * size;
    if (piece->count) load((const u8 *)group->blob.buf + piece->start, column->wire, to, column->code, piece->count);
    to += piece->count * size;
    repeat(to, size, piece->parts[TRAIL_VALUE], piece->parts[TRAIL]);
}

static PyObject *shape_tuple(const Shape *shape) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)shape->rank);
    for (uint64_t i = 0; tuple && i < shape->rank; i++) {
        PyObject *size = PyLong_FromUnsignedLong(shape->sizes[i]);
        if (!size) return Py_DECREF(tuple), NULL;
        PyTuple_SET_ITEM(tuple, (Py_ssize_t)i, size);
    }
    return tuple;
}

static Column *column_at(Group *group, Py_ssize_t index) {
    if (index >= 0 && index < group->column_count) return &group->columns[index];
    PyErr_SetString(PyExc_IndexError, "there is no such column");
    return NULL;
}

/* pieces(column) -> (shape, stored elements, lead, its value, trail, its value) of each sample, or None */
static PyObject *group_pieces(PyObject *self, PyObject *place) {
    Group *group = (Group *)self;
    Py_ssize_t index = PyLong_AsSsize_t(place);
    if (index == -1 && PyErr_Occurred()) return NULL;
    Column *column = column_at(group, index);
    PyObject *list = column ? PyList_New(group->samples) : NULL;
    for (Py_ssize_t i = 0; list && i < group->samples; i++) {
        Piece piece = piece_of(column, i);
        uint64_t *parts = piece.parts;
        PyObject *found = parts[REF] == MISSING ? Py_NewRef(Py_None)
            : Py_BuildValue(DTYPES[column->code].kind == SIGNED ? "NKKLKL" : "NKKKKK",
                            shape_tuple(&group->shapes[parts[REF]]), piece.count, parts[LEAD], parts[LEAD_VALUE],
                            parts[TRAIL], parts[TRAIL_VALUE]);
        if (!found) return Py_DECREF(list), NULL;
        PyList_SET_ITEM(list, i, found);
    }
    return list;
}

/* read(column, sample, address, nbytes): decode one sample into memory that the caller gives */
static PyObject *group_read(PyObject *self, PyObject *args) {
    Group *group = (Group *)self;
    Py_ssize_t index, row;
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(args, "nnKK", &index, &row, &address, &nbytes)) return NULL;
    Column *column = column_at(group, index);
    if (!column) return NULL;
    if (row < 0 || row >= group->samples) return PyErr_SetString(PyExc_IndexError, "there is no such sample"), NULL;
    Piece piece = piece_of(column, row);
    uint64_t ref = piece.parts[REF];
    if (ref == MISSING || group->shapes[ref].count * DTYPES[column->code].size != nbytes)
        return PyErr_SetString(PyExc_ValueError, "the memory has another size than the sample"), NULL;
    write_piece(group, column, &piece, (u8 *)(uintptr_t)address);
    Py_RETURN_NONE;
}

static PyMemberDef group_members[] = {
    {"samples", T_PYSSIZET, offsetof(Group, samples), READONLY, "samples in the group"},
    {"decoded_bytes", T_PYSSIZET, offsetof(Group, decoded), READONLY, "bytes of all its tensors"},
    {"fields", T_OBJECT, offsetof(Group, fields), READONLY, "its columns, as `lookup` gave them"},
    {"version", T_OBJECT, offsetof(Group, version), READONLY, "policy version of all, where nothing else follows"},
    {"tail", T_OBJECT, offsetof(Group, tail), READONLY, "msgpack of the header's further elements otherwise"},
    {"tails", T_PYSSIZET, offsetof(Group, tails), READONLY, "how many elements these are"},
    {"extras", T_OBJECT, offsetof(Group, extras), READONLY, "msgpack of the extras"},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef group_methods[] = {
    {"pieces", group_pieces, METH_O, "pieces(column): shape, stored elements and runs of each sample"},
    {"read", group_read, METH_VARARGS, "read(column, sample, address, nbytes): decode one sample"},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject GroupType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "redrb.codec._core.Group",
    .tp_basicsize = sizeof(Group),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = group_dealloc,
    .tp_members = group_members,
    .tp_methods = group_methods,
    .tp_doc = "One blob, checked in full, and where everything in it lies.",
};

/* parse(blob, lookup) -> Group; lookup(schema) -> (fields, two bytes of dtype and wire a column). */
static PyObject *parse(PyObject *module, PyObject *args) {
    PyObject *blob, *lookup;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &blob, &lookup)) return NULL;
    Group *group = PyObject_New(Group, &GroupType);
    if (!group) return NULL;
    memset((char *)group + offsetof(Group, blob), 0, sizeof(Group) - offsetof(Group, blob));
    if (PyObject_GetBuffer(blob, &group->blob, PyBUF_SIMPLE) || read_group(group, lookup)) Py_CLEAR(group);
    return (PyObject *)group;
}

/* One column of several groups: its place in each, or NOWHERE. */
typedef struct { PyObject *groups; const u8 *places; Py_ssize_t count; uint64_t rows; } Stack;
#define NOWHERE 255

static int stack_from(PyObject *groups, PyObject *places, Stack *stack) {
    *stack = (Stack){groups, (const u8 *)PyBytes_AS_STRING(places), PyTuple_GET_SIZE(groups), 0};
    if (PyBytes_GET_SIZE(places) != stack->count)
        return PyErr_SetString(PyExc_ValueError, "one column a group is needed"), -1;
    for (Py_ssize_t i = 0; i < stack->count; i++) {
        Group *group = (Group *)PyTuple_GET_ITEM(groups, i);
        if (!Py_IS_TYPE(group, &GroupType)) return PyErr_SetString(PyExc_TypeError, "a group is needed"), -1;
        if (stack->places[i] != NOWHERE && !column_at(group, stack->places[i])) return -1;
        stack->rows += (uint64_t)group->samples;
    }
    return 0;
}

/* Return the column in one of the groups, NULL where this lacks it. */
static const Column *column_in(const Stack *stack, Py_ssize_t i, const Group **group) {
    *group = (const Group *)PyTuple_GET_ITEM(stack->groups, i);
    return stack->places[i] == NOWHERE ? NULL : &(*group)->columns[stack->places[i]];
}

/* extent(groups, places) -> (first shape, longest first dimension, whether all shapes are alike); None where a
 *     row has none, or differs in more than the first dimension */
static PyObject *extent(PyObject *module, PyObject *args) {
    PyObject *groups, *places;
    Stack stack;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!S", &PyTuple_Type, &groups, &places) || stack_from(groups, places, &stack))
        return NULL;
    const Shape *first = NULL;
    const Group *group;
    uint32_t longest = 0;
    bool alike = true;
    for (Py_ssize_t i = 0; i < stack.count; i++) {
        const Column *column = column_in(&stack, i, &group);
        if (!column) Py_RETURN_NONE;
        for (Py_ssize_t k = 0; k < (column->pieces ? group->samples : 1); k++) {
            uint64_t ref = piece_of(column, k).parts[REF];
            const Shape *shape = ref == MISSING ? NULL : &group->shapes[ref];
            if (!shape) Py_RETURN_NONE;
            if (!first) first = shape;
            if (shape->rank != first->rank || memcmp(shape->sizes + 1, first->sizes + 1, sizeof(shape->sizes) - 4))
                Py_RETURN_NONE;
            if (shape->sizes[0] > longest) longest = shape->sizes[0];
            alike = alike && shape->sizes[0] == first->sizes[0];
        }
    }
    if (!first) Py_RETURN_NONE;
    return Py_BuildValue("NkO", shape_tuple(first), (unsigned long)longest, alike ? Py_True : Py_False);
}

/* Padded rows: where they go, and what they are padded with, and on which side. */
typedef struct { u8 *to; int code, left; uint64_t row_elements, filler; } Rows;

static void fill_rows(const Stack *stack, const Rows *rows) {
    uint64_t size = DTYPES[rows->code].size;
    const Group *group;
    u8 *to = rows->to;
    for (Py_ssize_t i = 0; i < stack->count; i++) {
        const Column *column = column_in(stack, i, &group);
        for (Py_ssize_t k = 0; k < group->samples; k++, to += rows->row_elements * size) {
            Piece piece = {.parts = {MISSING}};
            if (column) piece = piece_of(column, k);
            uint64_t held = piece.parts[REF] == MISSING ? 0 : group->shapes[piece.parts[REF]].count;
            uint64_t padding = rows->row_elements - held;
            repeat(rows->left ? to : to + held * size, (int)size, rows->filler, padding);
            if (held) write_piece(group, column, &piece, rows->left ? to + padding * size : to);
        }
    }
}

/* Refuse what would be written beyond a row, or as another dtype. */
static int check_rows(const Stack *stack, const Rows *rows, uint64_t nbytes) {
    const Group *group;
    bool fits = rows->code >= 0 && rows->code < CODES && rows->row_elements <= MAX_ELEMENTS &&
                stack->rows * rows->row_elements * DTYPES[rows->code].size == nbytes;
    for (Py_ssize_t i = 0; fits && i < stack->count; i++) {
        const Column *column = column_in(stack, i, &group);
        fits = !column || column->code == rows->code;
        for (Py_ssize_t k = 0; fits && column && k < (column->pieces ? group->samples : 1); k++) {
            uint64_t ref = piece_of(column, k).parts[REF];
            fits = ref == MISSING || group->shapes[ref].count <= rows->row_elements;
        }
    }
    if (!fits) PyErr_SetString(PyExc_ValueError, "a sample does not fit into its row");
    return fits ? 0 : -1;
}

/* fill(groups, places, address, nbytes, code, row elements, left, filler): decode a column, a row a sample,
 *     padded on one side; a row without it is padding alone */
static PyObject *fill(PyObject *module, PyObject *args) {
    PyObject *groups, *places;
    unsigned long long address, nbytes, row_elements, filler;
    Rows rows = {0};
    Stack stack;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!SKKiKpK", &PyTuple_Type, &groups, &places, &address, &nbytes, &rows.code,
                          &row_elements, &rows.left, &filler) || stack_from(groups, places, &stack))
        return NULL;
    rows.to = (u8 *)(uintptr_t)address;
    rows.row_elements = row_elements;
    rows.filler = filler;
    if (check_rows(&stack, &rows, nbytes)) return NULL;
    WITHOUT_LOCK_IF(nbytes >= RELEASE_BYTES, fill_rows(&stack, &rows));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"collect", collect, METH_VARARGS, "collect(samples, names, keys, rules, ...): find plain tensors' memory"},
    {"encode", encode, METH_VARARGS, "encode(samples, columns, tails, tail, extras) -> blob"},
    {"parse", parse, METH_VARARGS, "parse(blob, lookup) -> Group"},
    {"extent", extent, METH_VARARGS, "extent(groups, places): which shapes a column has"},
    {"fill", fill, METH_VARARGS, "fill(groups, places, address, ...): decode a column into padded rows"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "redrb.codec._core", "The inner loops of the codec.", -1, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *errors = PyImport_ImportModule("redrb.errors");
    if (!errors) return NULL;
    EncodeError = PyObject_GetAttrString(errors, "EncodeError");
    DecodeError = PyObject_GetAttrString(errors, "DecodeError");
    Py_DECREF(errors);
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_policy_version = PyUnicode_InternFromString("policy_version");
    if (!EncodeError || !DecodeError || !name_is_neg || !name_policy_version) return NULL;
    if (PyType_Ready(&GroupType) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE)) Py_CLEAR(module);
    return module;
}
