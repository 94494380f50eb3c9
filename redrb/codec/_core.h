/* What all parts of the compiled kernel share: dtypes, limits, shapes.
 *
 * `_encode.c` turns samples' memory into blobs, `_decode.c` blobs into padded memory; `_gather.c` gathers the
 * columns of a table.
 * `docs/reference/wire-format.md` specifies the bytes, and `redrb/codec/plain` does the same in
 * plain Python:
 * both are held to the same tests. Python keeps tensors alive, checks what users give, and does
 * everything that is rare.
 */
#ifndef REDRB_CORE_H
#define REDRB_CORE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
 * not finite. */
static const struct { uint8_t size, kind, dlpack; uint64_t exponent; } DTYPES[CODES] = {
    [BOOL] = {1, BITS, 6, 0},
    [INT8] = {1, SIGNED, 0, 0}, [INT16] = {2, SIGNED, 0, 0},
    [INT32] = {4, SIGNED, 0, 0}, [INT64] = {8, SIGNED, 0, 0},
    [UINT8] = {1, UNSIGNED, 1, 0}, [UINT16] = {2, UNSIGNED, 1, 0},
    [UINT32] = {4, UNSIGNED, 1, 0}, [UINT64] = {8, UNSIGNED, 1, 0},
    [FLOAT16] = {2, FLOATING, 2, 0x7c00}, [FLOAT32] = {4, FLOATING, 2, 0x7f800000},
    [FLOAT64] = {8, FLOATING, 2, 0x7ff0000000000000}, [BFLOAT16] = {2, FLOATING, 4, 0x7f80},
    [FLOAT8_E4M3FN] = {1, FLOATING, 10, 0x7f}, [FLOAT8_E5M2] = {1, FLOATING, 12, 0x7c},
};

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
#define TENSOR_LIMIT(BLOB_BYTES) (65536 + (uint64_t)(BLOB_BYTES))
#define RELEASE_BYTES (256 << 10) /* work on less than this is done before a lock is handed over */
#define MISSING UINT64_MAX        /* in the place of a shape: the sample has none of this column */

/* The parts of a column's entry in the header, one for each sample or one for all. */
enum { REF, LEAD, LEAD_VALUE, TRAIL, TRAIL_VALUE, PARTS };

typedef struct { uint64_t count, rank; uint32_t sizes[MAX_RANK]; } Shape; /* unused sizes are 0 */

/* Load what `collect` and `encode` need, at import; -1 with an error. */
int prepare_encoding(PyObject *errors);
/* collect(samples, tables, names, keys, rules, types, exchange) -> (columns, sound, even, oldest version,
 *     newest version); None where a field is not plain. The names beyond the rules are those of further tensors, in the tables. */
PyObject *collect(PyObject *module, PyObject *args);
/* encode(samples, columns, tails, tail, extras) -> (blob, whether the numbers to check are finite) */
PyObject *encode(PyObject *module, PyObject *args);
/* gather(parts, begins, lengths) -> (kind, dtype's code, elements, shapes) of a column of a table's rows; None
 *     where the cells are no tensors or arrays of one dtype. */
PyObject *gather(PyObject *module, PyObject *args);

#define WITHOUT_LOCK_IF(LARGE, WORK)                                     \
    do {                                                                 \
        PyThreadState *released = (LARGE) ? PyEval_SaveThread() : NULL;  \
        WORK;                                                            \
        if (released) PyEval_RestoreThread(released);                    \
    } while (0)

static inline uint64_t body_bytes(int wire, uint64_t count) {
    return wire == BOOL ? (count + 7) >> 3 : count * DTYPES[wire].size;
}

/* Count the elements of a shape whose sizes are known; false where it is too large. */
static inline bool count_elements(Shape *shape) {
    uint64_t room = shape->count = 1; /* dimensions of 0 count as 1 */
    for (uint64_t i = 0; i < shape->rank; i++) {
        shape->count *= shape->sizes[i];
        room *= shape->sizes[i] ? shape->sizes[i] : 1;
        if (room > MAX_ELEMENTS) return false;
    }
    return true;
}

#define BY_SIZE(SIZE, LOOP, ...)                                              \
    ((SIZE) == 1 ? LOOP##_8(__VA_ARGS__) : (SIZE) == 2 ? LOOP##_16(__VA_ARGS__) \
     : (SIZE) == 4 ? LOOP##_32(__VA_ARGS__) : LOOP##_64(__VA_ARGS__))

/* A loop from one integer type to another, and its place in a switch over CONVERSION_KEY. */
#define CONVERSION(FROM, TO)                                                               \
    FAST static void FROM##_to_##TO(const FROM *restrict from, TO *restrict to, uint64_t count) { \
        for (uint64_t i = 0; i < count; i++) to[i] = (TO)from[i];                          \
    }
#define CONVERSION_KEY(SIZE, NEW_SIZE, SIGN) ((SIZE) << 8 | (NEW_SIZE) << 1 | (SIGN))
#define CONVERSION_CASE(FROM, TO)                                     \
    case CONVERSION_KEY(sizeof(FROM), sizeof(TO), (FROM)-1 < 1):      \
        FROM##_to_##TO((const void *)from, (void *)to, count);        \
        break;

#endif
