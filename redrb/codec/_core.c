/* The inner loops of the codec: samples' memory to blobs, and blobs into padded memory.
 *
 * `docs/wire-format.md` specifies the bytes, and `redrb/codec/plain` does the same in plain
 * Python: both are held to the same tests. Python gives the addresses of tensors' memory, keeps the
 * tensors alive and checks what users give. Blobs come from anybody: every read of a blob is bounds-
 * checked, numbers out of a header are checked against the limits before memory is taken for them,
 * and nothing here recurses.
 */
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

enum { BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64,
       FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, CODES };

static const uint8_t ITEMSIZE[CODES] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 1, 1};

#define PREFIX_BYTES 16
#define MAX_BLOB_BYTES ((uint64_t)512 << 20)
#define MAX_SCHEMA_BYTES 65535
#define MAX_HEADER_BYTES (1 << 20)
#define MAX_EXTRAS_BYTES (256u << 20)
#define MAX_SAMPLES 4096
#define MAX_RANK 8
#define MAX_ELEMENTS ((uint64_t)1 << 31)
#define DECODED_BYTES ((uint64_t)256 << 20)
#define DECODED_PER_BYTE 64
#define MIN_RUN 16
#define RELEASE_BYTES (256 << 10) /* work on less than this is done before a lock is handed over */
#define MISSING UINT32_MAX

static PyObject *EncodeError, *DecodeError;

static bool is_signed(int code) { return code >= INT8 && code <= INT64; }
static bool is_integer(int code) { return code >= INT8 && code <= UINT64; }

static uint64_t body_bytes(int wire, uint64_t count) {
    return wire == BOOL ? (count + 7) >> 3 : count * ITEMSIZE[wire];
}

/* ---------------------------------------------------------------------------------------------
 * Elements: runs, ranges, conversions. Each loop is plain, so that the compiler makes it wide.
 */

#define LEADING(T, NAME)                                                       \
    FAST static uint64_t NAME(const T *at, uint64_t count) {                   \
        uint64_t i = 0;                                                        \
        const T first = at[0];                                                 \
        for (; i + 64 <= count; i += 64) {                                     \
            T differs = 0;                                                     \
            for (int k = 0; k < 64; k++) differs |= (T)(at[i + k] ^ first);    \
            if (differs) break;                                                \
        }                                                                      \
        while (i < count && at[i] == first) i++;                               \
        return i;                                                              \
    }
LEADING(uint8_t, leading8)
LEADING(uint16_t, leading16)
LEADING(uint32_t, leading32)
LEADING(uint64_t, leading64)

#define TRAILING(T, NAME)                                                            \
    FAST static uint64_t NAME(const T *at, uint64_t count) {                         \
        uint64_t i = count;                                                          \
        const T last = at[count - 1];                                                \
        for (; i >= 64; i -= 64) {                                                   \
            T differs = 0;                                                           \
            for (int k = 1; k <= 64; k++) differs |= (T)(at[i - k] ^ last);          \
            if (differs) break;                                                      \
        }                                                                            \
        while (i > 0 && at[i - 1] == last) i--;                                      \
        return count - i;                                                            \
    }
TRAILING(uint8_t, trailing8)
TRAILING(uint16_t, trailing16)
TRAILING(uint32_t, trailing32)
TRAILING(uint64_t, trailing64)

static uint64_t element(const uint8_t *at, int size, uint64_t index) {
    switch (size) {
    case 1: return at[index];
    case 2: { uint16_t v; memcpy(&v, at + 2 * index, 2); return v; }
    case 4: { uint32_t v; memcpy(&v, at + 4 * index, 4); return v; }
    default: { uint64_t v; memcpy(&v, at + 8 * index, 8); return v; }
    }
}

/* Bools in memory may be any byte; all but 0 are true. */
static uint64_t leading_bools(const uint8_t *at, uint64_t count) {
    uint64_t i = 0;
    bool first = at[0];
    while (i < count && (bool)at[i] == first) i++;
    return i;
}
static uint64_t trailing_bools(const uint8_t *at, uint64_t count) {
    uint64_t i = count;
    bool last = at[count - 1];
    while (i > 0 && (bool)at[i - 1] == last) i--;
    return count - i;
}

static uint64_t leading(const uint8_t *at, int code, uint64_t count) {
    uint64_t run;
    switch (ITEMSIZE[code]) {
    case 1:
        run = leading8(at, count);
        return code == BOOL && run < count ? leading_bools(at, count) : run;
    case 2: return leading16((const uint16_t *)at, count);
    case 4: return leading32((const uint32_t *)at, count);
    default: return leading64((const uint64_t *)at, count);
    }
}
static uint64_t trailing(const uint8_t *at, int code, uint64_t count) {
    uint64_t run;
    switch (ITEMSIZE[code]) {
    case 1:
        run = trailing8(at, count);
        return code == BOOL && run < count ? trailing_bools(at, count) : run;
    case 2: return trailing16((const uint16_t *)at, count);
    case 4: return trailing32((const uint32_t *)at, count);
    default: return trailing64((const uint64_t *)at, count);
    }
}

/* The value of a run as the header has it: integers by value, floats by bits, bools 0 or 1. */
static uint64_t run_value(const uint8_t *at, int code, uint64_t index) {
    uint64_t bits = element(at, ITEMSIZE[code], index);
    if (code == BOOL) return bits != 0;
    switch (code) {
    case INT8: return (uint64_t)(int64_t)(int8_t)bits;
    case INT16: return (uint64_t)(int64_t)(int16_t)bits;
    case INT32: return (uint64_t)(int64_t)(int32_t)bits;
    default: return bits;
    }
}

/* Which bits occur: `any` of the values as unsigned, `magnitude` of v or -1 - v, as signed. */
typedef struct { uint64_t any, magnitude; } Range;

#define RANGE(U, S, NAME)                                                                 \
    FAST static void NAME(const U *at, uint64_t count, Range *range) {                    \
        U any = 0, magnitude = 0;                                                         \
        uint64_t i = 0;                                                                   \
        for (; i < count; i++) {                                                          \
            any |= at[i];                                                                 \
            magnitude |= (U)(at[i] ^ (U)((S)at[i] >> (8 * sizeof(U) - 1)));               \
        }                                                                                 \
        range->any |= any;                                                                \
        range->magnitude |= magnitude;                                                    \
    }
RANGE(uint16_t, int16_t, range16)
RANGE(uint32_t, int32_t, range32)
RANGE(uint64_t, int64_t, range64)

FAST static void range8(const uint8_t *at, uint64_t count, Range *range) {
    uint64_t i = 0;
    while (i < count && range->any <= 1) { /* what is not bits keeps its one byte: no need to go on */
        uint8_t any = 0;
        uint64_t end = count - i > 4096 ? i + 4096 : count;
        for (; i < end; i++) any |= at[i];
        range->any |= any;
    }
}

static int narrowest(int code, const Range *range, bool empty) {
    if (code == BOOL || empty) return BOOL;
    int size = ITEMSIZE[code];
    int wire;
    if (is_signed(code) && range->any >> (8 * size - 1) & 1) {
        uint64_t m = range->magnitude;
        wire = m <= INT8_MAX ? INT8 : m <= INT16_MAX ? INT16 : m <= INT32_MAX ? INT32 : INT64;
    } else {
        uint64_t m = range->any;
        wire = m <= 1 ? BOOL : m <= UINT8_MAX ? UINT8 : m <= UINT16_MAX ? UINT16
             : m <= UINT32_MAX ? UINT32 : UINT64;
    }
    return wire != BOOL && ITEMSIZE[wire] >= size ? code : wire;
}

#define CONVERT(FROM, TO, NAME)                                                           \
    FAST static void NAME(const FROM *restrict from, TO *restrict to, uint64_t count) {   \
        for (uint64_t i = 0; i < count; i++) to[i] = (TO)from[i];                         \
    }
/* narrower, as the bits are: nothing is lost, so signs do not matter */
CONVERT(uint64_t, uint8_t, narrow64_8)
CONVERT(uint64_t, uint16_t, narrow64_16)
CONVERT(uint64_t, uint32_t, narrow64_32)
CONVERT(uint32_t, uint8_t, narrow32_8)
CONVERT(uint32_t, uint16_t, narrow32_16)
CONVERT(uint16_t, uint8_t, narrow16_8)
/* wider, by the sign of what is stored */
CONVERT(uint8_t, uint16_t, widen_u8_16)
CONVERT(uint8_t, uint32_t, widen_u8_32)
CONVERT(uint8_t, uint64_t, widen_u8_64)
CONVERT(uint16_t, uint32_t, widen_u16_32)
CONVERT(uint16_t, uint64_t, widen_u16_64)
CONVERT(uint32_t, uint64_t, widen_u32_64)
CONVERT(int8_t, int16_t, widen_i8_16)
CONVERT(int8_t, int32_t, widen_i8_32)
CONVERT(int8_t, int64_t, widen_i8_64)
CONVERT(int16_t, int32_t, widen_i16_32)
CONVERT(int16_t, int64_t, widen_i16_64)
CONVERT(int32_t, int64_t, widen_i32_64)

FAST static void pack_bits1(const uint8_t *at, uint8_t *to, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i++) {
        uint64_t eight;
        memcpy(&eight, at + 8 * i, 8);
        eight |= eight >> 4; /* any byte that is not 0 becomes 1 */
        eight |= eight >> 2 & 0x3f3f3f3f3f3f3f3fULL;
        eight |= eight >> 1 & 0x7f7f7f7f7f7f7f7fULL;
        eight &= 0x0101010101010101ULL;
        to[i] = (uint8_t)(eight * 0x0102040810204080ULL >> 56);
    }
}

#define PACK(T, NAME)                                                              \
    FAST static void NAME(const T *at, uint8_t *to, uint64_t bytes) {              \
        for (uint64_t i = 0; i < bytes; i++) {                                     \
            T bits = 0;                                                            \
            for (int k = 0; k < 8; k++) bits |= (T)(at[8 * i + k] << k);           \
            to[i] = (uint8_t)bits;                                                 \
        }                                                                          \
    }
PACK(uint16_t, pack_bits2)
PACK(uint32_t, pack_bits4)
PACK(uint64_t, pack_bits8)

static void pack_bits(const uint8_t *at, int size, uint8_t *to, uint64_t count) {
    uint64_t whole = count / 8;
    switch (size) {
    case 1: pack_bits1(at, to, whole); break;
    case 2: pack_bits2((const uint16_t *)at, to, whole); break;
    case 4: pack_bits4((const uint32_t *)at, to, whole); break;
    default: pack_bits8((const uint64_t *)at, to, whole);
    }
    if (count % 8) {
        uint8_t last = 0;
        for (uint64_t i = 8 * whole; i < count; i++)
            last |= (uint8_t)((element(at, size, i) != 0) << (i % 8));
        to[whole] = last;
    }
}

#define UNPACK(T, NAME)                                                                      \
    FAST static void NAME(const uint8_t *bits, T *to, uint64_t count) {                      \
        uint64_t whole = count / 8;                                                          \
        for (uint64_t i = 0; i < whole; i++)                                                 \
            for (int k = 0; k < 8; k++) to[8 * i + k] = (T)(bits[i] >> k & 1);               \
        for (uint64_t i = 8 * whole; i < count; i++) to[i] = (T)(bits[i / 8] >> i % 8 & 1);  \
    }
UNPACK(uint8_t, unpack_bits1)
UNPACK(uint16_t, unpack_bits2)
UNPACK(uint32_t, unpack_bits4)
UNPACK(uint64_t, unpack_bits8)

#define REPEAT(T, NAME)                                                            \
    FAST static void NAME(T *to, T value, uint64_t count) {                        \
        for (uint64_t i = 0; i < count; i++) to[i] = value;                        \
    }
REPEAT(uint16_t, repeat16)
REPEAT(uint32_t, repeat32)
REPEAT(uint64_t, repeat64)

static void repeat(uint8_t *to, int size, uint64_t value, uint64_t count) {
    if (!count) return; /* memory without elements may have no address */
    switch (size) {
    case 1: memset(to, (int)(value & 0xff), count); break;
    case 2: repeat16((uint16_t *)to, (uint16_t)value, count); break;
    case 4: repeat32((uint32_t *)to, (uint32_t)value, count); break;
    default: repeat64((uint64_t *)to, value, count);
    }
}

static float half_as_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, part = half & 1023;
    uint32_t bits;
    float value;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | part << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | part << 13;
    } else { /* subnormal: part * 2^-24 */
        value = (float)part * 5.9604644775390625e-8f;
        memcpy(&bits, &value, 4);
        bits |= sign;
    }
    memcpy(&value, &bits, 4);
    return value;
}

/* Bodies have any alignment: they are copied to memory that has, a piece at a time. */
#define PIECE 2048

static void widen_floats(const uint8_t *from, int wire, uint8_t *to, int code, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half;
        float value;
        memcpy(&half, from + 2 * i, 2);
        if (wire == BFLOAT16) {
            uint32_t bits = (uint32_t)half << 16;
            memcpy(&value, &bits, 4);
        } else {
            value = half_as_float(half);
        }
        if (code == FLOAT64) {
            double wide = value;
            if (wire == FLOAT16 && (half & 0x7c00) == 0x7c00) { /* a cast would change the bits of nan */
                uint64_t bits = (uint64_t)(half & 0x8000) << 48 | (uint64_t)0x7ff << 52 |
                                (uint64_t)(half & 1023) << 42;
                memcpy(&wide, &bits, 8);
            }
            memcpy(to + 8 * i, &wide, 8);
        } else {
            memcpy(to + 4 * i, &value, 4);
        }
    }
}

static void widen_piece(const uint8_t *at, int wire, uint8_t *to, int size, uint64_t count) {
    switch (wire << 4 | size) {
    case UINT8 << 4 | 2: widen_u8_16(at, (uint16_t *)to, count); break;
    case UINT8 << 4 | 4: widen_u8_32(at, (uint32_t *)to, count); break;
    case UINT8 << 4 | 8: widen_u8_64(at, (uint64_t *)to, count); break;
    case UINT16 << 4 | 4: widen_u16_32((const uint16_t *)at, (uint32_t *)to, count); break;
    case UINT16 << 4 | 8: widen_u16_64((const uint16_t *)at, (uint64_t *)to, count); break;
    case UINT32 << 4 | 8: widen_u32_64((const uint32_t *)at, (uint64_t *)to, count); break;
    case INT8 << 4 | 2: widen_i8_16((const int8_t *)at, (int16_t *)to, count); break;
    case INT8 << 4 | 4: widen_i8_32((const int8_t *)at, (int32_t *)to, count); break;
    case INT8 << 4 | 8: widen_i8_64((const int8_t *)at, (int64_t *)to, count); break;
    case INT16 << 4 | 4: widen_i16_32((const int16_t *)at, (int32_t *)to, count); break;
    case INT16 << 4 | 8: widen_i16_64((const int16_t *)at, (int64_t *)to, count); break;
    case INT32 << 4 | 8: widen_i32_64((const int32_t *)at, (int64_t *)to, count); break;
    }
}

/* Write `count` elements of dtype `code` from a body that is stored as `wire`. */
static void convert(const uint8_t *from, int wire, uint8_t *to, int code, uint64_t count) {
    int size = ITEMSIZE[code];
    if (wire == BOOL) {
        switch (size) {
        case 1: unpack_bits1(from, to, count); break;
        case 2: unpack_bits2(from, (uint16_t *)to, count); break;
        case 4: unpack_bits4(from, (uint32_t *)to, count); break;
        default: unpack_bits8(from, (uint64_t *)to, count);
        }
    } else if (wire == code || ITEMSIZE[wire] == size) {
        memcpy(to, from, count * size);
    } else if (!is_integer(code)) {
        widen_floats(from, wire, to, code, count);
    } else {
        int stored = ITEMSIZE[wire];
        uint64_t aligned[PIECE / 8];
        for (uint64_t done = 0; done < count;) {
            uint64_t now = count - done < PIECE / (unsigned)stored ? count - done : PIECE / (unsigned)stored;
            memcpy(aligned, from + done * stored, now * stored);
            widen_piece((const uint8_t *)aligned, wire, to + done * size, size, now);
            done += now;
        }
    }
}

/* Append `count` elements of dtype `code` as a body of dtype `wire`, at any alignment. */
static void store(const uint8_t *from, int code, uint8_t *to, int wire, uint64_t count) {
    int size = ITEMSIZE[code], stored = ITEMSIZE[wire];
    if (wire == BOOL) {
        pack_bits(from, size, to, count);
        return;
    }
    if (stored == size) {
        memcpy(to, from, count * size);
        return;
    }
    uint64_t aligned[PIECE / 8];
    for (uint64_t done = 0; done < count;) {
        uint64_t now = count - done < PIECE / (unsigned)stored ? count - done : PIECE / (unsigned)stored;
        const uint8_t *at = from + done * size;
        switch (size << 4 | stored) {
        case 8 << 4 | 1: narrow64_8((const uint64_t *)at, (uint8_t *)aligned, now); break;
        case 8 << 4 | 2: narrow64_16((const uint64_t *)at, (uint16_t *)aligned, now); break;
        case 8 << 4 | 4: narrow64_32((const uint64_t *)at, (uint32_t *)aligned, now); break;
        case 4 << 4 | 1: narrow32_8((const uint32_t *)at, (uint8_t *)aligned, now); break;
        case 4 << 4 | 2: narrow32_16((const uint32_t *)at, (uint16_t *)aligned, now); break;
        case 2 << 4 | 1: narrow16_8((const uint16_t *)at, (uint8_t *)aligned, now); break;
        }
        memcpy(to + done * stored, aligned, now * stored);
        done += now;
    }
}

/* ---------------------------------------------------------------------------------------------
 * msgpack: as much of it as headers have.
 */

typedef struct { uint8_t *at; size_t used, room; } Out;

static int out_room(Out *out, size_t more) {
    if (out->room - out->used >= more) return 0;
    size_t room = 2 * out->room + more + 256;
    uint8_t *at = PyMem_Realloc(out->at, room);
    if (!at) { PyErr_NoMemory(); return -1; }
    out->at = at;
    out->room = room;
    return 0;
}

static int out_bytes(Out *out, const void *data, size_t count) {
    if (out_room(out, count)) return -1;
    memcpy(out->at + out->used, data, count);
    out->used += count;
    return 0;
}

static int out_tagged(Out *out, uint8_t tag, uint64_t value, int bytes) {
    uint8_t packed[9] = {tag};
    for (int i = 0; i < bytes; i++) packed[1 + i] = (uint8_t)(value >> 8 * (bytes - 1 - i));
    return out_bytes(out, packed, 1 + (size_t)bytes);
}

static int out_unsigned(Out *out, uint64_t value) {
    if (value < 0x80) return out_tagged(out, (uint8_t)value, 0, 0);
    if (value <= UINT8_MAX) return out_tagged(out, 0xcc, value, 1);
    if (value <= UINT16_MAX) return out_tagged(out, 0xcd, value, 2);
    if (value <= UINT32_MAX) return out_tagged(out, 0xce, value, 4);
    return out_tagged(out, 0xcf, value, 8);
}

static int out_number(Out *out, uint64_t bits, bool is_negative_possible) {
    int64_t value = (int64_t)bits;
    if (!is_negative_possible || value >= 0) return out_unsigned(out, bits);
    if (value >= -32) return out_tagged(out, (uint8_t)value, 0, 0);
    if (value >= INT8_MIN) return out_tagged(out, 0xd0, bits, 1);
    if (value >= INT16_MIN) return out_tagged(out, 0xd1, bits, 2);
    if (value >= INT32_MIN) return out_tagged(out, 0xd2, bits, 4);
    return out_tagged(out, 0xd3, bits, 8);
}

static int out_array(Out *out, size_t count) {
    if (count < 16) return out_tagged(out, (uint8_t)(0x90 | count), 0, 0);
    if (count <= UINT16_MAX) return out_tagged(out, 0xdc, count, 2);
    return out_tagged(out, 0xdd, count, 4);
}

static int out_text(Out *out, const char *text, size_t count) {
    int failed;
    if (count < 32) failed = out_tagged(out, (uint8_t)(0xa0 | count), 0, 0);
    else if (count <= UINT8_MAX) failed = out_tagged(out, 0xd9, count, 1);
    else failed = out_tagged(out, 0xda, count, 2);
    return failed ? -1 : out_bytes(out, text, count);
}

typedef struct { const uint8_t *at, *end; } In;

typedef enum { NUMBER, NIL, ARRAY, OTHER, BROKEN } Kind;
typedef struct {
    Kind kind;
    bool negative;  /* of a number: its value is (int64_t)bits */
    uint64_t bits;  /* of an array: the elements that follow */
} Token;

/* Read one number, nil or array header; all else is OTHER and is not moved past. */
static Token read_token(In *in) {
    Token token = {BROKEN, false, 0};
    if (in->at >= in->end) return token;
    uint8_t tag = *in->at;
    int bytes = 0;
    bool is_number = false;
    if (tag < 0x80) { in->at++; token.kind = NUMBER; token.bits = tag; return token; }
    if (tag >= 0xe0) {
        in->at++;
        token.kind = NUMBER;
        token.negative = true;
        token.bits = (uint64_t)(int64_t)(int8_t)tag;
        return token;
    }
    if ((tag & 0xf0) == 0x90) { in->at++; token.kind = ARRAY; token.bits = tag & 15; return token; }
    switch (tag) {
    case 0xc0: in->at++; token.kind = NIL; return token;
    case 0xcc: case 0xd0: bytes = 1; is_number = true; break;
    case 0xcd: case 0xd1: bytes = 2; is_number = true; break;
    case 0xce: case 0xd2: bytes = 4; is_number = true; break;
    case 0xcf: case 0xd3: bytes = 8; is_number = true; break;
    case 0xdc: bytes = 2; break;
    case 0xdd: bytes = 4; break;
    default: token.kind = OTHER; return token;
    }
    if (in->end - in->at < 1 + bytes) return token;
    uint64_t bits = 0;
    for (int i = 1; i <= bytes; i++) bits = bits << 8 | in->at[i];
    in->at += 1 + bytes;
    token.kind = is_number ? NUMBER : ARRAY;
    if (is_number && tag >= 0xd0) {
        int unused = 64 - 8 * bytes;
        bits = (uint64_t)((int64_t)(bits << unused) >> unused);
        token.negative = (int64_t)bits < 0;
    }
    token.bits = bits;
    return token;
}

static bool in_range(const Token *token, uint64_t most) {
    return token->kind == NUMBER && !token->negative && token->bits <= most;
}

/* ---------------------------------------------------------------------------------------------
 * Encoding one group.
 */

typedef struct { uint64_t count; uint32_t sizes[MAX_RANK]; uint8_t rank; } Shape;

typedef struct {
    const uint8_t *at;    /* elements, NULL where the sample has none of this column */
    const uint8_t *body;  /* the same as the wire dtype where Python has rounded floats */
    uint32_t shape;
    uint64_t count, lead, trail, lead_value, trail_value;
    void *copies[2];      /* of elements and body, where their addresses are odd for their size */
} Cell;

typedef struct { PyObject *key; int code, wire; bool here; Cell *cells; } EncodedColumn;

typedef struct { Shape *all; uint32_t used, room; uint32_t *slots; uint32_t mask; } Shapes;

static uint64_t shape_hash(const Shape *shape) {
    uint64_t hash = shape->rank;
    for (int i = 0; i < shape->rank; i++) hash = (hash ^ shape->sizes[i]) * 0x9e3779b97f4a7c15ULL;
    return hash ^ hash >> 29;
}

static int shapes_grow(Shapes *shapes) {
    uint32_t room = shapes->room ? 2 * shapes->room : 16;
    Shape *all = PyMem_Realloc(shapes->all, room * sizeof(Shape));
    if (!all) { PyErr_NoMemory(); return -1; }
    shapes->all = all;
    uint32_t *slots = PyMem_Realloc(shapes->slots, 2 * room * sizeof(uint32_t));
    if (!slots) { PyErr_NoMemory(); return -1; }
    shapes->slots = slots;
    shapes->room = room;
    shapes->mask = 2 * room - 1;
    memset(slots, 0xff, 2 * room * sizeof(uint32_t));
    for (uint32_t i = 0; i < shapes->used; i++) {
        uint32_t slot = (uint32_t)shape_hash(&all[i]) & shapes->mask;
        while (slots[slot] != UINT32_MAX) slot = (slot + 1) & shapes->mask;
        slots[slot] = i;
    }
    return 0;
}

/* Return the place of a shape among those of the group, in the order of their first use. */
static int64_t shape_place(Shapes *shapes, const Shape *shape) {
    if (shapes->used == shapes->room && shapes_grow(shapes)) return -1;
    uint32_t slot = (uint32_t)shape_hash(shape) & shapes->mask;
    for (; shapes->slots[slot] != UINT32_MAX; slot = (slot + 1) & shapes->mask) {
        const Shape *other = &shapes->all[shapes->slots[slot]];
        if (other->rank == shape->rank &&
            !memcmp(other->sizes, shape->sizes, shape->rank * sizeof(uint32_t)))
            return shapes->slots[slot];
    }
    shapes->slots[slot] = shapes->used;
    shapes->all[shapes->used] = *shape;
    return shapes->used++;
}

static int shape_from(PyObject *sizes, Shape *shape) {
    if (!PyTuple_Check(sizes) || PyTuple_GET_SIZE(sizes) > MAX_RANK) {
        PyErr_SetString(PyExc_ValueError, "a shape is a tuple of at most 8 ints");
        return -1;
    }
    shape->rank = (uint8_t)PyTuple_GET_SIZE(sizes);
    shape->count = 1;
    uint64_t room = 1;
    for (int i = 0; i < shape->rank; i++) {
        uint64_t size = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(sizes, i));
        if (size == (uint64_t)-1 && PyErr_Occurred()) return -1;
        if (size > MAX_ELEMENTS) {
            PyErr_SetString(PyExc_ValueError, "a shape is too large");
            return -1;
        }
        shape->sizes[i] = (uint32_t)size;
        shape->count *= size;
        room *= size ? size : 1;
        if (room > MAX_ELEMENTS) {
            PyErr_SetString(PyExc_ValueError, "a shape is too large");
            return -1;
        }
    }
    return 0;
}

static void find_runs(Cell *cell, int code) {
    uint64_t count = cell->count;
    if (count < MIN_RUN) return;
    cell->lead = leading(cell->at, code, count);
    if (cell->lead < MIN_RUN) cell->lead = 0;
    if (cell->lead) cell->lead_value = run_value(cell->at, code, 0);
    if (cell->lead == count) return;
    cell->trail = trailing(cell->at, code, count);
    if (cell->trail < MIN_RUN) cell->trail = 0;
    if (cell->trail) cell->trail_value = run_value(cell->at, code, count - 1);
}

/* Loops need elements at multiples of their size, which memory that torch borrowed may not have. */
static int align(const uint8_t **at, int size, uint64_t count, void **copy) {
    if ((uintptr_t)*at % (unsigned)size == 0) return 0;
    *copy = PyMem_Malloc(count * size + 1);
    if (!*copy) { PyErr_NoMemory(); return -1; }
    memcpy(*copy, *at, count * size);
    *at = *copy;
    return 0;
}

/* Read what Python says of one column: (key, code, wire or -1, [None or (address, shape[, address])]). */
static int column_from(PyObject *given, Py_ssize_t samples, EncodedColumn *column, Shapes *shapes) {
    PyObject *key, *cells;
    if (!PyArg_ParseTuple(given, "OiiO!", &key, &column->code, &column->wire, &PyList_Type, &cells))
        return -1;
    column->key = key;
    if (column->code < 0 || column->code >= CODES || column->wire >= CODES ||
        PyList_GET_SIZE(cells) != samples) {
        PyErr_SetString(PyExc_ValueError, "a column has an unknown dtype, or too few samples");
        return -1;
    }
    for (Py_ssize_t i = 0; i < samples; i++) {
        PyObject *given_cell = PyList_GET_ITEM(cells, i);
        Cell *cell = &column->cells[i];
        if (given_cell == Py_None) continue;
        if (!PyTuple_Check(given_cell) || PyTuple_GET_SIZE(given_cell) < 2) {
            PyErr_SetString(PyExc_TypeError, "a sample is None or (address, shape)");
            return -1;
        }
        cell->at = PyLong_AsVoidPtr(PyTuple_GET_ITEM(given_cell, 0));
        if (!cell->at && PyErr_Occurred()) return -1;
        Shape shape;
        if (shape_from(PyTuple_GET_ITEM(given_cell, 1), &shape)) return -1;
        int64_t place = shape_place(shapes, &shape);
        if (place < 0) return -1;
        cell->shape = (uint32_t)place;
        cell->count = shape.count;
        if (!cell->at) cell->at = (const uint8_t *)column; /* torch gives 0 for what has no elements */
        if (align(&cell->at, ITEMSIZE[column->code], cell->count, &cell->copies[0])) return -1;
        cell->body = cell->at;
        if (PyTuple_GET_SIZE(given_cell) > 2) {
            cell->body = PyLong_AsVoidPtr(PyTuple_GET_ITEM(given_cell, 2));
            if (!cell->body && PyErr_Occurred()) return -1;
            if (column->wire < 0) { PyErr_SetString(PyExc_ValueError, "rounded as what?"); return -1; }
            if (align(&cell->body, ITEMSIZE[column->wire], cell->count, &cell->copies[1])) return -1;
        }
        column->here = true;
    }
    return 0;
}

/* Find runs and the wire dtype of one column. */
static void measure(EncodedColumn *column, Py_ssize_t samples) {
    Range range = {0, 0};
    bool empty = true;
    for (Py_ssize_t i = 0; i < samples; i++) {
        Cell *cell = &column->cells[i];
        if (!cell->at) continue;
        find_runs(cell, column->code);
        uint64_t count = cell->count - cell->lead - cell->trail;
        if (!count) continue;
        empty = false;
        const uint8_t *at = cell->at + cell->lead * ITEMSIZE[column->code];
        if (!is_integer(column->code)) continue;
        switch (ITEMSIZE[column->code]) {
        case 1: range8(at, count, &range); break;
        case 2: range16((const uint16_t *)at, count, &range); break;
        case 4: range32((const uint32_t *)at, count, &range); break;
        default: range64((const uint64_t *)at, count, &range);
        }
    }
    if (column->wire < 0)
        column->wire = column->code == BOOL || is_integer(column->code)
                           ? narrowest(column->code, &range, empty) : column->code;
}

enum { REF, LEAD, LEAD_VALUE, TRAIL, TRAIL_VALUE };

static uint64_t part_of(const Cell *cell, int part) {
    switch (part) {
    case REF: return cell->at ? cell->shape : MISSING;
    case LEAD: return cell->lead;
    case LEAD_VALUE: return cell->lead_value;
    case TRAIL: return cell->trail;
    default: return cell->trail_value;
    }
}

/* Write one part of a column's entry: one value if all samples have the same, else all. */
static int out_part(Out *out, const EncodedColumn *column, Py_ssize_t samples, int part, bool *all) {
    bool sign = is_signed(column->code) && (part == LEAD_VALUE || part == TRAIL_VALUE);
    uint64_t first = part_of(&column->cells[0], part);
    Py_ssize_t last = 0;
    for (Py_ssize_t i = 1; i < samples; i++)
        if (part_of(&column->cells[i], part) != first) { last = samples - 1; break; }
    if (all) *all = last > 0;
    if (last && out_array(out, (size_t)samples)) return -1;
    for (Py_ssize_t i = 0; i <= last; i++) {
        uint64_t value = part_of(&column->cells[i], part);
        if (part == REF && value == MISSING ? out_tagged(out, 0xc0, 0, 0) : out_number(out, value, sign))
            return -1;
    }
    return 0;
}

static int out_entry(Out *out, const EncodedColumn *column, Py_ssize_t samples) {
    int parts = 1;
    bool uneven = false;
    for (Py_ssize_t i = 0; i < samples; i++) {
        const Cell *cell = &column->cells[i];
        if (cell->trail) { parts = 5; break; }
        if (cell->lead) parts = 3;
    }
    if (parts == 1) { /* an int alone, unless the samples differ in shape */
        size_t start = out->used;
        if (out_room(out, 1)) return -1;
        out->used++;
        if (out_part(out, column, samples, REF, &uneven)) return -1;
        if (uneven) {
            out->at[start] = 0x91;
        } else {
            memmove(out->at + start, out->at + start + 1, out->used - start - 1);
            out->used--;
        }
        return 0;
    }
    if (out_array(out, (size_t)parts)) return -1;
    for (int part = 0; part < parts; part++)
        if (out_part(out, column, samples, part, NULL)) return -1;
    return 0;
}

static int out_schema(Out *out, const EncodedColumn *columns, Py_ssize_t count, Py_ssize_t here) {
    if (out_array(out, (size_t)here)) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        const EncodedColumn *column = &columns[i];
        if (!column->here) continue;
        if (out_array(out, 3)) return -1;
        if (PyLong_Check(column->key)) {
            if (out_unsigned(out, PyLong_AsUnsignedLongLong(column->key))) return -1;
        } else {
            Py_ssize_t size;
            const char *name = PyUnicode_AsUTF8AndSize(column->key, &size);
            if (!name || out_text(out, name, (size_t)size)) return -1;
        }
        if (out_unsigned(out, (uint64_t)column->code) || out_unsigned(out, (uint64_t)column->wire))
            return -1;
    }
    if (out->used > MAX_SCHEMA_BYTES) {
        PyErr_SetString(EncodeError, "the names in `tensors` are too long: shorten them.");
        return -1;
    }
    return 0;
}

static int out_header(Out *out, const EncodedColumn *columns, Py_ssize_t count, Py_ssize_t here,
                      Py_ssize_t samples, const Shapes *shapes, const Py_buffer *tail, size_t tails) {
    if (out_array(out, 3 + tails) || out_unsigned(out, (uint64_t)samples) ||
        out_array(out, (size_t)here))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (columns[i].here && out_entry(out, &columns[i], samples)) return -1;
    if (out_array(out, shapes->used)) return -1;
    for (uint32_t i = 0; i < shapes->used; i++) {
        if (out_array(out, shapes->all[i].rank)) return -1;
        for (int k = 0; k < shapes->all[i].rank; k++)
            if (out_unsigned(out, shapes->all[i].sizes[k])) return -1;
    }
    return out_bytes(out, tail->buf, (size_t)tail->len);
}

static void write_bodies(const EncodedColumn *columns, Py_ssize_t count, Py_ssize_t samples, uint8_t *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        const EncodedColumn *column = &columns[i];
        if (!column->here) continue;
        for (Py_ssize_t k = 0; k < samples; k++) {
            const Cell *cell = &column->cells[k];
            uint64_t body = cell->count - cell->lead - cell->trail;
            if (!cell->at || !body) continue;
            bool rounded = cell->body != cell->at;
            int code = rounded ? column->wire : column->code;
            store(cell->body + cell->lead * ITEMSIZE[code], code, to, column->wire, body);
            to += body_bytes(column->wire, body);
        }
    }
}

/* Put the sections together; returns the blob. */
static PyObject *join(const EncodedColumn *columns, Py_ssize_t count, Py_ssize_t samples, Out *schema,
                      Out *header, const Py_buffer *extras) {
    uint64_t bodies = 0, decoded = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        for (Py_ssize_t k = 0; columns[i].here && k < samples; k++) {
            const Cell *cell = &columns[i].cells[k];
            if (!cell->at) continue;
            bodies += body_bytes(columns[i].wire, cell->count - cell->lead - cell->trail);
            decoded += cell->count * ITEMSIZE[columns[i].code];
        }
    size_t head = PREFIX_BYTES + schema->used + header->used + (size_t)extras->len;
    if (head + bodies > MAX_BLOB_BYTES)
        return PyErr_Format(EncodeError, "a group has %llu bytes, the limit is %llu: put smaller groups.",
                            (unsigned long long)(head + bodies), (unsigned long long)MAX_BLOB_BYTES);
    if (decoded > DECODED_BYTES + DECODED_PER_BYTE * (head + bodies))
        return PyErr_Format(EncodeError,
                            "a group of %llu bytes is little but runs of one value, %llu bytes packed: "
                            "cut its padding off before putting it.",
                            (unsigned long long)decoded, (unsigned long long)(head + bodies));
    PyObject *blob = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(head + bodies));
    if (!blob) return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(blob);
    uint16_t schema_bytes = (uint16_t)schema->used;
    uint32_t header_bytes = (uint32_t)header->used, extras_bytes = (uint32_t)extras->len;
    memcpy(at, "RDRB\1\0", 6);
    memcpy(at + 6, &schema_bytes, 2);
    memcpy(at + 8, &header_bytes, 4);
    memcpy(at + 12, &extras_bytes, 4);
    at += PREFIX_BYTES;
    memcpy(at, schema->at, schema->used);
    at += schema->used;
    memcpy(at, header->at, header->used);
    at += header->used;
    memcpy(at, extras->buf, (size_t)extras->len);
    at += extras->len;
    if (bodies < RELEASE_BYTES) {
        write_bodies(columns, count, samples, at);
    } else {
        Py_BEGIN_ALLOW_THREADS
        write_bodies(columns, count, samples, at);
        Py_END_ALLOW_THREADS
    }
    return blob;
}

static PyObject *encode(PyObject *module, PyObject *args) {
    Py_ssize_t samples, tails;
    PyObject *given, *blob = NULL;
    Py_buffer tail, extras;
    (void)module;
    if (!PyArg_ParseTuple(args, "nO!ny*y*", &samples, &PyList_Type, &given, &tails, &tail, &extras))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(given), here = 0;
    Out schema = {0}, header = {0};
    Shapes shapes = {0};
    EncodedColumn *columns = NULL;
    Cell *cells = NULL;
    if (samples < 1 || samples > MAX_SAMPLES || count > 4096 || tails < 0 || tails > 4) {
        PyErr_SetString(PyExc_ValueError, "too many samples or columns");
        goto done;
    }
    columns = PyMem_Calloc((size_t)count + 1, sizeof(EncodedColumn));
    cells = PyMem_Calloc((size_t)(count * samples) + 1, sizeof(Cell));
    if (!columns || !cells) { PyErr_NoMemory(); goto done; }
    for (Py_ssize_t i = 0; i < count; i++) {
        columns[i].cells = cells + i * samples;
        if (column_from(PyList_GET_ITEM(given, i), samples, &columns[i], &shapes)) goto done;
        here += columns[i].here;
    }
    uint64_t elements = 0;
    for (Py_ssize_t i = 0; i < count * samples; i++) elements += cells[i].count;
    PyThreadState *released = elements * 4 < RELEASE_BYTES ? NULL : PyEval_SaveThread();
    for (Py_ssize_t i = 0; i < count; i++)
        if (columns[i].here) measure(&columns[i], samples);
    if (released) PyEval_RestoreThread(released);
    if (out_schema(&schema, columns, count, here) ||
        out_header(&header, columns, count, here, samples, &shapes, &tail, (size_t)tails))
        goto done;
    if (header.used > MAX_HEADER_BYTES) {
        PyErr_Format(EncodeError, "a group's header has %zu bytes, the limit is %d: use fewer tags or "
                     "put smaller groups.", header.used, MAX_HEADER_BYTES);
        goto done;
    }
    blob = join(columns, count, samples, &schema, &header, &extras);
done:
    for (Py_ssize_t i = 0; cells && i < count * samples; i++) {
        PyMem_Free(cells[i].copies[0]);
        PyMem_Free(cells[i].copies[1]);
    }
    PyMem_Free(columns);
    PyMem_Free(cells);
    PyMem_Free(shapes.all);
    PyMem_Free(shapes.slots);
    PyMem_Free(schema.at);
    PyMem_Free(header.at);
    PyBuffer_Release(&tail);
    PyBuffer_Release(&extras);
    return blob;
}

/* ---------------------------------------------------------------------------------------------
 * Reading one group: all of its header is checked here, before anything is decoded.
 */

typedef struct {
    uint64_t count, lead, trail, lead_value, trail_value, start; /* count: elements of the body */
    uint32_t shape;
} Piece;

typedef struct {
    int code, wire;
    uint64_t step;  /* bytes from one sample's body to the next, where all samples are alike */
    Piece *pieces;  /* one for each sample, or NULL where `one` is that of all */
    Piece one;
} Column;

typedef struct {
    PyObject_HEAD
    Py_buffer blob;
    PyObject *fields, *version, *tail;
    Py_ssize_t samples, tails, extras_at, body_at;
    uint64_t decoded;
    Shape *shapes;
    uint32_t shape_count;
    Py_ssize_t column_count;
    Column *columns;
} Group;

static PyTypeObject GroupType;

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

static bool is_run_value(int code, const Token *token) {
    if (token->kind != NUMBER) return false;
    if (code == BOOL) return !token->negative && token->bits <= 1;
    int bits = 8 * ITEMSIZE[code];
    if (is_signed(code)) {
        int64_t most = (int64_t)(UINT64_MAX >> (65 - bits)), value = (int64_t)token->bits;
        return token->negative ? value >= -most - 1 : token->bits <= (uint64_t)most;
    }
    return !token->negative && token->bits <= UINT64_MAX >> (64 - bits);
}

static int set_part(Piece *piece, int part, int code, const Token *token) {
    switch (part) {
    case REF:
        if (token->kind == NIL) { piece->shape = MISSING; return 0; }
        if (!in_range(token, MISSING - 1)) return malformed("a column refers to no shape");
        piece->shape = (uint32_t)token->bits;
        return 0;
    case LEAD: case TRAIL:
        if (!in_range(token, MAX_ELEMENTS)) return malformed("a column has a run of no length");
        *(part == LEAD ? &piece->lead : &piece->trail) = token->bits;
        return 0;
    default:
        if (!is_run_value(code, token)) return malformed("a run has a value that its dtype lacks");
        *(part == LEAD_VALUE ? &piece->lead_value : &piece->trail_value) = token->bits;
        return 0;
    }
}

static int read_part(In *in, Column *column, Py_ssize_t samples, int part) {
    Token token = read_token(in);
    if (token.kind != ARRAY) {
        if (set_part(&column->one, part, column->code, &token)) return -1;
        for (Py_ssize_t i = 0; column->pieces && i < samples; i++)
            if (set_part(&column->pieces[i], part, column->code, &token)) return -1;
        return 0;
    }
    if (samples == 1 || token.bits != (uint64_t)samples || in->end - in->at < samples)
        return malformed("a list in a column's entry has not one element a sample");
    if (!column->pieces) {
        column->pieces = PyMem_Malloc((size_t)samples * sizeof(Piece));
        if (!column->pieces) { PyErr_NoMemory(); return -1; }
        for (Py_ssize_t i = 0; i < samples; i++) column->pieces[i] = column->one;
    }
    for (Py_ssize_t i = 0; i < samples; i++) {
        token = read_token(in);
        if (set_part(&column->pieces[i], part, column->code, &token)) return -1;
    }
    return 0;
}

static int read_entry(In *in, Column *column, Py_ssize_t samples) {
    In ahead = *in;
    Token token = read_token(&ahead);
    if (token.kind == NUMBER) return in->at = ahead.at, set_part(&column->one, REF, column->code, &token);
    if (token.kind != ARRAY || token.bits < 1 || token.bits > 5)
        return malformed("a column is placed by neither a shape nor a short list");
    in->at = ahead.at;
    for (int part = 0; part < (int)token.bits; part++)
        if (read_part(in, column, samples, part)) return -1;
    return 0;
}

static int read_shape(In *in, Shape *shape) {
    Token token = read_token(in);
    uint64_t room = 1;
    if (token.kind != ARRAY || token.bits > MAX_RANK) return malformed("a shape is no short list");
    *shape = (Shape){.count = 1, .rank = (uint8_t)token.bits};
    for (int i = 0; i < shape->rank; i++) {
        token = read_token(in);
        if (!in_range(&token, MAX_ELEMENTS)) return malformed("a dimension is out of range");
        shape->sizes[i] = (uint32_t)token.bits;
        shape->count *= token.bits;
        room *= token.bits ? token.bits : 1;
        if (room > MAX_ELEMENTS) return malformed("a shape is too large");
    }
    return 0;
}

static int read_shapes(In *in, Group *group) {
    Token token = read_token(in);
    uint32_t room = 0;
    if (token.kind != ARRAY) return malformed("its shapes are no list");
    for (uint64_t i = 0; i < token.bits; i++) {
        if (group->shape_count == room) {
            room = room ? 2 * room : 4;
            Shape *shapes = PyMem_Realloc(group->shapes, room * sizeof(Shape));
            if (!shapes) { PyErr_NoMemory(); return -1; }
            group->shapes = shapes;
        }
        if (read_shape(in, &group->shapes[group->shape_count])) return -1;
        group->shape_count++;
    }
    return 0;
}

/* Place one sample's body at `*end`. Returns the bytes of its decoded elements in `decoded`. */
static int place(const Group *group, const Column *column, Piece *piece, uint64_t *end, uint64_t *decoded) {
    piece->start = *end;
    *decoded = 0;
    if (piece->shape == MISSING) return 0;
    if (piece->shape >= group->shape_count) return malformed("a column refers to a shape that is not there");
    uint64_t count = group->shapes[piece->shape].count;
    *decoded = count * ITEMSIZE[column->code];
    if (piece->lead > count || piece->trail > count - piece->lead)
        return malformed("a column has runs longer than its shape");
    piece->count = count - piece->lead - piece->trail;
    *end += body_bytes(column->wire, piece->count);
    return 0;
}

static int place_all(Group *group) {
    uint64_t end = (uint64_t)group->body_at, one;
    for (Py_ssize_t i = 0; i < group->column_count; i++) {
        Column *column = &group->columns[i];
        if (!column->pieces) {
            uint64_t start = end;
            if (place(group, column, &column->one, &end, &one)) return -1;
            column->step = end - start;
            end = start + column->step * (uint64_t)group->samples;
            group->decoded += one * (uint64_t)group->samples;
        }
        for (Py_ssize_t k = 0; column->pieces && k < group->samples; k++) {
            if (place(group, column, &column->pieces[k], &end, &one)) return -1;
            group->decoded += one;
        }
    }
    if (end != (uint64_t)group->blob.len) return malformed("its columns do not end where it ends");
    if (group->decoded > DECODED_BYTES + DECODED_PER_BYTE * (uint64_t)group->blob.len)
        return malformed("it says that it decodes to much more than its bytes");
    return 0;
}

/* Keep the header's elements from the fourth on; the most common, one policy version, is read here. */
static int read_tail(In *in, Group *group) {
    if (group->tails == 0 && in->at != in->end) return malformed("something follows its header");
    if (group->tails == 1) {
        In ahead = *in;
        Token token = read_token(&ahead);
        bool fits = token.negative || token.bits <= INT64_MAX;
        if (token.kind == NUMBER && fits && ahead.at == ahead.end) {
            group->version = PyLong_FromLongLong((int64_t)token.bits);
            return group->version ? 0 : -1;
        }
    }
    group->tail = PyBytes_FromStringAndSize((const char *)in->at, in->end - in->at);
    return group->tail ? 0 : -1;
}

static int read_header(In *in, Group *group, const uint8_t *codes) {
    Token list = read_token(in), samples = read_token(in), columns = read_token(in);
    if (list.kind != ARRAY || list.bits < 3) return malformed("its header is no list of at least three");
    if (!in_range(&samples, MAX_SAMPLES) || !samples.bits) return malformed("it has an odd number of samples");
    if (columns.kind != ARRAY || columns.bits != (uint64_t)group->column_count)
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

/* Find the sections of a blob. Returns where the header begins, or -1. */
static Py_ssize_t find_sections(Group *group) {
    const uint8_t *at = group->blob.buf;
    uint16_t schema;
    uint32_t header, extras;
    if (group->blob.len < PREFIX_BYTES || (uint64_t)group->blob.len > MAX_BLOB_BYTES)
        return PyErr_Format(DecodeError, "not a valid group: it has %zd bytes", group->blob.len), -1;
    if (memcmp(at, "RDRB", 4)) return malformed("it does not start with RDRB");
    if (at[4] != 1 || at[5])
        return PyErr_Format(DecodeError, "not a valid group: it is written in version %d with flags %d, and "
                            "only version 1 without flags is known here: upgrade redrb", at[4], at[5]), -1;
    memcpy(&schema, at + 6, 2);
    memcpy(&header, at + 8, 4);
    memcpy(&extras, at + 12, 4);
    uint64_t body = (uint64_t)PREFIX_BYTES + schema + header + extras;
    if (header > MAX_HEADER_BYTES || extras > MAX_EXTRAS_BYTES || body > (uint64_t)group->blob.len)
        return malformed("its header or extras are longer than allowed");
    group->extras_at = PREFIX_BYTES + schema + (Py_ssize_t)header;
    group->body_at = (Py_ssize_t)body;
    return PREFIX_BYTES + schema;
}

/* parse(blob, lookup) -> Group; lookup(schema) -> (fields, two bytes of dtype and wire a column). */
static PyObject *parse(PyObject *module, PyObject *args) {
    PyObject *blob, *lookup, *schema = NULL, *found = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &blob, &lookup)) return NULL;
    Group *group = PyObject_New(Group, &GroupType);
    if (!group) return NULL;
    memset((char *)group + offsetof(Group, blob), 0, sizeof(Group) - offsetof(Group, blob));
    if (PyObject_GetBuffer(blob, &group->blob, PyBUF_SIMPLE)) goto failed;
    Py_ssize_t header_at = find_sections(group);
    if (header_at < 0) goto failed;
    const char *start = group->blob.buf;
    schema = PyBytes_FromStringAndSize(start + PREFIX_BYTES, header_at - PREFIX_BYTES);
    if (!schema) goto failed;
    found = PyObject_CallOneArg(lookup, schema);
    if (!found) goto failed;
    PyObject *fields, *codes;
    if (!PyArg_ParseTuple(found, "O!S", &PyTuple_Type, &fields, &codes)) goto failed;
    group->column_count = PyTuple_GET_SIZE(fields);
    if (PyBytes_GET_SIZE(codes) != 2 * group->column_count) {
        PyErr_SetString(PyExc_ValueError, "two codes a column are needed");
        goto failed;
    }
    group->fields = Py_NewRef(fields);
    group->columns = PyMem_Calloc((size_t)group->column_count + 1, sizeof(Column));
    if (!group->columns) { PyErr_NoMemory(); goto failed; }
    In in = {(const uint8_t *)start + header_at, (const uint8_t *)start + group->extras_at};
    if (read_header(&in, group, (const uint8_t *)PyBytes_AS_STRING(codes))) goto failed;
    Py_DECREF(schema);
    Py_DECREF(found);
    return (PyObject *)group;
failed:
    Py_XDECREF(schema);
    Py_XDECREF(found);
    Py_DECREF(group);
    return NULL;
}

static void group_dealloc(PyObject *self) {
    Group *group = (Group *)self;
    for (Py_ssize_t i = 0; group->columns && i < group->column_count; i++)
        PyMem_Free(group->columns[i].pieces);
    PyMem_Free(group->columns);
    PyMem_Free(group->shapes);
    Py_XDECREF(group->fields);
    Py_XDECREF(group->version);
    Py_XDECREF(group->tail);
    if (group->blob.obj) PyBuffer_Release(&group->blob);
    PyObject_Free(self);
}

/* ---------------------------------------------------------------------------------------------
 * Decoding.
 */

static void write_piece(const Group *group, const Column *column, const Piece *piece, uint8_t *to) {
    int size = ITEMSIZE[column->code];
    const uint8_t *body = (const uint8_t *)group->blob.buf + piece->start;
    if (piece->lead) repeat(to, size, piece->lead_value, piece->lead);
    to += piece->lead * size;
    if (piece->count) convert(body, column->wire, to, column->code, piece->count);
    to += piece->count * size;
    if (piece->trail) repeat(to, size, piece->trail_value, piece->trail);
}

static PyObject *shape_tuple(const Shape *shape) {
    PyObject *tuple = PyTuple_New(shape->rank);
    for (int i = 0; tuple && i < shape->rank; i++) {
        PyObject *size = PyLong_FromUnsignedLong(shape->sizes[i]);
        if (!size) { Py_DECREF(tuple); return NULL; }
        PyTuple_SET_ITEM(tuple, i, size);
    }
    return tuple;
}

static Column *column_at(Group *group, Py_ssize_t index) {
    if (index >= 0 && index < group->column_count) return &group->columns[index];
    PyErr_SetString(PyExc_IndexError, "there is no such column");
    return NULL;
}

/* shapes(column) -> the shape of each sample, None where it has none of this column */
static PyObject *group_shapes(PyObject *self, PyObject *args) {
    Group *group = (Group *)self;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "n", &index)) return NULL;
    Column *column = column_at(group, index);
    PyObject *list = column ? PyList_New(group->samples) : NULL;
    for (Py_ssize_t i = 0; list && i < group->samples; i++) {
        Piece piece = piece_of(column, i);
        PyObject *shape = piece.shape == MISSING ? Py_NewRef(Py_None) : shape_tuple(&group->shapes[piece.shape]);
        if (!shape) { Py_DECREF(list); return NULL; }
        PyList_SET_ITEM(list, i, shape);
    }
    return list;
}

/* runs(column) -> (stored, lead, lead value, trail, trail value) of each sample; None where it has none */
static PyObject *group_runs(PyObject *self, PyObject *args) {
    Group *group = (Group *)self;
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "n", &index)) return NULL;
    Column *column = column_at(group, index);
    PyObject *list = column ? PyList_New(group->samples) : NULL;
    for (Py_ssize_t i = 0; list && i < group->samples; i++) {
        Piece p = piece_of(column, i);
        bool sign = is_signed(column->code);
        PyObject *runs = p.shape == MISSING ? Py_NewRef(Py_None)
                      : Py_BuildValue(sign ? "KKLKL" : "KKKKK", p.count, p.lead, p.lead_value, p.trail,
                                      p.trail_value);
        if (!runs) { Py_DECREF(list); return NULL; }
        PyList_SET_ITEM(list, i, runs);
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
    if (row < 0 || row >= group->samples) {
        PyErr_SetString(PyExc_IndexError, "there is no such sample");
        return NULL;
    }
    Piece piece = piece_of(column, row);
    if (piece.shape == MISSING || group->shapes[piece.shape].count * ITEMSIZE[column->code] != nbytes) {
        PyErr_SetString(PyExc_ValueError, "the memory has another size than the sample");
        return NULL;
    }
    write_piece(group, column, &piece, (uint8_t *)(uintptr_t)address);
    Py_RETURN_NONE;
}

static PyObject *group_get(PyObject *self, void *what) {
    Group *group = (Group *)self;
    PyObject *found = NULL;
    switch ((intptr_t)what) {
    case 0: return PyLong_FromSsize_t(group->samples);
    case 1: return PyLong_FromUnsignedLongLong(group->decoded);
    case 2: found = group->fields; break;
    case 3: found = group->version; break;
    case 4: found = group->tail; break;
    case 5: return PyLong_FromSsize_t(group->tails);
    default:
        return PyBytes_FromStringAndSize((const char *)group->blob.buf + group->extras_at,
                                         group->body_at - group->extras_at);
    }
    return Py_NewRef(found ? found : Py_None);
}

static PyGetSetDef group_getset[] = {
    {"samples", group_get, NULL, "samples in the group", (void *)0},
    {"decoded_bytes", group_get, NULL, "bytes of all its tensors", (void *)1},
    {"fields", group_get, NULL, "its columns, as `lookup` gave them", (void *)2},
    {"version", group_get, NULL, "policy version of all samples, where nothing else follows", (void *)3},
    {"tail", group_get, NULL, "msgpack of the header's further elements, where there are others", (void *)4},
    {"tails", group_get, NULL, "how many elements these are", (void *)5},
    {"extras", group_get, NULL, "msgpack of the extras", (void *)6},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef group_methods[] = {
    {"shapes", group_shapes, METH_VARARGS, "shape of each sample of a column; None where there is none"},
    {"runs", group_runs, METH_VARARGS, "stored elements and runs of each sample of a column"},
    {"read", group_read, METH_VARARGS, "decode one sample of a column to an address"},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject GroupType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "redrb.codec._core.Group",
    .tp_basicsize = sizeof(Group),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = group_dealloc,
    .tp_getset = group_getset,
    .tp_methods = group_methods,
    .tp_doc = "One blob, checked in full, and where everything in it lies.",
};

/* One column of many groups: (groups, index of the column in each, -1 where a group has none). */
typedef struct { Py_ssize_t count; Group **groups; Py_ssize_t *indices; Py_ssize_t rows; } Stack;

static void stack_free(Stack *stack) {
    for (Py_ssize_t i = 0; stack->groups && i < stack->count; i++) Py_XDECREF(stack->groups[i]);
    PyMem_Free(stack->groups);
    PyMem_Free(stack->indices);
}

static int stack_from(PyObject *groups, PyObject *indices, Stack *stack) {
    *stack = (Stack){0};
    Py_ssize_t count = PyList_GET_SIZE(groups);
    if (PyList_GET_SIZE(indices) != count) {
        PyErr_SetString(PyExc_ValueError, "one column a group is needed");
        return -1;
    }
    stack->groups = PyMem_Calloc((size_t)count + 1, sizeof(Group *));
    stack->indices = PyMem_Calloc((size_t)count + 1, sizeof(Py_ssize_t));
    if (!stack->groups || !stack->indices) { PyErr_NoMemory(); goto failed; }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *group = PyList_GET_ITEM(groups, i);
        if (!Py_IS_TYPE(group, &GroupType)) {
            PyErr_SetString(PyExc_TypeError, "a group is needed");
            goto failed;
        }
        Py_ssize_t index = PyLong_AsSsize_t(PyList_GET_ITEM(indices, i));
        if (index == -1 && PyErr_Occurred()) goto failed;
        if (index >= ((Group *)group)->column_count) {
            PyErr_SetString(PyExc_IndexError, "there is no such column");
            goto failed;
        }
        stack->groups[i] = (Group *)Py_NewRef(group);
        stack->indices[i] = index;
        stack->count = i + 1;
        stack->rows += ((Group *)group)->samples;
    }
    return 0;
failed:
    stack_free(stack);
    return -1;
}

/* Return the shape of a sample, NULL where there is none. */
static const Shape *shape_in(const Stack *stack, Py_ssize_t group, Py_ssize_t row) {
    if (stack->indices[group] < 0) return NULL;
    const Group *in_group = stack->groups[group];
    Piece piece = piece_of(&in_group->columns[stack->indices[group]], row);
    return piece.shape == MISSING ? NULL : &in_group->shapes[piece.shape];
}

/* extent(groups, indices) -> (first shape, longest first dimension, all alike,
 *                             first row of another kind or -1, its shape, first row that lacks it or -1) */
static PyObject *extent(PyObject *module, PyObject *args) {
    PyObject *groups, *indices;
    Stack stack;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &groups, &PyList_Type, &indices)) return NULL;
    if (stack_from(groups, indices, &stack)) return NULL;
    const Shape *first = NULL, *odd = NULL;
    Py_ssize_t row = 0, missing = -1, odd_row = -1;
    uint32_t longest = 0;
    bool alike = true;
    for (Py_ssize_t i = 0; i < stack.count; i++)
        for (Py_ssize_t k = 0; k < stack.groups[i]->samples; k++, row++) {
            const Shape *shape = shape_in(&stack, i, k);
            if (!shape) { if (missing < 0) missing = row; continue; }
            if (!first) first = shape;
            if (shape->rank && shape->sizes[0] > longest) longest = shape->sizes[0];
            if (shape->rank != first->rank ||
                (shape->rank > 1 && memcmp(shape->sizes + 1, first->sizes + 1,
                                           (size_t)(shape->rank - 1) * sizeof(uint32_t)))) {
                if (!odd) { odd = shape; odd_row = row; }
                alike = false;
            } else if (shape->rank && shape->sizes[0] != first->sizes[0]) {
                alike = false;
            }
        }
    PyObject *one = first ? shape_tuple(first) : Py_NewRef(Py_None);
    PyObject *two = one ? (odd ? shape_tuple(odd) : Py_NewRef(Py_None)) : NULL;
    PyObject *found = two ? Py_BuildValue("OkOnOn", one, (unsigned long)longest, alike ? Py_True : Py_False,
                                          odd_row, two, missing) : NULL;
    Py_XDECREF(one);
    Py_XDECREF(two);
    stack_free(&stack);
    return found;
}

/* lengths(groups, indices) -> the first dimension of each row; 0 where it has none */
static PyObject *lengths(PyObject *module, PyObject *args) {
    PyObject *groups, *indices;
    Stack stack;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &groups, &PyList_Type, &indices)) return NULL;
    if (stack_from(groups, indices, &stack)) return NULL;
    PyObject *list = PyList_New(stack.rows);
    Py_ssize_t row = 0;
    for (Py_ssize_t i = 0; list && i < stack.count; i++)
        for (Py_ssize_t k = 0; k < stack.groups[i]->samples; k++, row++) {
            const Shape *shape = shape_in(&stack, i, k);
            PyObject *length = PyLong_FromUnsignedLong(shape && shape->rank ? shape->sizes[0] : 0);
            if (!length) { Py_CLEAR(list); break; }
            PyList_SET_ITEM(list, row, length);
        }
    stack_free(&stack);
    return list;
}

typedef struct { uint8_t *to; int code; uint64_t row_elements, filler, one; const uint64_t *ones; bool left; } Goal;

/* Write a row of `held` elements and its padding. Returns where the elements go. */
static uint8_t *pad(const Goal *goal, uint8_t *row, uint64_t held) {
    uint64_t size = ITEMSIZE[goal->code], rest = goal->row_elements - held;
    if (!rest) return row;
    repeat(goal->left ? row : row + held * size, (int)size, goal->filler, rest);
    return goal->left ? row + rest * size : row;
}

static void fill_rows(const Stack *stack, const Goal *goal) {
    uint64_t row_bytes = goal->row_elements * ITEMSIZE[goal->code];
    uint8_t *to = goal->to;
    Py_ssize_t row = 0;
    for (Py_ssize_t i = 0; i < stack->count; i++) {
        const Group *group = stack->groups[i];
        const Column *column = stack->indices[i] < 0 ? NULL : &group->columns[stack->indices[i]];
        for (Py_ssize_t k = 0; k < group->samples; k++, row++, to += row_bytes) {
            Piece piece = {.shape = MISSING};
            if (column) piece = piece_of(column, k);
            if (piece.shape == MISSING) {
                uint64_t held = goal->ones ? goal->ones[row] : 0;
                repeat(pad(goal, to, held), ITEMSIZE[goal->code], goal->one, held);
            } else {
                write_piece(group, column, &piece, pad(goal, to, piece.lead + piece.count + piece.trail));
            }
        }
    }
}

/* Refuse what would be written beyond a row, or as another dtype. */
static int check_rows(const Stack *stack, const Goal *goal, uint64_t nbytes) {
    if (goal->code < 0 || goal->code >= CODES ||
        (uint64_t)stack->rows * goal->row_elements * ITEMSIZE[goal->code] != nbytes) {
        PyErr_SetString(PyExc_ValueError, "the memory has another size than the rows");
        return -1;
    }
    Py_ssize_t row = 0;
    for (Py_ssize_t i = 0; i < stack->count; i++) {
        Py_ssize_t index = stack->indices[i];
        if (index >= 0 && stack->groups[i]->columns[index].code != goal->code) {
            PyErr_SetString(PyExc_ValueError, "a group has another dtype");
            return -1;
        }
        for (Py_ssize_t k = 0; k < stack->groups[i]->samples; k++, row++) {
            const Shape *shape = shape_in(stack, i, k);
            uint64_t held = shape ? shape->count : goal->ones ? goal->ones[row] : 0;
            if (held > goal->row_elements) {
                PyErr_SetString(PyExc_ValueError, "a sample is longer than its row");
                return -1;
            }
        }
    }
    return 0;
}

static uint64_t *numbers_from(PyObject *list, Py_ssize_t count) {
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != count) {
        PyErr_SetString(PyExc_ValueError, "one length a row is needed");
        return NULL;
    }
    uint64_t *numbers = PyMem_Malloc(((size_t)count + 1) * sizeof(uint64_t));
    if (!numbers) { PyErr_NoMemory(); return NULL; }
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(list, i));
        if (numbers[i] == (uint64_t)-1 && PyErr_Occurred()) { PyMem_Free(numbers); return NULL; }
    }
    return numbers;
}

/* fill(groups, indices, address, nbytes, code, row elements, left, filler, ones or None, one)
 *     decode a column, a row a sample, padded on one side; a row without it has `ones` times `one` */
static PyObject *fill(PyObject *module, PyObject *args) {
    PyObject *groups, *indices, *ones;
    unsigned long long address, nbytes;
    uint64_t *lengths_of_ones = NULL;
    int left;
    Goal goal = {0};
    Stack stack;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!KKiKpKOK", &PyList_Type, &groups, &PyList_Type, &indices, &address,
                          &nbytes, &goal.code, &goal.row_elements, &left, &goal.filler, &ones, &goal.one))
        return NULL;
    if (stack_from(groups, indices, &stack)) return NULL;
    if (ones != Py_None && !(lengths_of_ones = numbers_from(ones, stack.rows))) goto failed;
    goal.to = (uint8_t *)(uintptr_t)address;
    goal.left = left;
    goal.ones = lengths_of_ones;
    if (check_rows(&stack, &goal, nbytes)) goto failed;
    if (nbytes < RELEASE_BYTES) {
        fill_rows(&stack, &goal);
    } else {
        Py_BEGIN_ALLOW_THREADS
        fill_rows(&stack, &goal);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(lengths_of_ones);
    stack_free(&stack);
    Py_RETURN_NONE;
failed:
    PyMem_Free(lengths_of_ones);
    stack_free(&stack);
    return NULL;
}

/* ---------------------------------------------------------------------------------------------
 * Collecting: what Python code would ask of each tensor, with fewer steps in between.
 */

static PyObject *name_is_cpu, *name_is_contiguous, *name_is_neg, *name_dtype, *name_shape, *name_data_ptr;

static bool is_true(PyObject *found, bool *failed) { /* steals what was found */
    if (!found) { *failed = true; return false; }
    bool answer = found == Py_True;
    Py_DECREF(found);
    return answer;
}

/* Return (address, shape) of a tensor, None where its elements are not plain CPU memory in order. */
static PyObject *cell_of(PyObject *tensor, PyObject **dtype) {
    bool failed = false;
    bool plain = is_true(PyObject_GetAttr(tensor, name_is_cpu), &failed) && !failed &&
                 is_true(PyObject_CallMethodNoArgs(tensor, name_is_contiguous), &failed) && !failed &&
                 !is_true(PyObject_CallMethodNoArgs(tensor, name_is_neg), &failed);
    if (failed) return NULL;
    if (!plain) Py_RETURN_NONE;
    PyObject *found = PyObject_GetAttr(tensor, name_dtype);
    if (!found) return NULL;
    bool differs = *dtype && *dtype != found;
    Py_XSETREF(*dtype, found);
    if (differs) Py_RETURN_NONE;
    PyObject *shape = PyObject_GetAttr(tensor, name_shape);
    PyObject *address = shape ? PyObject_CallMethodNoArgs(tensor, name_data_ptr) : NULL;
    PyObject *cell = address ? PyTuple_Pack(2, address, shape) : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(address);
    return cell;
}

/* Return one field of a row, an object's attribute or a dict's entry; None where there is none. */
static PyObject *field_of(PyObject *row, PyObject *name) {
    if (!PyDict_Check(row)) return PyObject_GetAttr(row, name);
    PyObject *found = PyDict_GetItemWithError(row, name);
    if (!found && PyErr_Occurred()) return NULL;
    return Py_NewRef(found ? found : Py_None);
}

/* Return (dtype or None, cells) of one field; Py_None where one of its tensors is unusual. */
static PyObject *collect_field(PyObject *const *rows, Py_ssize_t count, PyObject *name, PyObject *type,
                               PyObject *held) {
    PyObject *dtype = NULL, *found = NULL, *cells = PyList_New(count);
    for (Py_ssize_t i = 0; cells && i < count; i++) {
        PyObject *tensor = field_of(rows[i], name), *cell = NULL;
        bool absent = tensor == Py_None;
        if (absent) cell = Py_NewRef(Py_None);
        else if (tensor) cell = (PyObject *)Py_TYPE(tensor) == type ? cell_of(tensor, &dtype) : Py_NewRef(Py_None);
        if (cell && !absent && PyList_Append(held, tensor)) Py_CLEAR(cell);
        Py_XDECREF(tensor);
        if (!cell || (cell == Py_None && !absent)) {
            found = cell; /* an error, or unusual */
            Py_CLEAR(cells);
            break;
        }
        PyList_SET_ITEM(cells, i, cell);
    }
    if (cells) found = PyTuple_Pack(2, dtype ? dtype : Py_None, cells);
    Py_XDECREF(cells);
    Py_XDECREF(dtype);
    return found;
}

/* collect(rows, names, Tensor, held) -> [(dtype or None, [None or (address, shape)])] of each name; None
 *     where a value is no plain tensor, or a field has several dtypes. `held` gets the tensors: their
 *     memory stays while it lives, whatever other threads do to the rows. */
static PyObject *collect(PyObject *module, PyObject *args) {
    PyObject *given, *names, *type, *held;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!OO!", &given, &PyTuple_Type, &names, &type, &PyList_Type, &held)) return NULL;
    PyObject *rows = PySequence_Tuple(given); /* nobody changes it meanwhile */
    PyObject *columns = rows ? PyList_New(PyTuple_GET_SIZE(names)) : NULL;
    for (Py_ssize_t i = 0; columns && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *column = collect_field(((PyTupleObject *)rows)->ob_item, PyTuple_GET_SIZE(rows),
                                         PyTuple_GET_ITEM(names, i), type, held);
        if (!column || column == Py_None) {
            Py_DECREF(columns);
            Py_DECREF(rows);
            return column;
        }
        PyList_SET_ITEM(columns, i, column);
    }
    Py_XDECREF(rows);
    return columns;
}

static PyMethodDef functions[] = {
    {"collect", collect, METH_VARARGS, "collect(rows, names, Tensor, held): addresses and shapes of plain tensors"},
    {"encode", encode, METH_VARARGS, "encode(samples, columns, tails, tail, extras) -> blob"},
    {"parse", parse, METH_VARARGS, "parse(blob, lookup) -> Group"},
    {"extent", extent, METH_VARARGS, "extent(groups, indices): what shapes a column has"},
    {"lengths", lengths, METH_VARARGS, "lengths(groups, indices): first dimension of each row"},
    {"fill", fill, METH_VARARGS, "fill(groups, indices, address, ...): decode a column into padded rows"},
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
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_is_contiguous = PyUnicode_InternFromString("is_contiguous");
    name_is_neg = PyUnicode_InternFromString("is_neg");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_shape = PyUnicode_InternFromString("shape");
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    if (!name_is_cpu || !name_is_contiguous || !name_is_neg || !name_dtype || !name_shape || !name_data_ptr)
        return NULL;
    if (!EncodeError || !DecodeError || PyType_Ready(&GroupType) < 0) return NULL;
    return PyModule_Create(&definition);
}
