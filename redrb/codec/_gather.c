/* Gathering: the elements of one column of a table's rows are copied to one buffer.
 *
 * `redrb/codec/plain/cells.py` describes the bytes of a cell. Cells come from anybody: each is checked in
 * full before memory is taken.
 */
#include "_core.h"

enum { TENSOR, ARRAY, HEAD_BYTES = 3 };

typedef struct { const u8 *data; uint64_t bytes; } Elements;

/* Read what stands before the elements of a cell; false where it is no tensor and no array. */
static bool read_cell(const u8 *cell, uint64_t length, Shape *shape, Elements *elements) {
    if (length < HEAD_BYTES || cell[0] > ARRAY || cell[1] >= CODES || cell[2] > MAX_RANK) return false;
    uint64_t head = HEAD_BYTES + 4 * (uint64_t)cell[2];
    if (length < head) return false;
    shape->rank = cell[2];
    memcpy(shape->sizes, cell + HEAD_BYTES, head - HEAD_BYTES);
    *elements = (Elements){cell + head, length - head};
    return count_elements(shape) && shape->count * DTYPES[cell[1]].size == elements->bytes;
}

static PyObject *shape_tuple(const Shape *shape) {
    PyObject *sizes = PyTuple_New((Py_ssize_t)shape->rank);
    for (uint64_t i = 0; sizes && i < shape->rank; i++) {
        PyObject *size = PyLong_FromUnsignedLong(shape->sizes[i]);
        if (size) PyTuple_SET_ITEM(sizes, (Py_ssize_t)i, size);
        else Py_CLEAR(sizes);
    }
    return sizes;
}

/* Find the cell `row`; NULL with an error where it is beyond its part. */
static const u8 *find_cell(PyObject *parts, PyObject *begins, PyObject *lengths, Py_ssize_t row,
                           Py_ssize_t *length) {
    PyObject *part = PyTuple_GET_ITEM(parts, row);
    Py_ssize_t begin = PyLong_AsSsize_t(PyTuple_GET_ITEM(begins, row));
    *length = PyLong_AsSsize_t(PyTuple_GET_ITEM(lengths, row));
    if (PyErr_Occurred()) return NULL;
    if (!PyBytes_Check(part) || begin < 0 || *length < 0 || begin > PyBytes_GET_SIZE(part) ||
        *length > PyBytes_GET_SIZE(part) - begin) {
        PyErr_SetString(PyExc_ValueError, "a cell lies beyond its part");
        return NULL;
    }
    return (const u8 *)PyBytes_AS_STRING(part) + begin;
}

/* Check all cells; 1 where they are joined, 0 where they are not alike, -1 with an error. */
static int check_cells(PyObject *args[3], Elements *elements, PyObject *shapes, const u8 **first) {
    for (Py_ssize_t row = 0; row < PyTuple_GET_SIZE(args[0]); row++) {
        Py_ssize_t length;
        Shape shape = {0};
        const u8 *cell = find_cell(args[0], args[1], args[2], row, &length);
        if (!cell) return -1;
        if (!read_cell(cell, (uint64_t)length, &shape, &elements[row])) return 0;
        if (!*first) *first = cell;
        if (memcmp(cell, *first, 2)) return 0;
        PyObject *sizes = shape_tuple(&shape);
        if (!sizes) return -1;
        PyList_SET_ITEM(shapes, row, sizes);
    }
    return *first != NULL;
}

PyObject *gather(PyObject *module, PyObject *tuple) {
    PyObject *args[3], *shapes = NULL, *flat = NULL, *result = NULL;
    const u8 *first = NULL;
    (void)module;
    if (!PyArg_ParseTuple(tuple, "O!O!O!", &PyTuple_Type, &args[0], &PyTuple_Type, &args[1], &PyTuple_Type,
                          &args[2]))
        return NULL;
    Py_ssize_t rows = PyTuple_GET_SIZE(args[0]);
    if (PyTuple_GET_SIZE(args[1]) != rows || PyTuple_GET_SIZE(args[2]) != rows) {
        PyErr_SetString(PyExc_ValueError, "each cell has a part, a begin and a length");
        return NULL;
    }
    Elements *elements = PyMem_New(Elements, rows ? rows : 1);
    if (!elements) return PyErr_NoMemory();
    if (!(shapes = PyList_New(rows))) goto done;
    int alike = check_cells(args, elements, shapes, &first);
    if (alike < 0) goto done;
    if (!alike) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    uint64_t bytes = 0;
    for (Py_ssize_t row = 0; row < rows; row++) bytes += elements[row].bytes;
    if (!(flat = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)bytes))) goto done;
    u8 *to = (u8 *)PyByteArray_AS_STRING(flat);
    WITHOUT_LOCK_IF(bytes > RELEASE_BYTES, {
        for (Py_ssize_t row = 0; row < rows; row++) {
            memcpy(to, elements[row].data, elements[row].bytes);
            to += elements[row].bytes;
        }
    });
    result = Py_BuildValue("(iiOO)", first[0], first[1], flat, shapes);
done:
    Py_XDECREF(flat);
    Py_XDECREF(shapes);
    PyMem_Free(elements);
    return result;
}
