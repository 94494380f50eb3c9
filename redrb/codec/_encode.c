/* Writing: the memory of samples' tensors, collected in one pass, becomes the blob of a group.
 *
 * Other threads may write to the tensors meanwhile. Lengths that were found in a first pass are kept in
 * the second one, whatever the elements are by then.
 */
#include "_core.h"

#define MIN_RUN 16

static PyObject *EncodeError, *name_dtype, *name_is_neg, *name_policy_version;

int prepare_encoding(PyObject *errors) {
    EncodeError = PyObject_GetAttrString(errors, "EncodeError");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_policy_version = PyUnicode_InternFromString("policy_version");
    return EncodeError && name_dtype && name_is_neg && name_policy_version ? 0 : -1;
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
    /* The least and the most of integers, of those from 0 to INT64_MAX. */                   \
    FAST static void bounds_##N(const void *from, uint64_t count, bool sign, uint64_t *least, int64_t *most) { \
        const U *at = from;                                                                   \
        U low = (U)-1, high = 0;                                                              \
        I top = -1;                                                                           \
        for (uint64_t i = 0; i < count; i++) {                                                \
            const U value = at[i];                                                            \
            low = value < low ? value : low;                                                  \
            high = value > high ? value : high;                                               \
            top = (I)value > top ? (I)value : top;                                            \
        }                                                                                     \
        bool half = sign || N == 64; /* the upper half of the values does not count */        \
        int64_t found = half ? (int64_t)top : (int64_t)high;                                  \
        if (!count || found < 0) return;                                                      \
        if (low < *least) *least = low;                                                       \
        if (found > *most) *most = found;                                                     \
    }                                                                                         \
    /* Copy elements; returns whether none has all bits of `exponent`. */                     \
    FAST static bool copy_##N(const U *restrict from, U *restrict to, uint64_t count, uint64_t exponent) { \
        const U bits = (U)exponent;                                                           \
        U bad = 0;                                                                            \
        for (uint64_t i = 0; i < count; i++) {                                                \
            const U value = from[i];                                                          \
            to[i] = value;                                                                    \
            bad |= (U)((value & bits) == bits);                                               \
        }                                                                                     \
        return !bad;                                                                          \
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
    }
LOOPS(u8, i8, 8)
LOOPS(u16, i16, 16)
LOOPS(u32, i32, 32)
LOOPS(u64, i64, 64)

#define NARROWINGS(X) X(u64, u8) X(u64, u16) X(u64, u32) X(u32, u8) X(u32, u16) X(u16, u8)
NARROWINGS(CONVERSION)

/* Write integers as smaller ones that hold them; so signs do not matter. */
static void narrow(const u8 *from, int size, u8 *to, int stored, uint64_t count) {
    switch (CONVERSION_KEY(size, stored, false)) { NARROWINGS(CONVERSION_CASE) }
}

/* The value of an element as headers have it: integers by value, floats by bits, bools 0 or 1. */
static uint64_t value_of(const u8 *at, int code, uint64_t index) {
    uint64_t size = DTYPES[code].size, unused = 64 - 8 * size, bits = 0;
    memcpy(&bits, at + index * size, size); /* little-endian, as Python has checked */
    if (code == BOOL) return bits != 0;
    return DTYPES[code].kind == SIGNED ? (uint64_t)((int64_t)(bits << unused) >> unused) : bits;
}

/* Return the length of the run at the start, or at the end; 0 where it is too short to be worth its entry. */
static uint64_t long_run(const u8 *at, int code, uint64_t count, bool back) {
    if (count < MIN_RUN) return 0;
    uint64_t run = BY_SIZE(DTYPES[code].size, run, at, count, back);
    if (code == BOOL) /* in memory, bools may be any byte; all but 0 are true */
        while (run < count && !at[back ? count - 1 - run : run] == !at[back ? count - 1 : 0]) run++;
    return run < MIN_RUN ? 0 : run;
}

/* How often one byte must double to hold `most`, or -1 - `most` where it is negative. */
static int doublings(uint64_t most, bool negative) {
    int steps = 0;
    while (steps < 3 && most >> ((8 << steps) - negative)) steps++;
    return steps;
}

static int narrowest(int code, const Range *range) {
    bool negative = DTYPES[code].kind == SIGNED && range->any >> (8 * DTYPES[code].size - 1) & 1;
    uint64_t most = negative ? range->magnitude : range->any;
    if (!negative && most <= 1) return BOOL;
    int steps = doublings(most, negative);
    return 1 << steps >= DTYPES[code].size ? code : (negative ? INT8 : UINT8) + steps;
}

static bool is_finite(uint64_t bits, int code) {
    uint64_t exponent = DTYPES[code].exponent;
    return !exponent || (bits & exponent) != exponent;
}

/* Write `count` elements of dtype `code` as a body of dtype `wire`. With `checked`, floats are read only once
 * for the copy and the check. Returns whether checked ones are finite. */
static bool store(const u8 *from, int code, u8 *to, int wire, uint64_t count, bool checked) {
    int size = DTYPES[code].size, stored = DTYPES[wire].size;
    uint64_t exponent = checked ? DTYPES[code].exponent : 0;
    if (wire == BOOL) BY_SIZE(size, pack, from, to, count);
    else if (stored != size) narrow(from, size, to, stored, count);
    else if (exponent) return BY_SIZE(size, copy, (const void *)from, (void *)to, count, exponent);
    else memcpy(to, from, count * size);
    return true;
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
    int steps = doublings(most, negative);
    if (most < (negative ? 32 : 128)) put_tagged(to, (int)(bits & 0xff), 0, 0);
    else put_tagged(to, (negative ? 0xd0 : 0xcc) + steps, bits, 1 << steps);
}

static void put_list(u8 **to, uint64_t count) {
    if (count < 16) put_tagged(to, 0x90 | (int)count, 0, 0);
    else put_tagged(to, count <= UINT16_MAX ? 0xdc : 0xdd, count, count <= UINT16_MAX ? 2 : 4);
}

/* ---------------------------------------------------------------------------------------------
 * The columns of one group that is to be encoded.
 */

typedef struct {
    const u8 *at;     /* elements, NULL where the sample has none of this column */
    const u8 *body;   /* the same; of rounded floats, these */
    PyObject *owner;  /* the tensor, where it is held here */
    uint64_t count, parts[PARTS];
} Cell;

/* checked: `encode` says whether its numbers are finite */
typedef struct { PyObject *key; int code, wire, checked; bool here; Cell *cells; } EncodedColumn;

typedef struct {
    Py_ssize_t samples, count;
    EncodedColumn *columns;
    Shape *shapes;
    uint64_t shape_count, oldest; /* oldest and newest: token versions >= 0; */
    int64_t newest;               /* newest is -1 where there is none */
    uint32_t *slots, mask;        /* places of shapes by hash, counted from 1 */
    bool sound, even, is_encoded; /* even: each sample has all fields but masks */
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
                     .mask = (uint32_t)slots - 1, .oldest = UINT64_MAX, .newest = -1, .sound = true, .even = true};
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

/* Read what Python says of one column: (key, code, wire or -1, [None or (address, shape[, address])], checked). */
static int column_from(Columns *all, EncodedColumn *column, PyObject *given) {
    PyObject *cells;
    if (!PyArg_ParseTuple(given, "SiiO!p", &column->key, &column->code, &column->wire, &PyList_Type, &cells,
                          &column->checked))
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
        if (!PyArg_ParseTuple(cell, "KO!|K", &at, &PyTuple_Type, &sizes, &body) || shape_from(sizes, &shape)) return -1;
        if (shape.count && (!at || !body != (column->wire < 0)))
            return PyErr_SetString(PyExc_ValueError, "elements without an address, or without their wire dtype"), -1;
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
enum { INTEGERS = 1, FINITE = 2, VERSIONS = 4, OPTIONAL = 8, CHECKED = 16 };
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
    if (rule->needs & FINITE && cell->count && !is_finite(value_of(cell->at, column->code, 0), column->code))
        return false;
    if (!shape->rank) return true;
    uint64_t *length = &lengths[rule->of_actions ? 1 : 0];
    if (*length && *length != (uint64_t)shape->sizes[0] + 1) return false;
    *length = (uint64_t)shape->sizes[0] + 1;
    return true;
}

/* Note the oldest and the newest version of a sample's tokens; values below 0 stand for unknown ones. */
static void note_versions(Columns *all, const EncodedColumn *column, const Cell *cell) {
    BY_SIZE(DTYPES[column->code].size, bounds, cell->at, cell->count, DTYPES[column->code].kind == SIGNED, &all->oldest,
            &all->newest);
}

/* Return whether elements are what DLPack says, or -1 with an error: it describes integers smaller than bytes as
 * bytes, and does not say that imaginary parts of conjugates have their sign elsewhere. */
static int is_described(PyObject *tensor, int code, PyObject *types) {
    int kind = DTYPES[code].kind;
    if (kind == FLOATING) {
        PyObject *is_neg = PyObject_CallMethodNoArgs(tensor, name_is_neg);
        if (!is_neg) return -1;
        Py_DECREF(is_neg);
        return is_neg == Py_False;
    }
    if (kind == BITS || DTYPES[code].size > 1) return 1;
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    if (!dtype) return -1;
    Py_DECREF(dtype);
    return dtype == PyTuple_GET_ITEM(types, kind == SIGNED ? 1 : 2);
}

/* Fill in one cell. Returns 1, or 0 where the field is not plain, or -1 with an error. */
static int collect_cell(Columns *all, EncodedColumn *column, Py_ssize_t sample, PyObject *tensor, PyObject *types,
                        const Exchange *exchange, const Rule *rule, uint64_t *lengths) {
    Borrowed borrowed;
    Shape shape;
    if (exchange->borrow(tensor, &borrowed)) return PyErr_Clear(), 0; /* Python asks again, and says why */
    Cell *cell = &column->cells[sample];
    cell->owner = Py_NewRef(tensor);
    if (!take_memory(all, column, sample, &borrowed, &shape)) return 0;
    int plain = is_described(tensor, column->code, types);
    if (plain < 1) return plain;
    if (rule && all->sound) all->sound = keeps_rule(rule, column, cell, &shape, lengths);
    if (!rule || !(rule->needs & VERSIONS)) return 1;
    if (DTYPES[column->code].kind != SIGNED && DTYPES[column->code].kind != UNSIGNED) return 0;
    note_versions(all, column, cell);
    return 1;
}

static int collect_column(Columns *all, EncodedColumn *column, PyObject *rows, PyObject *name, PyObject *types,
                          const Exchange *exchange, const Rule *rule, uint64_t *lengths) {
    int found = 1;
    for (Py_ssize_t i = 0; found == 1 && i < all->samples; i++) {
        PyObject *row = PyTuple_GET_ITEM(rows, i), *tensor;
        if (!rule && !PyDict_Check(row)) return 0;
        if (rule) tensor = PyObject_GetAttr(row, name);
        else tensor = Py_XNewRef(PyDict_GetItemWithError(row, name));
        if (!tensor && (rule || PyErr_Occurred())) return -1;
        if (tensor && tensor != Py_None)
            found = Py_IS_TYPE(tensor, (PyTypeObject *)PyTuple_GET_ITEM(types, 0))
                        ? collect_cell(all, column, i, tensor, types, exchange, rule, &lengths[2 * i]) : 0;
        Py_XDECREF(tensor);
    }
    for (Py_ssize_t i = 0; column->here && !(rule && rule->needs & OPTIONAL) && i < all->samples; i++)
        if (!column->cells[i].at) all->even = false;
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
                       const Rule *rules, Py_ssize_t ruled, PyObject *types, const Exchange *exchange) {
    int found = 1;
    uint64_t *lengths = PyMem_Calloc((size_t)all->samples, 2 * sizeof(uint64_t));
    if (!lengths) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; found == 1 && i < all->count; i++) {
        all->columns[i].key = Py_NewRef(PyTuple_GET_ITEM(keys, i));
        all->columns[i].checked = i < ruled && rules[i].needs & CHECKED;
        found = collect_column(all, &all->columns[i], i < ruled ? samples : tables, PyTuple_GET_ITEM(names, i), types,
                               exchange, i < ruled ? &rules[i] : NULL, lengths);
    }
    for (Py_ssize_t i = 0; found == 1 && i < all->samples; i++)
        if (check_sample(all, PyTuple_GET_ITEM(samples, i), &lengths[2 * i])) found = -1;
    PyMem_Free(lengths);
    return found;
}

PyObject *collect(PyObject *module, PyObject *args) {
    PyObject *samples, *tables, *names, *keys, *types, *capsule;
    const Rule *rules;
    Py_ssize_t ruled;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O!O!y#O!O", &PyTuple_Type, &samples, &PyTuple_Type, &tables, &PyTuple_Type, &names,
                          &PyTuple_Type, &keys, &rules, &ruled, &PyTuple_Type, &types, &capsule))
        return NULL;
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_ssize_t size = PyTuple_GET_SIZE(samples), count = PyTuple_GET_SIZE(names);
    if (!exchange) return NULL;
    if (PyTuple_GET_SIZE(types) != 3) return PyErr_SetString(PyExc_ValueError, "three types are needed"), NULL;
    if (size < 1 || size > MAX_SAMPLES || size != PyTuple_GET_SIZE(tables) || count > MAX_COLUMNS ||
        count != PyTuple_GET_SIZE(keys) || exchange->version.major != 1 || !exchange->borrow)
        Py_RETURN_NONE;
    Columns *all = columns_new(size, count);
    if (!all) return NULL;
    int found = collect_all(all, samples, tables, names, keys, rules, ruled / (Py_ssize_t)sizeof(Rule), types, exchange);
    PyObject *columns = found == 1 ? PyCapsule_New(all, CAPSULE, capsule_free) : NULL;
    if (!columns) {
        columns_free(all);
        return found ? NULL : Py_NewRef(Py_None);
    }
    PyObject *oldest = all->newest < 0 ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(all->oldest);
    PyObject *newest = all->newest < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(all->newest);
    return Py_BuildValue("NOONN", columns, all->sound ? Py_True : Py_False, all->even ? Py_True : Py_False, oldest,
                         newest);
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
        uint64_t count = cell->count, lead = long_run(cell->at, code, count, false);
        /* only behind the lead: both together fit, even if another thread writes to the tensor */
        uint64_t trail = long_run(cell->at + lead * size, code, count - lead, true);
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

/* Returns whether the numbers of columns that are checked are finite. */
static bool write_bodies(const Columns *all, u8 *to) {
    bool finite = true;
    for (Py_ssize_t i = 0; i < all->count; i++) {
        const EncodedColumn *column = &all->columns[i];
        for (Py_ssize_t k = 0; column->here && k < all->samples; k++) {
            const Cell *cell = &column->cells[k];
            int code = cell->body == cell->at ? column->code : column->wire;
            if (column->checked) /* without a run its value is 0 */
                finite &= is_finite(cell->parts[LEAD_VALUE], column->code) &&
                          is_finite(cell->parts[TRAIL_VALUE], column->code);
            if (!cell->count) continue;
            finite &= store(cell->body + cell->parts[LEAD] * DTYPES[code].size, code, to, column->wire, cell->count,
                            column->checked);
            to += body_bytes(column->wire, cell->count);
        }
    }
    return finite;
}

/* Put the sections together; `head` is schema and header. Returns what `encode` does. */
static PyObject *join(const Columns *all, const u8 *head, size_t schema, size_t header, uint64_t decoded,
                      const Py_buffer *extras) {
    uint64_t bodies = 0, tensors = 0, size = PREFIX_BYTES + schema + header + (uint64_t)extras->len;
    for (Py_ssize_t i = 0; i < all->count; i++)
        for (Py_ssize_t k = 0; all->columns[i].here && k < all->samples; k++)
            bodies += body_bytes(all->columns[i].wire, all->columns[i].cells[k].count),
                tensors += all->columns[i].cells[k].parts[REF] != MISSING;
    if (size + bodies > MAX_BLOB_BYTES)
        return PyErr_Format(EncodeError, "a group has %llu bytes, the limit is %llu: put smaller groups.",
                            (unsigned long long)(size + bodies), (unsigned long long)MAX_BLOB_BYTES);
    if (decoded > DECODED_LIMIT(size + bodies))
        return PyErr_Format(EncodeError, "a group of %llu bytes is little but runs of one value, %llu bytes "
                            "packed: cut its padding off before putting it.",
                            (unsigned long long)decoded, (unsigned long long)(size + bodies));
    if (tensors > TENSOR_LIMIT(size + bodies))
        return PyErr_Format(EncodeError, "a group has %llu tensors in %llu bytes: leave empty and constant ones "
                            "out, or put smaller groups.",
                            (unsigned long long)tensors, (unsigned long long)(size + bodies));
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
    bool finite;
    WITHOUT_LOCK_IF(bodies >= RELEASE_BYTES, finite = write_bodies(all, at + size));
    return Py_BuildValue("NO", blob, finite ? Py_True : Py_False);
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

PyObject *encode(PyObject *module, PyObject *args) {
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
