/* SPDX-License-Identifier: Apache-2.0 */
#include "digest.h"
#include <fanin/objects.h>
#include <stddef.h>
#include <string.h>

/* Objects by which memory is asked for in advance. */
#define AHEAD 8

/* DLTensor of DLPack, whose layout is its interface. */
typedef struct dl_tensor {
    void *data;
    int32_t device_type, device;
    int32_t n_dims;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *stride;
    uint64_t byte_offset;
} dl_tensor;

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };

/* What a digest is made of: of each object its head, extents and strides, as many as it has. */
typedef struct record_head {
    uint64_t address;
    uint32_t dtype, n_dims;
    fanin_memory memory;
} record_head;

typedef struct record {
    record_head head;
    uint64_t extent[FANIN_MAX_DIMS];
    int64_t stride[FANIN_MAX_DIMS]; /* all 0: packed */
} record;

/* ------------------------------------------------------------------- dtypes */

static fanin_dtype objects_integer_of(uint8_t bits, bool is_signed)
{
    switch (bits) {
    case 8:
        return is_signed ? FANIN_DTYPE_I8 : FANIN_DTYPE_U8;
    case 16:
        return is_signed ? FANIN_DTYPE_I16 : FANIN_DTYPE_U16;
    case 32:
        return is_signed ? FANIN_DTYPE_I32 : FANIN_DTYPE_U32;
    case 64:
        return is_signed ? FANIN_DTYPE_I64 : FANIN_DTYPE_U64;
    default:
        return 0;
    }
}

/* The floats of 8 bits have codes of their own. */
static fanin_dtype float8_of(uint8_t code)
{
    static const struct {
        uint8_t code;
        fanin_dtype dtype;
    } all[] = {{10, FANIN_DTYPE_F8_E4M3},
               {11, FANIN_DTYPE_F8_E4M3FNUZ},
               {12, FANIN_DTYPE_F8_E5M2},
               {13, FANIN_DTYPE_F8_E5M2FNUZ},
               {14, FANIN_DTYPE_F8_E8M0}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (all[i].code == code)
            return all[i].dtype;
    }
    return 0;
}

/* 0: none of ours, or one whose extents are not the tensor's own. */
static fanin_dtype dtype_of(const dl_tensor *t)
{
    if (t->lanes != 1)
        return 0;
    switch (t->code) {
    case DL_INT:
    case DL_UINT:
        return objects_integer_of(t->bits, t->code == DL_INT);
    case DL_FLOAT:
        return t->bits == 16   ? FANIN_DTYPE_F16
               : t->bits == 32 ? FANIN_DTYPE_F32
               : t->bits == 64 ? FANIN_DTYPE_F64
                               : 0;
    case DL_BFLOAT:
        return t->bits == 16 ? FANIN_DTYPE_BF16 : 0;
    case DL_BOOL:
        return t->bits == 8 ? FANIN_DTYPE_BOOL : 0;
    default:
        return t->bits == 8 ? float8_of(t->code) : 0;
    }
}

/* ------------------------------------------------------------------ reading */

static bool find_memory(const dl_tensor *t, fanin_memory *out)
{
    *out = (fanin_memory){FANIN_MEMORY_HOST, -1};
    if (t->device_type == DL_CPU || t->device_type == DL_CUDA_HOST)
        return true;
    *out = (fanin_memory){FANIN_MEMORY_CUDA, t->device};
    return t->device_type == DL_CUDA && t->device >= 0 && t->device < 64;
}

/* Extents, and strides in bytes. */
static bool find_geometry(const dl_tensor *t, int64_t item, record *out, bool *empty)
{
    bool packed = true;
    int64_t expected = 1;
    *empty = false;
    for (int32_t d = t->n_dims; d-- > 0;) {
        int64_t extent = t->shape[d], stride = t->stride ? t->stride[d] : expected;
        if (extent < 0 || (extent > 1 && stride == 0))
            return false;
        packed = packed && (extent <= 1 || stride == expected);
        *empty = *empty || extent == 0;
        out->extent[d] = (uint64_t)extent;
        out->stride[d] = stride * item;
        expected *= extent > 1 ? extent : 1;
    }
    for (int32_t d = 0; packed && d < t->n_dims; d++)
        out->stride[d] = 0;
    return true;
}

/* A part of complex elements has another element between two of its own. */
static bool is_doubtful(const dl_tensor *t)
{
    for (int32_t d = 0; d < t->n_dims && t->stride; d++) {
        if (t->shape[d] > 1 && t->stride[d] == 1)
            return false;
    }
    return t->code == DL_FLOAT;
}

/* Of its arrays only what the object has. */
static bool objects_find(const dl_tensor *t, record *out, bool *empty)
{
    fanin_dtype dtype = dtype_of(t);
    if (dtype == 0 || t->n_dims < 0 || t->n_dims > FANIN_MAX_DIMS ||
        !find_memory(t, &out->head.memory) ||
        !find_geometry(t, t->bits / 8, out, empty))
        return false;
    out->head.dtype = (uint32_t)dtype;
    out->head.n_dims = (uint32_t)t->n_dims;
    out->head.address = *empty ? 0 : (uint64_t)(uintptr_t)t->data + t->byte_offset;
    return *empty || t->data;
}

/* ------------------------------------------------------------------ writing */

static void write_out(const record *from, bool empty, const char *name, fanin_tensor *t,
                      fanin_box *box)
{
    size_t size = from->head.n_dims * sizeof *from->extent;
    memset(t, 0, sizeof *t);
    memset(box, 0, sizeof *box);
    t->struct_size = sizeof *t;
    t->name = name;
    t->dtype = (fanin_dtype)from->head.dtype;
    t->n_dims = from->head.n_dims;
    memcpy(t->shape, from->extent, size);
    t->boxes = box;
    t->n_boxes = !empty;
    t->memory = from->head.memory;
    memcpy(box->extent, from->extent, size);
    memcpy(box->stride, from->stride, size);
    /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
    box->address = (void *)(uintptr_t)from->head.address;
}

/* Records are digested by blocks, each with the digest of those before it. */
typedef struct summary {
    digest before;
    uint8_t block[64 * sizeof(record)];
    size_t used;
} summary;

static void objects_close_block(summary *s)
{
    digest both[2] = {s->before, digest_of(s->block, s->used)};
    s->before = digest_of(both, sizeof both);
    s->used = 0;
}

static void objects_append(summary *s, const void *from, size_t size)
{
    memcpy(s->block + s->used, from, size);
    s->used += size;
}

static void add_record(summary *s, const record *r)
{
    size_t size = r->head.n_dims * sizeof *r->extent;
    if (s->used + sizeof *r > sizeof s->block)
        objects_close_block(s);
    objects_append(s, &r->head, sizeof r->head);
    objects_append(s, r->extent, size);
    objects_append(s, r->stride, size);
}

/* Keeps what the object's memory is kept by, then reads the object. */
static bool read_one(fanin_objects *o, size_t index, bool owned, dl_tensor *out)
{
    if (index + AHEAD < o->count)
        __builtin_prefetch(o->item(o->list, (ptrdiff_t)(index + AHEAD)));
    void *object = o->item(o->list, (ptrdiff_t)index);
    if (!object)
        return false;
    if (owned) {
        void *owner = o->owner(o->how, object);
        if (!owner || o->keep(o->kept, (ptrdiff_t)index, owner) != 0)
            return false;
    }
    return o->read(object, out) == 0;
}

/* Whether it is right, and in *owned whether owners are to be kept. */
static bool check_objects(const fanin_objects *o, bool *owned)
{
    if (!o || o->struct_size < offsetof(fanin_objects, owner) || !o->item || !o->read ||
        !o->doubtful)
        return false;
    *owned = o->struct_size >= sizeof *o && o->owner;
    return !*owned || o->keep;
}

bool fanin_describe_objects(fanin_objects *objects, fanin_tensor *tensors,
                            fanin_box *boxes, const char *names)
{
    fanin_objects *o = objects;
    bool owned;
    if (!check_objects(o, &owned) || (tensors && (!boxes || !names)))
        return false;
    summary s = {.used = 0};
    o->n_doubtful = 0;
    o->devices = 0;
    for (size_t i = 0; i < o->count; i++) {
        dl_tensor t;
        bool empty;
        record r;
        if (!read_one(o, i, owned, &t) || !objects_find(&t, &r, &empty))
            return false;
        add_record(&s, &r);
        if (is_doubtful(&t))
            o->doubtful[o->n_doubtful++] = (uint32_t)i;
        if (r.head.memory.kind == FANIN_MEMORY_CUDA)
            o->devices |= UINT64_C(1) << r.head.memory.device;
        if (!tensors)
            continue;
        write_out(&r, empty, names, &tensors[i], &boxes[i]);
        names += strlen(names) + 1;
    }
    objects_close_block(&s);
    memcpy(o->digest, s.before.bytes, sizeof o->digest);
    return true;
}
