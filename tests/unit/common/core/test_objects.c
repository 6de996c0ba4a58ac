/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of another library, read by a function of its own. */
#include "testing.h"
#include <fanin/objects.h>

#define MOST 300

/* DLTensor, as DLPack lays it out. */
typedef struct their_tensor {
    void *data;
    int32_t device_type, device, n_dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} their_tensor;

typedef struct object {
    their_tensor tensor;
    int64_t shape[10], strides[10];
    bool fails;
} object;

static object all[MOST];
static uint32_t doubtful[MOST];
static fanin_tensor tensors[MOST];
static fanin_box boxes[MOST];
static uint8_t memory[64];

static void *item(void *list, ptrdiff_t index)
{
    return (object *)list + index;
}

static int read_object(void *of, void *out)
{
    object *o = of;
    o->tensor.shape = o->shape;
    o->tensor.strides = o->strides;
    memcpy(out, &o->tensor, sizeof o->tensor);
    return o->fails ? -1 : 0;
}

/* A matrix of 3 rows of 5 floats, packed, in host memory. */
static void reset(size_t index)
{
    all[index] = (object){
        .tensor = {memory, 1, 0, 2, 2, 32, 1, NULL, NULL, 8},
        .shape = {3, 5},
        .strides = {5, 1},
    };
}

static fanin_objects objects(size_t count)
{
    return (fanin_objects){.struct_size = sizeof(fanin_objects),
                           .list = all,
                           .count = count,
                           .item = item,
                           .read = read_object,
                           .doubtful = doubtful};
}

static bool describe(fanin_objects *o)
{
    static char names[MOST * 8];
    char *end = names;
    *o = objects(o->count);
    for (size_t i = 0; i < o->count; i++)
        end += snprintf(end, 8, "t%zu", i) + 1;
    return fanin_describe_objects(o, tensors, boxes, names);
}

static bool describe_one(void)
{
    fanin_objects o = {.count = 1};
    return describe(&o);
}

TEST(packed_ones)
{
    fanin_objects o = {.count = MOST};
    for (size_t i = 0; i < MOST; i++)
        reset(i);
    assert_true(describe(&o));
    for (size_t i = 0; i < MOST; i++) {
        char name[8];
        snprintf(name, sizeof name, "t%zu", i);
        assert_string_equal(tensors[i].name, name);
        assert_int_equal(tensors[i].dtype, FANIN_DTYPE_F32);
        assert_int_equal(tensors[i].n_dims, 2);
        assert_int_equal(tensors[i].shape[0], 3);
        assert_int_equal(tensors[i].shape[1], 5);
        assert_int_equal(tensors[i].n_boxes, 1);
        assert_int_equal(tensors[i].memory.kind, FANIN_MEMORY_HOST);
        assert_ptr_equal(tensors[i].boxes, &boxes[i]);
        assert_ptr_equal(boxes[i].address, memory + 8);
        assert_int_equal(boxes[i].extent[1], 5);
        assert_int_equal(boxes[i].stride[0], 0);
    }
    assert_int_equal(o.devices, 0);
    assert_int_equal(o.n_doubtful, 0);
}

TEST(strides_devices_and_empty_ones)
{
    fanin_objects o = {.count = 3};
    for (size_t i = 0; i < 3; i++)
        reset(i);
    all[0].strides[0] = 8;
    all[1].tensor.device_type = 2, all[1].tensor.device = 5;
    all[2].shape[0] = 0, all[2].tensor.data = NULL;
    assert_true(describe(&o));
    assert_int_equal(boxes[0].stride[0], 32);
    assert_int_equal(boxes[0].stride[1], 4);
    assert_int_equal(tensors[1].memory.kind, FANIN_MEMORY_CUDA);
    assert_int_equal(tensors[1].memory.device, 5);
    assert_int_equal(o.devices, 1 << 5);
    assert_int_equal(tensors[2].n_boxes, 0);
}

/* Parts of complex elements have every second number; where that cannot be told, it is doubted. */
TEST(doubts)
{
    fanin_objects o = {.count = 4};
    for (size_t i = 0; i < 4; i++)
        reset(i);
    all[1].strides[0] = 10, all[1].strides[1] = 2;
    all[2].tensor.n_dims = 0;
    all[3].strides[0] = 10, all[3].strides[1] = 2, all[3].tensor.code = 0;
    assert_true(describe(&o));
    assert_int_equal(o.n_doubtful, 2);
    assert_int_equal(doubtful[0], 1);
    assert_int_equal(doubtful[1], 2);
}

TEST(dtypes)
{
    static const struct {
        uint8_t code, bits;
        fanin_dtype dtype;
    } cases[] = {
        {6, 8, FANIN_DTYPE_BOOL},
        {0, 8, FANIN_DTYPE_I8},
        {1, 8, FANIN_DTYPE_U8},
        {0, 16, FANIN_DTYPE_I16},
        {1, 16, FANIN_DTYPE_U16},
        {0, 32, FANIN_DTYPE_I32},
        {1, 32, FANIN_DTYPE_U32},
        {0, 64, FANIN_DTYPE_I64},
        {1, 64, FANIN_DTYPE_U64},
        {2, 16, FANIN_DTYPE_F16},
        {4, 16, FANIN_DTYPE_BF16},
        {2, 32, FANIN_DTYPE_F32},
        {2, 64, FANIN_DTYPE_F64},
        {10, 8, FANIN_DTYPE_F8_E4M3},
        {12, 8, FANIN_DTYPE_F8_E5M2},
        {14, 8, FANIN_DTYPE_F8_E8M0},
        {11, 8, FANIN_DTYPE_F8_E4M3FNUZ},
        {13, 8, FANIN_DTYPE_F8_E5M2FNUZ},
        {5, 64, 0},
        {17, 4, 0},
        {3, 64, 0},
        {2, 8, 0},
        {0, 4, 0},
        {15, 6, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        reset(0);
        all[0].tensor.code = cases[i].code;
        all[0].tensor.bits = cases[i].bits;
        assert_int_equal(describe_one(), cases[i].dtype != 0);
        if (cases[i].dtype != 0)
            assert_int_equal(tensors[0].dtype, cases[i].dtype);
    }
}

/* Each is as reset() has it but for one thing. */
TEST(what_cannot_be_described)
{
    reset(0);
    assert_true(describe_one());
    all[0].fails = true;
    assert_false(describe_one());
    reset(0), all[0].tensor.n_dims = 9;
    assert_false(describe_one());
    reset(0), all[0].strides[0] = 0;
    assert_false(describe_one());
    reset(0), all[0].tensor.data = NULL;
    assert_false(describe_one());
    reset(0), all[0].tensor.lanes = 2;
    assert_false(describe_one());
    reset(0), all[0].tensor.device_type = 10;
    assert_false(describe_one());
    reset(0), all[0].tensor.device_type = 2, all[0].tensor.device = 64;
    assert_false(describe_one());
    reset(0), all[0].shape[0] = -1;
    assert_false(describe_one());
    reset(0);
    fanin_objects o = objects(1);
    o.struct_size = 8;
    assert_false(fanin_describe_objects(&o, NULL, NULL, NULL));
    o = objects(1), o.read = NULL;
    assert_false(fanin_describe_objects(&o, NULL, NULL, NULL));
    o = objects(1);
    assert_false(fanin_describe_objects(&o, tensors, boxes, NULL));
    assert_false(fanin_describe_objects(NULL, NULL, NULL, NULL));
}

static void expect_digest(const uint8_t *like, bool equal)
{
    fanin_objects o = objects(MOST);
    assert_true(fanin_describe_objects(&o, NULL, NULL, NULL));
    assert_int_equal(memcmp(o.digest, like, sizeof o.digest) == 0, equal);
}

/* Whatever of one tensor changes, and wherever it is, the digest does. */
TEST(digests)
{
    fanin_objects o = {.count = MOST};
    for (size_t i = 0; i < MOST; i++)
        reset(i);
    assert_true(describe(&o));
    expect_digest(o.digest, true);
    for (size_t i = 0; i < MOST; i++) {
        object *one = &all[i];
        one->tensor.byte_offset = 12;
        expect_digest(o.digest, false);
        reset(i), one->tensor.bits = 64;
        expect_digest(o.digest, false);
        reset(i), one->shape[0] = 5, one->shape[1] = 3, one->strides[0] = 3;
        expect_digest(o.digest, false);
        reset(i), one->strides[0] = 6;
        expect_digest(o.digest, false);
        reset(i), one->tensor.device_type = 2;
        expect_digest(o.digest, false);
        reset(i), one->tensor.n_dims = 1;
        expect_digest(o.digest, false);
        reset(i);
        expect_digest(o.digest, true);
    }
    o = objects(MOST - 1);
    uint8_t fewer[sizeof o.digest];
    assert_true(fanin_describe_objects(&o, NULL, NULL, NULL));
    memcpy(fewer, o.digest, sizeof fewer);
    expect_digest(fewer, false);
}

/* What an object is kept by is asked for before it is read, and nothing else is done in between. */
typedef struct keeper {
    object *asked[MOST], *read[MOST];
    void *kept[MOST];
    size_t n_asked, n_read, fails_at;
    bool refuses;
} keeper;

static keeper told;

static void *ask(void *how, void *of)
{
    keeper *k = how;
    assert_int_equal(k->n_asked, k->n_read);
    k->asked[k->n_asked++] = of;
    return k->n_asked == k->fails_at ? NULL : &((object *)of)->shape;
}

static int keep_one(void *kept, ptrdiff_t index, void *owner)
{
    keeper *k = kept;
    k->kept[index] = owner;
    return k->refuses ? -1 : 0;
}

static int read_asked(void *of, void *out)
{
    told.read[told.n_read++] = of;
    return read_object(of, out);
}

static fanin_objects owned_objects(void)
{
    fanin_objects o = objects(MOST);
    told = (keeper){.n_asked = 0};
    o.read = read_asked;
    o.owner = ask, o.how = &told;
    o.keep = keep_one, o.kept = &told;
    return o;
}

TEST(owners)
{
    for (size_t i = 0; i < MOST; i++)
        reset(i);
    fanin_objects o = owned_objects();
    assert_true(fanin_describe_objects(&o, NULL, NULL, NULL));
    for (size_t i = 0; i < MOST; i++) {
        assert_ptr_equal(told.asked[i], &all[i]);
        assert_ptr_equal(told.read[i], &all[i]);
        assert_ptr_equal(told.kept[i], &all[i].shape);
    }
    o = owned_objects(), told.fails_at = 3;
    assert_false(fanin_describe_objects(&o, NULL, NULL, NULL));
    assert_int_equal(told.n_read, 2);
    o = owned_objects(), told.refuses = true;
    assert_false(fanin_describe_objects(&o, NULL, NULL, NULL));
    assert_int_equal(told.n_read, 0);
    o = owned_objects(), o.keep = NULL;
    assert_false(fanin_describe_objects(&o, NULL, NULL, NULL));
    assert_int_equal(told.n_asked, 0);
    o = owned_objects(), o.read = read_object,
    o.struct_size = offsetof(fanin_objects, owner);
    assert_true(fanin_describe_objects(&o, NULL, NULL, NULL));
    assert_int_equal(told.n_asked, 0);
}
