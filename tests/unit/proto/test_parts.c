/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of keys, and box tables of some keys: cut, sent, joined. */
#include "box_place.h"
#include "dtype.h"
#include "pack.h"
#include "random.h"
#include "testing.h"

#define KEYS 24
#define BOXES_MAX (3 * KEYS)

/* ------------------------------------------------------------------- sets */

static key_set random_set(random_source *r, uint64_t often, bool marks[KEYS])
{
    key_set s;
    for (int i = 0; i < KEYS; i++)
        marks[i] = random_below(r, often) == 0;
    assert_true(key_set_of_marks(marks, KEYS, &s));
    return s;
}

/* Just the marked ones, in as few ranges as there can be. */
static void check_set(const key_set *s, const bool marks[KEYS])
{
    uint64_t count = 0;
    size_t ranges = 0;
    for (uint32_t i = 0; i < KEYS; i++) {
        assert_int_equal(key_set_has(s, i), marks[i]);
        count += marks[i];
        ranges += marks[i] && (i == 0 || !marks[i - 1]);
    }
    assert_int_equal(key_set_count(s), count);
    assert_int_equal(s->n, ranges);
}

TEST(sets_are_what_is_marked)
{
    random_source r = {1};
    for (int round = 0; round < 2000; round++) {
        bool a_marks[KEYS], b_marks[KEYS], either[KEYS], only_a[KEYS], within = true;
        key_set a = random_set(&r, 1 + random_below(&r, 5), a_marks), either_set, less;
        key_set b = random_set(&r, 1 + random_below(&r, 5), b_marks);
        for (int i = 0; i < KEYS; i++) {
            either[i] = a_marks[i] || b_marks[i];
            only_a[i] = a_marks[i] && !b_marks[i];
            within = within && !only_a[i];
        }
        assert_true(key_set_join(&a, &b, &either_set));
        assert_true(key_set_less(&a, &b, &less));
        check_set(&a, a_marks);
        check_set(&either_set, either);
        check_set(&less, only_a);
        assert_int_equal(key_set_holds(&b, &a), within);
        assert_true(key_set_holds(&either_set, &a) && key_set_holds(&either_set, &b));
        assert_int_equal(key_set_equal(&a, &b), memcmp(a_marks, b_marks, KEYS) == 0);
        key_set_free(&a);
        key_set_free(&b);
        key_set_free(&either_set);
        key_set_free(&less);
    }
}

TEST(sets_come_back)
{
    random_source r = {2};
    for (int round = 0; round < 500; round++) {
        bool marks[KEYS];
        const char *why = NULL;
        key_set s = random_set(&r, 3, marks), again;
        buffer b = {0};
        key_set_encode(&b, &s);
        assert_int_equal(
            key_set_decode((bytes_view){b.data, b.size}, KEYS, &again, &why), FANIN_OK);
        check_set(&again, marks);
        key_set_free(&again);
        buffer_free(&b);
        key_set_free(&s);
    }
}

TEST(other_forms_of_sets_are_refused)
{
    static const struct {
        uint64_t words[4];
        size_t count;
    } rows[] = {
        {{0}, 1},           /* half a range */
        {{0, 0}, 2},        /* of nothing */
        {{1, 2, 0, 3}, 4},  /* two that touch */
        {{0, KEYS + 1}, 2}, /* keys that are not there */
        {{KEYS, 1}, 2},     {{5, KEYS - 4}, 2}, {{UINT64_MAX, 1}, 2},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        buffer b = {0};
        key_set s;
        const char *why = NULL;
        for (size_t j = 0; j < rows[i].count; j++)
            pack_uint(&b, rows[i].words[j]);
        assert_int_equal(key_set_decode((bytes_view){b.data, b.size}, KEYS, &s, &why),
                         FANIN_ERR_PROTOCOL);
        assert_non_null(why);
        key_set_free(&s);
        buffer_free(&b);
    }
}

TEST(too_many_ranges_are_refused)
{
    for (uint32_t n = LIMIT_KEY_RANGES; n <= LIMIT_KEY_RANGES + 1; n++) {
        buffer b = {0};
        key_set s = {0}, again;
        const char *why = NULL;
        for (uint32_t i = 0; i < n; i++)
            assert_true(key_set_add(&s, 2 * i, 1));
        key_set_encode(&b, &s);
        assert_true(b.size <= LIMIT_KEY_SET);
        assert_int_equal(
            key_set_decode((bytes_view){b.data, b.size}, 2 * n, &again, &why),
            n > LIMIT_KEY_RANGES ? FANIN_ERR_PROTOCOL : FANIN_OK);
        key_set_free(&again);
        key_set_coarsen(&s, LIMIT_KEY_RANGES / 2);
        assert_true(s.n <= LIMIT_KEY_RANGES / 2);
        assert_true(key_set_has(&s, 0) && key_set_has(&s, 2 * n - 2));
        key_set_free(&s);
        buffer_free(&b);
    }
}

/* ------------------------------------------------------------------ parts */

typedef struct scene {
    key_entry entries[KEYS];
    char names[KEYS][4];
    key_table *keys;
    box_table *whole;
} scene;

static box_table *decode(const scene *s, const buffer *b)
{
    box_table *t;
    assert_works(box_table_decode(b->data, b->size, s->keys, NULL, &t, ERROR));
    return t;
}

static void make_keys(scene *s, random_source *r)
{
    buffer b = {0};
    for (uint32_t i = 0; i < KEYS; i++) {
        snprintf(s->names[i], sizeof s->names[i], "k%02u", i);
        s->entries[i] = (key_entry){.name = s->names[i],
                                    .dtype = FANIN_DTYPE_F32,
                                    .n_dims = 2,
                                    .shape = {random_below(r, 9), 6}};
    }
    key_table_encode(&b, s->entries, KEYS, NULL, 0);
    assert_int_equal(key_table_decode(b.data, b.size, NULL, &s->keys, NULL), FANIN_OK);
    buffer_free(&b);
}

/* Of a key a chunk, or up to two boxes of any rows, in some region. */
static uint64_t add_boxes(const scene *s, random_source *r, uint32_t key, bool chunks,
                          box_record *out)
{
    uint64_t n = chunks ? 1 : random_below(r, 3), made = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t rows = s->entries[key].shape[0];
        block b = block_chunk(2, s->entries[key].shape, 0, chunks ? 3 : 1, 0);
        if (block_is_empty(&b))
            continue;
        if (!chunks)
            b.extent[0] = 1 + random_below(r, rows);
        box_record *x = &out[made++];
        *x = (box_record){.key = key, .block = b};
        x->place.region = (uint32_t)random_below(r, 3);
        x->place.offset = 8 * random_below(r, 1000);
        x->place.packed = chunks || random_below(r, 2);
        if (!x->place.packed) {
            x->place.stride[0] = 64;
            x->place.stride[1] = 4;
        }
        if (!x->place.packed && b.extent[0] == 1)
            x->place = (box_place){.offset = x->place.offset, .packed = true};
    }
    return made;
}

static void scene_make(scene *s, random_source *r, bool chunks)
{
    box_record records[BOXES_MAX];
    buffer b = {0};
    uint64_t n = 0;
    make_keys(s, r);
    for (uint32_t key = 0; key < KEYS; key++)
        n += add_boxes(s, r, key, chunks, records + n);
    box_table_encode(&b, s->keys->entries, KEYS, records, n, 0, chunks ? 3 : 1);
    s->whole = decode(s, &b);
    assert_true(box_table_is_whole(s->whole));
    buffer_free(&b);
}

static void scene_free(scene *s)
{
    box_table_free(&s->whole);
    key_table_free(&s->keys);
}

static buffer part_of(const scene *s, const key_set *wanted)
{
    buffer b = {0};
    box_table_encode_part(&b, s->whole, wanted);
    assert_false(b.failed);
    return b;
}

/* What a part says of its keys is what the whole table says, by the same numbers. */
static void check_part(const scene *s, const box_table *part, const bool marks[KEYS])
{
    key_set keys;
    uint64_t boxes = 0;
    assert_true(box_table_keys(part, &keys));
    check_set(&keys, marks);
    assert_false(box_table_is_whole(part));
    for (uint32_t key = 0; key < KEYS; key++) {
        uint64_t n, m, first = box_table_of_key(s->whole, key, &n);
        uint64_t same = box_table_of_key(part, key, &m);
        assert_int_equal(m, marks[key] ? n : 0);
        assert_true(m == 0 || same == first);
        boxes += m;
        for (uint64_t i = first; i < first + m; i++) {
            uint32_t key_a, key_b;
            block a, b;
            box_place at, place;
            box_table_get(s->whole, i, &key_a, &a, &at);
            box_table_get(part, i, &key_b, &b, &place);
            assert_true(key_a == key_b && block_equal(&a, &b));
            assert_memory_equal(&at, &place, sizeof at);
            assert_true(place.region < box_table_regions(part));
        }
    }
    assert_int_equal(box_table_count(part), boxes);
    for (size_t i = 0; i < keys.n; i++) {
        uint64_t n, m, first = box_table_of_keys(s->whole, keys.ranges[i], &n);
        assert_true(box_table_of_keys(part, keys.ranges[i], &m) == first || m == 0);
        assert_int_equal(n, m);
    }
    key_set_free(&keys);
}

TEST(parts_come_back_and_are_joined)
{
    random_source r = {3};
    for (int round = 0; round < 600; round++) {
        scene s;
        bool a_marks[KEYS], b_marks[KEYS], both[KEYS];
        fanin_error error = FANIN_ERROR_INIT;
        scene_make(&s, &r, round % 2);
        key_set a = random_set(&r, 3, a_marks), more = random_set(&r, 3, b_marks), b;
        assert_true(key_set_less(&more, &a, &b));
        for (int i = 0; i < KEYS; i++) {
            b_marks[i] = b_marks[i] && !a_marks[i];
            both[i] = a_marks[i] || b_marks[i];
        }
        if (a.n > 0 && b.n > 0) {
            buffer of_a = part_of(&s, &a), of_b = part_of(&s, &b);
            box_table *table = decode(&s, &of_a), *other = decode(&s, &of_b);
            check_part(&s, table, a_marks);
            check_part(&s, other, b_marks);
            assert_ok(box_table_join(&table, other, &error), error);
            check_part(&s, table, both);
            /* and is cut again */
            buffer again = {0};
            box_table_encode_part(&again, table, &a);
            assert_int_equal(again.size, of_a.size);
            assert_memory_equal(again.data, of_a.data, of_a.size);
            buffer_free(&again);
            box_table_free(&table);
            buffer_free(&of_a);
            buffer_free(&of_b);
        }
        key_set_free(&a);
        key_set_free(&b);
        key_set_free(&more);
        scene_free(&s);
    }
}

TEST(parts_cut_short_are_refused)
{
    random_source r = {4};
    for (int round = 0; round < 20; round++) {
        scene s;
        bool marks[KEYS];
        box_table *t;
        scene_make(&s, &r, round % 2);
        key_set keys = random_set(&r, 2, marks);
        buffer b = part_of(&s, &keys);
        for (size_t size = 0; size < b.size; size++) {
            assert_int_equal(box_table_decode(b.data, size, s.keys, NULL, &t, NULL),
                             FANIN_ERR_PROTOCOL);
            assert_null(t);
        }
        buffer_free(&b);
        key_set_free(&keys);
        scene_free(&s);
    }
}

static fanin_status join(const scene *s, const buffer *a, const buffer *b)
{
    box_table *table = decode(s, a);
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = box_table_join(&table, decode(s, b), &error);
    assert_int_equal(table == NULL, status != FANIN_OK);
    if (status != FANIN_OK)
        assert_says(error.message, "contradict");
    box_table_free(&table);
    return status;
}

/* One range of one key under a chunk rule: rows 0.. of world 1, its number as said. */
static buffer hand_made(uint32_t key, uint64_t ordinal, uint64_t world)
{
    buffer b = {0};
    const uint64_t words[] = {3, 0, 0, world, 0, 1, key, 1, ordinal, 0};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        pack_uint(&b, words[i]);
    return b;
}

TEST(parts_that_contradict_are_not_joined)
{
    static const struct {
        uint32_t key[2];
        uint64_t ordinal[2], world[2];
        bool good;
    } rows[] = {
        {{3, 4}, {7, 8}, {1, 1}, true}, /* neighbours, whichever came first */
        {{4, 3}, {8, 7}, {1, 1}, true},  {{3, 6}, {7, 9}, {1, 1}, true},
        {{3, 4}, {7, 9}, {1, 1}, false}, /* a box between neighbours */
        {{3, 4}, {7, 7}, {1, 1}, false}, /* one number, two boxes */
        {{3, 6}, {7, 6}, {1, 1}, false}, /* numbers that descend */
        {{3, 3}, {7, 7}, {1, 1}, false}, /* one key twice */
        {{3, 4}, {7, 8}, {1, 2}, false}, /* two rules */
    };
    scene s;
    random_source r = {5};
    scene_make(&s, &r, true);
    for (uint32_t i = 0; i < KEYS; i++)
        s.keys->entries[i].shape[0] = 2; /* no key is empty */
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        buffer a = hand_made(rows[i].key[0], rows[i].ordinal[0], rows[i].world[0]);
        buffer b = hand_made(rows[i].key[1], rows[i].ordinal[1], rows[i].world[1]);
        assert_int_equal(join(&s, &a, &b) == FANIN_OK, rows[i].good);
        buffer_free(&a);
        buffer_free(&b);
    }
    scene_free(&s);
}
