/* Reading: a blob is checked in full, and decoded into padded memory; the module stands at the end.
 *
 * Blobs come from anybody: every read of a blob is bounds-checked, numbers out of a header are checked
 * against the limits before memory is taken for them, and nothing here recurses.
 */
#include "_core.h"
#include <structmember.h>

#define INTERFACE 8 /* of these functions; Python uses a core with the same number alone */

static PyObject *DecodeError;

/* ---------------------------------------------------------------------------------------------
 * Elements: each loop is plain, so that the compiler makes it wide.
 */

#define LOOPS(U, N)                                                                           \
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
LOOPS(u8, 8)
LOOPS(u16, 16)
LOOPS(u32, 32)
LOOPS(u64, 64)

#define WIDENINGS(X)                                                     \
    X(u8, u16) X(u8, u32) X(u8, u64) X(u16, u32) X(u16, u64) X(u32, u64) \
    X(i8, i16) X(i8, i32) X(i8, i64) X(i16, i32) X(i16, i64) X(i32, i64)
WIDENINGS(CONVERSION)

static void widen(const u8 *from, int stored, bool sign, u8 *to, int size, uint64_t count) {
    switch (CONVERSION_KEY(stored, size, sign)) { WIDENINGS(CONVERSION_CASE) }
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

/* Write `count` elements of dtype `code` from a body of dtype `wire`. */
static void load(const u8 *from, int wire, u8 *to, int code, uint64_t count) {
    int size = DTYPES[code].size, stored = DTYPES[wire].size;
    if (wire == BOOL) BY_SIZE(size, unpack, from, to, count);
    else if (stored == size) memcpy(to, from, count * size);
    else if (DTYPES[code].kind == FLOATING) widen_floats((const u16 *)from, wire, to, code, count);
    else widen(from, stored, DTYPES[wire].kind == SIGNED, to, size, count);
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
    Py_ssize_t samples, tails, body_at, column_count;
    unsigned long long decoded; /* bytes of all its tensors */
    uint64_t tensors, shape_count;
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

/* Return the shape of a sample; NULL where it lacks the column. */
static const Shape *shape_of(const Group *group, const Piece *piece) {
    return piece->parts[REF] == MISSING ? NULL : &group->shapes[piece->parts[REF]];
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
    group->tensors += (uint64_t)times;
    group->decoded += count * DTYPES[column->code].size * (uint64_t)times; /* 2^31 x 8 x 4096 x 128 fits */
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
    if (group->decoded > DECODED_LIMIT(group->blob.len))
        return malformed("it says that it decodes to much more than its bytes");
    if (group->tensors > TENSOR_LIMIT(group->blob.len)) return malformed("it has many more tensors than bytes");
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

static bool are_codes(PyObject *codes, Py_ssize_t count) {
    bool known = PyBytes_GET_SIZE(codes) == count;
    for (Py_ssize_t i = 0; known && i < count; i++) known = (u8)PyBytes_AS_STRING(codes)[i] < CODES;
    return known;
}

static int read_header(In *in, Group *group, const u8 *codes) {
    Token list = read_token(in), samples = read_token(in), columns = read_token(in);
    if (list.kind != LIST || list.bits < 3) return malformed("its header is no list of at least three");
    if (!in_range(&samples, MAX_SAMPLES) || !samples.bits) return malformed("it has an odd number of samples");
    if (columns.kind != LIST || columns.bits != (uint64_t)group->column_count)
        return malformed("its header and its schema have different columns");
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
    else if (!are_codes(codes, 2 * group->column_count))
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
        const Shape *shape = shape_of(group, &piece);
        PyObject *found = !shape ? Py_NewRef(Py_None)
            : Py_BuildValue(DTYPES[column->code].kind == SIGNED ? "NKKLKL" : "NKKKKK", shape_tuple(shape), piece.count,
                            parts[LEAD], parts[LEAD_VALUE], parts[TRAIL], parts[TRAIL_VALUE]);
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
    const Shape *shape = shape_of(group, &piece);
    if (!shape || shape->count * DTYPES[column->code].size != nbytes)
        return PyErr_SetString(PyExc_ValueError, "the memory has another size than the sample"), NULL;
    write_piece(group, column, &piece, (u8 *)(uintptr_t)address);
    Py_RETURN_NONE;
}

static PyMemberDef group_members[] = {
    {"samples", T_PYSSIZET, offsetof(Group, samples), READONLY, "samples in the group"},
    {"decoded_bytes", T_ULONGLONG, offsetof(Group, decoded), READONLY, "bytes of all its tensors"},
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

/* Return the column in one of the groups; NULL where the group lacks it. */
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
            Piece piece = piece_of(column, k);
            const Shape *shape = shape_of(group, &piece);
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
            const Shape *shape = shape_of(group, &piece);
            uint64_t held = shape ? shape->count : 0;
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
                stack->rows < 1 << 29 && /* so that the product fits */
                stack->rows * rows->row_elements * DTYPES[rows->code].size == nbytes;
    for (Py_ssize_t i = 0; fits && i < stack->count; i++) {
        const Column *column = column_in(stack, i, &group);
        fits = !column || column->code == rows->code;
        for (Py_ssize_t k = 0; fits && column && k < (column->pieces ? group->samples : 1); k++) {
            Piece piece = piece_of(column, k);
            const Shape *shape = shape_of(group, &piece);
            fits = !shape || shape->count <= rows->row_elements;
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
    {"gather", gather, METH_VARARGS, "gather(parts, begins, lengths): a table's column in one buffer"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "redrb.codec._core", "The inner loops of the codec.", -1, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *errors = PyImport_ImportModule("redrb.errors");
    if (!errors) return NULL;
    DecodeError = PyObject_GetAttrString(errors, "DecodeError");
    int failed = !DecodeError || prepare_encoding(errors) || PyType_Ready(&GroupType);
    Py_DECREF(errors);
    if (failed) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE)) Py_CLEAR(module);
    return module;
}
