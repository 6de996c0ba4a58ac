/* SPDX-License-Identifier: Apache-2.0 */
/** @file Destinations cut into parts and units: every byte once, alike on all readers. */
#include "parts.h"
#include "testing.h"

#define ROWS 70
#define COLUMNS 50

static uint16_t matrix[ROWS][COLUMNS], vector[9];
static uint8_t packed[6 * 24 / 4 * 3]; /* F6: 4 elements in 3 bytes */

static fanin_box matrix_box(void)
{
    return (fanin_box){.extent = {ROWS, COLUMNS}, .address = matrix};
}

static fanin_tensor tensor_of(const char *name, fanin_dtype dtype, uint64_t rows,
                              uint64_t columns, const fanin_box *box)
{
    return (fanin_tensor){.struct_size = sizeof(fanin_tensor),
                          .name = name,
                          .dtype = dtype,
                          .n_dims = 2,
                          .shape = {rows, columns},
                          .boxes = box,
                          .n_boxes = 1};
}

/* Counts each element of the matrix that a part reaches. */
static void count_elements(const fanin_tensor *part, unsigned seen[ROWS][COLUMNS])
{
    const fanin_box *b = part->boxes;
    bool is_packed = b->stride[0] == 0 && b->stride[1] == 0;
    int64_t down = is_packed ? (int64_t)b->extent[1] * 2 : b->stride[0];
    int64_t right = is_packed ? 2 : b->stride[1];
    for (uint64_t i = 0; i < b->extent[0]; i++) {
        for (uint64_t j = 0; j < b->extent[1]; j++) {
            const uint8_t *at =
                (const uint8_t *)b->address + (int64_t)i * down + (int64_t)j * right;
            size_t element = (size_t)(at - (const uint8_t *)matrix) / 2;
            assert_int_equal(element / COLUMNS, b->offset[0] + i);
            assert_int_equal(element % COLUMNS, b->offset[1] + j);
            seen[element / COLUMNS][element % COLUMNS]++;
        }
    }
}

static void check_cover(const fanin_box *box, uint64_t unit)
{
    static unsigned seen[ROWS][COLUMNS];
    fanin_tensor t = tensor_of("w", FANIN_DTYPE_BF16, ROWS, COLUMNS, box);
    parts p;
    memset(seen, 0, sizeof seen);
    assert_int_equal(parts_cut(&p, &t, 1, unit, NULL), FANIN_OK);
    for (size_t i = 0; i < p.n; i++) {
        char name[9];
        snprintf(name, sizeof name, "%08x", (unsigned)i);
        assert_string_equal(p.own[i].name, name);
        assert_string_equal(p.origin[i].name, "w");
        assert_int_equal(p.own[i].shape[0], p.origin[i].boxes->extent[0]);
        assert_int_equal(p.own[i].boxes->offset[0], 0);
        assert_ptr_equal(p.own[i].boxes->address, p.origin[i].boxes->address);
        count_elements(&p.origin[i], seen);
    }
    for (size_t u = 0; u < p.n_units; u++)
        assert_in_range(p.unit_size[u], 1, unit);
    assert_int_equal(p.unit_first[p.n_units], p.n);
    for (size_t i = 0; i < ROWS; i++) {
        for (size_t j = 0; j < COLUMNS; j++)
            assert_int_equal(seen[i][j], i >= box->offset[0] &&
                                             i < box->offset[0] + box->extent[0] &&
                                             j >= box->offset[1] &&
                                             j < box->offset[1] + box->extent[1]);
    }
    parts_free(&p);
}

TEST(every_element_is_in_one_part)
{
    fanin_box whole = matrix_box();
    fanin_box inner = {.offset = {3, 7},
                       .extent = {61, 40},
                       .stride = {COLUMNS * 2, 2},
                       .address = &matrix[3][7]};
    for (uint64_t unit = 2; unit < 8000; unit = unit * 3 / 2 + 1) {
        check_cover(&whole, unit);
        check_cover(&inner, unit);
    }
}

TEST(small_tensors_share_a_unit)
{
    fanin_box box = {.extent = {9}, .address = vector};
    fanin_tensor all[10];
    char names[10][4];
    parts p;
    for (size_t i = 0; i < 10; i++) {
        snprintf(names[i], sizeof names[i], "n%zu", i);
        all[i] = tensor_of(names[i], FANIN_DTYPE_BF16, 9, 0, &box);
        all[i].n_dims = 1;
    }
    assert_int_equal(parts_cut(&p, all, 10, 60, NULL), FANIN_OK);
    assert_int_equal(p.n, 10);
    assert_int_equal(p.n_units, 4); /* three of 18 bytes each */
    assert_int_equal(p.bytes, 180);
    parts_free(&p);
    assert_int_equal(parts_cut(&p, all, 10, 0, NULL), FANIN_OK);
    assert_int_equal(p.n_units, 1);
    assert_int_equal(p.unit_bytes, PARTS_UNIT_STEP);
    parts_free(&p);
}

TEST(packed_elements_are_cut_between_bytes)
{
    fanin_box box = {.extent = {6, 24}, .address = packed};
    fanin_tensor t = tensor_of("q", FANIN_DTYPE_F6_E2M3, 6, 24, &box);
    parts p;
    assert_int_equal(parts_cut(&p, &t, 1, 7, NULL), FANIN_OK);
    uint64_t bytes = 0;
    for (size_t i = 0; i < p.n; i++) {
        assert_int_equal(p.own[i].shape[1] % 4, 0);
        assert_ptr_equal(p.own[i].boxes->address, packed + bytes);
        bytes += p.own[i].shape[1] / 4 * 3;
    }
    assert_int_equal(bytes, sizeof packed);
    parts_free(&p);
}

static digest holding_of(const fanin_tensor *all, size_t n, uint64_t unit)
{
    parts p;
    assert_int_equal(parts_cut(&p, all, n, unit, NULL), FANIN_OK);
    digest d = p.holding;
    parts_free(&p);
    return d;
}

TEST(holdings_are_equal_for_the_same_wish_alone)
{
    static uint16_t other[ROWS][2 * COLUMNS];
    fanin_box a = matrix_box(), b = {.extent = {9, 1}, .address = vector};
    fanin_box strided = {
        .extent = {ROWS, COLUMNS}, .stride = {4 * COLUMNS, 2}, .address = other};
    fanin_tensor two[] = {tensor_of("w", FANIN_DTYPE_BF16, ROWS, COLUMNS, &a),
                          tensor_of("v", FANIN_DTYPE_BF16, 9, 1, &b)};
    fanin_tensor turned[] = {two[1], two[0]};
    turned[1].boxes = &strided;
    digest first = holding_of(two, 2, 500), same = holding_of(turned, 2, 500);
    assert_true(digest_equal(&first, &same));
    digest coarse = holding_of(two, 2, 501), fewer = holding_of(two, 1, 500);
    assert_false(digest_equal(&first, &coarse));
    assert_false(digest_equal(&first, &fewer));
    two[0].dtype = FANIN_DTYPE_F16;
    digest cast = holding_of(two, 2, 500);
    assert_false(digest_equal(&first, &cast));
    a.extent[0]--;
    two[0].dtype = FANIN_DTYPE_BF16;
    digest smaller = holding_of(two, 2, 500);
    assert_false(digest_equal(&first, &smaller));
}

TEST(units_follow_the_size)
{
    fanin_box box = {.extent = {UINT64_C(1) << 20, 1 << 12}, .address = matrix};
    fanin_tensor t = tensor_of("w", FANIN_DTYPE_U8, 1 << 20, 1 << 12, &box);
    parts p;
    assert_int_equal(parts_cut(&p, &t, 1, 0, NULL), FANIN_OK);
    assert_int_equal(p.unit_bytes, PARTS_UNIT_MOST);
    assert_int_equal(p.n_units, 1024);
    parts_free(&p);
    box.extent[0] = t.shape[0] = 1 << 14; /* 64 MiB */
    assert_int_equal(parts_cut(&p, &t, 1, 0, NULL), FANIN_OK);
    assert_int_equal(p.unit_bytes, 128 << 10);
    assert_int_equal(p.n_units, 512);
    parts_free(&p);
}

TEST(bad_destinations_are_refused_by_name)
{
    fanin_box box = matrix_box();
    fanin_tensor t = tensor_of("w", FANIN_DTYPE_BF16, ROWS, COLUMNS, &box);
    fanin_error error = FANIN_ERROR_INIT;
    parts p;
    assert_int_equal(parts_cut(&p, NULL, 1, 0, NULL), FANIN_ERR_ARGUMENT);
    box.offset[0] = 1;
    assert_int_equal(parts_cut(&p, &t, 1, 0, &error), FANIN_ERR_ARGUMENT);
    assert_string_equal(error.key, "w");
    box = matrix_box();
    box.address = NULL;
    assert_int_equal(parts_cut(&p, &t, 1, 0, &error), FANIN_ERR_ARGUMENT);
    box.extent[0] = 0;
    assert_int_equal(parts_cut(&p, &t, 1, 0, &error), FANIN_ERR_ARGUMENT);
    assert_int_equal(p.n, 0);
}
