/* SPDX-License-Identifier: Apache-2.0 */
/* What a client makes of catalogs that ranks announce: what it asks for, keeps and refuses. */
#include "cma/cma.h"
#include "ucx/ucx_end.h"
#include "pack.h"
#include "stub_ranks.h"
#include "testing.h"

#define RANKS 2
#define PART 16
#define CALL_MS 1000
#define CATALOG_MAX 131072
#define MANY (2 * PARTS_FROM + 808) /* a multiple of 20, 3 and 2 */

typedef struct scene {
    stub_world world;
    publication *run;
    announcement announced[RANKS];
    bool use[RANKS];
    fanin_error error, refused[RANKS];
} scene;

static scene s;

/* What rank 1 sends for a request of this type. */
static struct {
    message_type of;
    enum {
        AS_EVER,
        ALWAYS_PAGED, /* one byte a page */
        IS_STALE,
        IS_REFUSED,
        IS_AWAY,
        IS_ANOTHER,
        IS_ELSEWHERE, /* a page that was not asked for */
        IS_EMPTY,
        IS_HUGE,
        IS_BEYOND, /* more than there is in all */
        IS_END,
        IS_NOTHING,
        IS_OLD,       /* knows no parts: the whole table */
        REFUSES_PART, /* by an error */
        IS_ASKEW,     /* a part of other keys */
        IS_HALF,      /* of a large whole table the first half, and nothing more */
    } act;
} odd;

/* What the ranks' parts are cut from, NULL: they give the whole. */
static box_table *tables[RANKS];
static key_table *many;
static unsigned parts_asked[RANKS]; /* requests for a part */

static bool send_page(stub_talk *t, const frame *f, body *in)
{
    const stub_rank *r = t->rank;
    const buffer *b = f->type == MSG_KEYS    ? &r->keys
                      : f->type == MSG_BOXES ? &r->boxes
                                             : &r->regions;
    msg_blob_request m;
    assert_int_equal(decode_blob_request(in, f->type, &m), FANIN_OK);
    msg_blob_page page = {
        .total = b->size, .offset = m.offset, .data = {b->data + m.offset, 1}};
    if (odd.act == IS_ELSEWHERE)
        page.offset++;
    if (odd.act == IS_EMPTY)
        page.data.size = 0;
    if (odd.act == IS_HUGE)
        page.total = CATALOG_MAX + 1;
    if (odd.act == IS_BEYOND)
        page.total = m.offset;
    encode_blob_page(&t->out, f->request, f->type + 1, &page);
    return true;
}

static bool send_half(stub_talk *t, const frame *f, const msg_blob_request *m)
{
    const buffer *b = &t->rank->boxes;
    msg_blob_page page = {.total = b->size, .data = {b->data, b->size / 2}};
    if (m->offset == 0)
        encode_blob_page(&t->out, f->request, MSG_BOXES_OK, &page);
    return true;
}

/* As a server cuts it. */
static bool send_part(stub_talk *t, const frame *f, body *in)
{
    size_t rank = (size_t)(t->rank - s.world.ranks);
    int act = rank == 1 && odd.of == MSG_BOXES ? (int)odd.act : AS_EVER;
    body again = *in;
    msg_blob_request m;
    key_set wanted;
    const char *why;
    buffer part = {0};
    assert_int_equal(decode_blob_request(&again, f->type, &m), FANIN_OK);
    if (act == IS_HALF)
        return send_half(t, f, &m);
    if (m.keys.size == 0 || act == IS_OLD)
        return stub_answer(t, f, in);
    parts_asked[rank]++;
    if (act == REFUSES_PART)
        return stub_answer_error(t, f->request, FANIN_ERR_UNSUPPORTED, "no parts");
    assert_int_equal(key_set_decode(m.keys, many->count, &wanted, &why), FANIN_OK);
    if (act == IS_ASKEW)
        wanted.ranges[0].count++;
    box_table_encode_part(&part, tables[rank], &wanted);
    msg_blob_page page = {.total = part.size, .data = {part.data, part.size}};
    encode_blob_page(&t->out, f->request, MSG_BOXES_OK, &page);
    buffer_free(&part);
    key_set_free(&wanted);
    return true;
}

static bool answer(stub_talk *t, const frame *f, body *in)
{
    if (many && f->type == MSG_BOXES)
        return send_part(t, f, in);
    if (t->rank != &s.world.ranks[1] || f->type != odd.of)
        return stub_answer(t, f, in);
    switch (odd.act) {
    case AS_EVER:
        return stub_answer(t, f, in);
    case IS_STALE:
        return stub_answer_error(t, f->request, FANIN_ERR_STALE, "it has changed");
    case IS_REFUSED:
        return stub_answer_error(t, f->request, FANIN_ERR_UNSUPPORTED, "not by this");
    case IS_AWAY:
        return stub_answer_error(t, f->request, FANIN_ERR_PAUSED, "the run is paused");
    case IS_ANOTHER:
        encode_empty(&t->out, f->request, MSG_PONG);
        return true;
    case IS_END:
    case IS_NOTHING:
        return odd.act == IS_NOTHING;
    default:
        return send_page(t, f, in);
    }
}

static int set_up(void **state)
{
    fanin_client_config config;
    memset(&odd, 0, sizeof odd);
    memset(&s, 0, sizeof s);
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    config.max_catalog = CATALOG_MAX;
    stub_world_start_with(&s.world, RANKS, RANKS, PART, &config);
    s.world.client->plan_seed = 0; /* rank 0 gives the keys */
    s.run = tables_of(s.world.client, STUB_RUN);
    assert_non_null(s.run);
    for (size_t i = 0; i < RANKS; i++) {
        s.world.ranks[i].answer = answer;
        s.use[i] = true;
    }
    return 0;
}

static int tear_down(void **state)
{
    stub_world_stop(&s.world);
    for (size_t i = 0; i < RANKS; i++)
        box_table_free(&tables[i]);
    key_table_free(&many);
    memset(parts_asked, 0, sizeof parts_asked);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* Of what the ranks publish now. */
static fanin_status sync_now(void)
{
    s.error = (fanin_error)FANIN_ERROR_INIT;
    for (size_t i = 0; i < RANKS; i++) {
        const stub_rank *r = &s.world.ranks[i];
        s.announced[i] =
            (announcement){.valid = true, .step = r->step, .version = r->version};
        s.announced[i].keys = digest_of(r->keys.data, r->keys.size);
        memset(s.world.ranks[i].asked, 0, sizeof s.world.ranks[i].asked);
    }
    return tables_sync(s.world.client, s.run, s.announced, s.use,
                       deadline_in_ms(CALL_MS), &s.error);
}

static fanin_status sync_regions(const path_reader *path)
{
    s.error = (fanin_error)FANIN_ERROR_INIT;
    for (size_t i = 0; i < RANKS; i++)
        s.refused[i] = (fanin_error)FANIN_ERROR_INIT;
    assert_ok(path_states_open(s.world.client, s.run, &s.error), s.error);
    return path_state_regions(s.world.client, s.run, s.use, path,
                              deadline_in_ms(CALL_MS), s.refused, &s.error);
}

static const region_table *regions(size_t rank)
{
    return path_state_of(s.world.client, s.run, rank)->regions;
}

static void assert_asked(message_type type, unsigned first, unsigned second)
{
    assert_int_equal(s.world.ranks[0].asked[type], first);
    assert_int_equal(s.world.ranks[1].asked[type], second);
}

static void assert_whole(void)
{
    block b;
    uint64_t parts[RANKS];
    for (size_t i = 0; i < RANKS; i++) {
        assert_int_equal(box_table_count(s.run->shards[i].boxes), 1);
        box_table_get(s.run->shards[i].boxes, 0, NULL, &b, NULL);
        parts[i] = b.offset[0];
        assert_int_equal(b.extent[0], s.world.ranks[i].size);
        assert_int_equal(s.run->shards[i].version, s.world.ranks[i].version);
    }
    assert_int_equal(parts[1] - parts[0], s.world.ranks[0].size);
    assert_string_equal(s.run->keys->entries[0].name, "t");
    assert_int_equal(s.run->keys->bytes, RANKS * s.world.ranks[0].size);
}

/* The error is rank 1's. */
static void assert_error(const char *words)
{
    assert_int_equal(s.error.rank, 1);
    assert_says(s.error.message, words);
}

/* ------------------------------------------------------------- what is asked */

CASE(keys_come_from_one_boxes_from_all)
{
    assert_ok(sync_now(), s.error);
    assert_whole();
    assert_asked(MSG_KEYS, 1, 0);
    assert_asked(MSG_BOXES, 1, 1);
}

CASE(clients_ask_different_ranks_for_keys)
{
    s.world.client->plan_seed = 1;
    assert_ok(sync_now(), s.error);
    assert_whole();
    assert_asked(MSG_KEYS, 0, 1);
    tables_forget(s.run);
    s.use[1] = false;
    assert_ok(sync_now(), s.error);
    assert_asked(MSG_KEYS, 1, 0);
}

CASE(what_is_known_is_not_asked_again)
{
    assert_ok(sync_now(), s.error);
    stub_rank_commit(&s.world.ranks[1], 2); /* another step of the same tensors */
    assert_ok(sync_now(), s.error);
    assert_whole();
    assert_asked(MSG_KEYS, 0, 0);
    assert_asked(MSG_BOXES, 0, 0);
}

CASE(one_that_changed_is_asked)
{
    assert_ok(sync_now(), s.error);
    s.world.ranks[1].version++;
    assert_ok(sync_now(), s.error);
    assert_whole();
    assert_asked(MSG_KEYS, 0, 0);
    assert_asked(MSG_BOXES, 0, 1);
}

CASE(a_new_life_is_asked)
{
    assert_ok(sync_now(), s.error);
    stub_rank_hang_up(&s.world.ranks[0]);
    stub_world_settle(&s.world);
    stub_world_reconnect(&s.world);
    assert_ok(sync_now(), s.error);
    assert_whole();
    assert_asked(MSG_KEYS, 0, 0); /* the same digest: the same keys */
    assert_asked(MSG_BOXES, 1, 0);
}

CASE(other_keys_are_another_catalog)
{
    assert_ok(sync_now(), s.error);
    for (uint32_t i = 0; i < RANKS; i++)
        stub_rank_put(&s.world.ranks[i], i, RANKS, 3 * PART);
    assert_ok(sync_now(), s.error);
    assert_whole();
    assert_asked(MSG_KEYS, 1, 0);
    assert_asked(MSG_BOXES, 1, 1);
}

CASE(who_is_not_used_is_not_asked)
{
    s.use[0] = false;
    assert_ok(sync_now(), s.error);
    assert_asked(MSG_KEYS, 0, 1);
    assert_asked(MSG_BOXES, 0, 1);
    assert_null(s.run->shards[0].boxes);
    s.use[0] = true;
    assert_ok(sync_now(), s.error);
    assert_asked(MSG_KEYS, 0, 0);
    assert_asked(MSG_BOXES, 1, 0);
    assert_whole();
}

CASE(what_is_forgotten_is_asked_again)
{
    assert_ok(sync_now(), s.error);
    tables_forget(s.run);
    assert_null(s.run->keys);
    assert_ptr_equal(tables_of(s.world.client, STUB_RUN), s.run);
    assert_ptr_not_equal(tables_of(s.world.client, "lora:1"), s.run);
    assert_ok(sync_now(), s.error);
    assert_whole();
    assert_asked(MSG_KEYS, 1, 0);
    assert_asked(MSG_BOXES, 1, 1);
}

/* --------------------------------------------------------------- bad tables */

typedef struct odd_case {
    int act;
    fanin_status status;
    const char *words;
} odd_case;

CASE(may_come_in_pieces)
{
    s.use[0] = false; /* keys come from rank 1, too */
    for (message_type of = MSG_KEYS; of <= MSG_BOXES; of += MSG_BOXES - MSG_KEYS) {
        odd.of = of;
        odd.act = ALWAYS_PAGED;
        tables_forget(s.run);
        assert_ok(sync_now(), s.error);
        const buffer *b =
            of == MSG_KEYS ? &s.world.ranks[1].keys : &s.world.ranks[1].boxes;
        assert_asked(of, 0, (unsigned)b->size);
    }
}

/* Whatever comes, it is the rank's error, and the next attempt begins anew. */
CASE(what_is_not_a_table_is_refused)
{
    static const odd_case cases[] = {
        {IS_STALE, FANIN_ERR_STALE, "it has changed"},
        {IS_ANOTHER, FANIN_ERR_PROTOCOL, "does not fit the request"},
        {IS_ELSEWHERE, FANIN_ERR_PROTOCOL, "does not follow the one before"},
        {IS_EMPTY, FANIN_ERR_PROTOCOL, "sent a malformed page"},
        {IS_HUGE, FANIN_ERR_LIMIT, "larger than this client accepts"},
        {IS_BEYOND, FANIN_ERR_PROTOCOL, "sent a malformed page"},
        {IS_END, FANIN_ERR_CLOSED, "closed the connection"},
        {IS_NOTHING, FANIN_ERR_TIMEOUT, "waiting for rank 1"},
    };
    for (message_type of = MSG_KEYS; of <= MSG_BOXES; of += MSG_BOXES - MSG_KEYS) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            s.use[0] = of == MSG_BOXES;
            tables_forget(s.run);
            odd.of = of;
            odd.act = cases[i].act;
            assert_int_equal(sync_now(), cases[i].status);
            assert_error(cases[i].words);
            assert_null(s.run->shards[1].boxes);
            odd.act = AS_EVER;
            stub_world_reconnect(&s.world);
            s.use[0] = true;
            assert_ok(sync_now(), s.error);
            assert_whole();
        }
    }
}

CASE(a_table_must_be_right)
{
    stub_rank *r = &s.world.ranks[1];
    buffer_clear(&r->boxes);
    buffer_append(&r->boxes, "nonsense", 8);
    r->version++;
    assert_int_equal(sync_now(), FANIN_ERR_PROTOCOL);
    assert_error("rank 1 at ");
    assert_null(s.run->shards[1].boxes);
    stub_rank_put(r, 1, RANKS, PART);
    assert_ok(sync_now(), s.error);
    assert_whole();
}

CASE(keys_must_be_the_announced_ones)
{
    s.use[0] = false;
    assert_ok(sync_now(), s.error);
    s.announced[1].keys.bytes[3] ^= 1;
    assert_int_equal(tables_sync(s.world.client, s.run, s.announced, s.use,
                                 deadline_in_ms(CALL_MS), &s.error),
                     FANIN_ERR_PROTOCOL);
    assert_error("not the announced one");
}

/* Ranks whose key tables differ: in what. */
CASE(differences_are_told)
{
    static const key_entry t = {.name = "t",
                                .dtype = FANIN_DTYPE_U8,
                                .n_dims = 1,
                                .shape = {RANKS * PART},
                                .bytes = RANKS * PART};
    static const fanin_pair pair = {"r", "8"};
    struct {
        key_entry keys[2];
        uint32_t n, n_pairs;
        const char *key, *words;
    } cases[] = {
        {{t, t}, 2, 0, "u", "the key is on rank 1 but not on rank 0"},
        {{t}, 0, 0, "t", "the key is on rank 0 but not on rank 1"},
        {{t}, 1, 0, "t", "the key is U8 on rank 0 but I8 on rank 1"},
        {{t},
         1,
         0,
         "t",
         "ranks 0 and 1 give the key different global shapes: [32] and [16]"},
        {{t}, 1, 1, "", "ranks 0 and 1 have different metadata (at \"r\")"},
    };
    cases[0].keys[1].name = "u";
    cases[2].keys[0].dtype = FANIN_DTYPE_I8;
    cases[3].keys[0].shape[0] = cases[3].keys[0].bytes = PART;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        buffer *b = &s.world.ranks[1].keys;
        buffer_clear(b);
        key_table_encode(b, cases[i].keys, cases[i].n, &pair, cases[i].n_pairs);
        assert_int_equal(sync_now(), FANIN_ERR_MISMATCH);
        assert_error(cases[i].words);
        assert_string_equal(s.error.key, cases[i].key);
        assert_int_equal(s.error.rank, 1);
    }
}

static void cancel(void *client)
{
    fanin_client_cancel(client);
}

CASE(fetching_can_be_cancelled)
{
    odd.of = MSG_BOXES;
    odd.act = IS_NOTHING;
    stub_time_at_ms(CALL_MS / 2, cancel, s.world.client);
    assert_int_equal(sync_now(), FANIN_ERR_CANCELLED);
    odd.act = AS_EVER;
    assert_ok(sync_now(), s.error);
    assert_whole();
}

/* ----------------------------------------------------------------- regions */

CASE(regions_are_of_a_path)
{
    assert_ok(sync_now(), s.error);
    assert_ok(sync_regions(&cma_reader), s.error);
    assert_asked(MSG_REGIONS, 1, 1);
    for (size_t i = 0; i < RANKS; i++) {
        assert_int_equal(regions(i)->count, 1);
        assert_int_equal(regions(i)->entries[0].length, PART);
    }
    assert_ok(sync_regions(&cma_reader), s.error);
    assert_asked(MSG_REGIONS, 1, 1);
    assert_ok(sync_regions(&ucx_reader), s.error);
    assert_asked(MSG_REGIONS, 2, 2);
    s.world.ranks[1].version++;
    assert_ok(sync_now(), s.error);
    assert_null(regions(1));
    assert_ok(sync_regions(&ucx_reader), s.error);
    assert_asked(MSG_REGIONS, 0, 1);
}

/* Which concerns nobody else; that the publication is away concerns all. */
CASE(a_rank_may_refuse_its_regions)
{
    assert_ok(sync_now(), s.error);
    odd.of = MSG_REGIONS;
    odd.act = IS_REFUSED;
    assert_ok(sync_regions(&ucx_reader), s.error);
    assert_int_equal(s.refused[0].status, FANIN_OK);
    assert_int_equal(s.refused[1].status, FANIN_ERR_UNSUPPORTED);
    assert_non_null(strstr(s.refused[1].message, "not by this"));
    assert_non_null(regions(0));
    assert_null(regions(1));
    odd.act = IS_AWAY;
    assert_int_equal(sync_regions(&ucx_reader), FANIN_ERR_PAUSED);
    odd.act = IS_STALE;
    assert_int_equal(sync_regions(&ucx_reader), FANIN_ERR_STALE);
    odd.act = IS_END;
    assert_int_equal(sync_regions(&ucx_reader), FANIN_ERR_CLOSED);
    assert_error("closed the connection");
}

CASE(boxes_lie_in_regions)
{
    assert_ok(sync_now(), s.error);
    buffer_clear(&s.world.ranks[1].regions);
    region_table_encode(&s.world.ranks[1].regions, NULL, 0);
    assert_int_equal(sync_regions(&ucx_reader), FANIN_ERR_PROTOCOL);
    assert_error("has boxes in a region that its table does not list");
    assert_null(regions(1));
}

/* -------------------------------------------------------------------- parts */

/* Many tensors of two bytes, a byte a rank; each rank's first is split from the rule if @p
   explicit. */
static void publish_many(bool explicit)
{
    key_entry *entries = calloc(MANY, sizeof *entries);
    box_record *boxes = calloc(MANY, sizeof *boxes);
    char(*names)[8] = calloc(MANY, sizeof *names);
    assert_true(entries && boxes && names);
    for (uint32_t i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "t%05u", i);
        entries[i] = (key_entry){
            .name = names[i], .dtype = FANIN_DTYPE_U8, .n_dims = 1, .shape = {RANKS}};
    }
    for (size_t rank = 0; rank < RANKS; rank++) {
        stub_rank *r = &s.world.ranks[rank];
        for (uint32_t i = 0; i < MANY; i++) {
            uint64_t row = explicit && i == 0 ? RANKS - 1 - rank : rank;
            boxes[i] =
                (box_record){.key = i,
                             .block = {.n_dims = 1, .offset = {row}, .extent = {1}},
                             .place = {.offset = i, .packed = true}};
        }
        buffer_clear(&r->keys);
        buffer_clear(&r->boxes);
        key_table_encode(&r->keys, entries, MANY, NULL, 0);
        box_table_encode(&r->boxes, entries, MANY, boxes, MANY, (uint32_t)rank, RANKS);
        if (!many)
            assert_int_equal(
                key_table_decode(r->keys.data, r->keys.size, NULL, &many, NULL),
                FANIN_OK);
        assert_int_equal(box_table_decode(r->boxes.data, r->boxes.size, many, NULL,
                                          &tables[rank], NULL),
                         FANIN_OK);
        r->version++;
    }
    free(entries);
    free(boxes);
    free(names);
}

/* Every @p step-th key from the first on. */
typedef struct wish {
    uint32_t first, step;
} wish;

static digest wish_name(void *cookie)
{
    return digest_of(cookie, sizeof(wish));
}

static void wish_mark(void *cookie, const key_table *keys, bool *marks)
{
    const wish *w = cookie;
    for (uint32_t key = w->first; key < keys->count; key += w->step)
        marks[key] = true;
}

static fanin_status sync_wish(uint32_t first, uint32_t step)
{
    wish w = {first, step};
    const key_need need = {.cookie = &w, .name = wish_name, .mark = wish_mark};
    s.run->need = &need;
    fanin_status status = sync_now();
    s.run->need = NULL;
    return status;
}

/* What is known of each rank, by the numbers that the rank gave. */
static void assert_known(uint32_t first, uint32_t step)
{
    for (size_t i = 0; i < RANKS; i++) {
        assert_true(tables_at_hand(s.run, i));
        for (uint32_t key = first; key < MANY; key += step) {
            uint64_t n;
            box_place place;
            assert_int_equal(box_table_of_key(s.run->shards[i].boxes, key, &n), key);
            assert_int_equal(n, 1);
            box_table_get(s.run->shards[i].boxes, key, NULL, NULL, &place);
            assert_int_equal(place.offset, key);
        }
    }
}

static void assert_boxes(uint64_t first, uint64_t second)
{
    assert_int_equal(box_table_count(s.run->shards[0].boxes), first);
    assert_int_equal(box_table_count(s.run->shards[1].boxes), second);
}

CASE(only_what_is_wanted_is_fetched)
{
    for (int explicit = 0; explicit < 2; explicit ++) {
        tear_down(NULL);
        set_up(NULL);
        publish_many(explicit);
        assert_ok(sync_wish(3, 10), s.error);
        assert_known(3, 10);
        assert_boxes(MANY / 10, MANY / 10);
        assert_int_equal(parts_asked[0] + parts_asked[1], RANKS);
        assert_ok(sync_wish(3, 10), s.error);  /* it is known */
        assert_ok(sync_wish(13, 20), s.error); /* and so is some of it */
        assert_int_equal(parts_asked[0] + parts_asked[1], RANKS);
        assert_ok(sync_now(), s.error); /* nobody says what is wanted */
        assert_boxes(MANY / 10, MANY / 10);
    }
}

CASE(what_is_missing_is_fetched_and_joined)
{
    for (int explicit = 0; explicit < 2; explicit ++) {
        tear_down(NULL);
        set_up(NULL);
        publish_many(explicit);
        assert_ok(sync_wish(3, 10), s.error);
        uint64_t serial = s.run->shards[1].serial;
        assert_ok(sync_wish(4, 10), s.error);
        assert_known(3, 10);
        assert_known(4, 10);
        assert_boxes(MANY / 5, MANY / 5);
        assert_int_not_equal(s.run->shards[1].serial, serial);
        /* a new version of one: all that was ever wanted, of that one */
        s.world.ranks[1].version++;
        assert_ok(sync_wish(4, 10), s.error);
        assert_asked(MSG_BOXES, 0, 1);
        assert_known(3, 10);
    }
}

CASE(who_knows_no_parts_gives_all)
{
    static const int acts[] = {IS_OLD, REFUSES_PART};
    for (size_t i = 0; i < 2; i++) {
        tear_down(NULL);
        set_up(NULL);
        publish_many(false);
        odd.of = MSG_BOXES;
        odd.act = acts[i];
        assert_ok(sync_wish(3, 10), s.error);
        assert_known(3, 10);
        assert_boxes(MANY / 10, MANY);
        assert_ok(sync_wish(4, 10), s.error);
        assert_asked(MSG_BOXES, 1, 0);
    }
}

CASE(nearly_all_is_all)
{
    publish_many(false);
    assert_ok(sync_wish(0, 3), s.error);
    assert_boxes(MANY / 3, MANY / 3);
    assert_ok(sync_wish(1, 2), s.error);
    assert_ok(sync_wish(2, 6), s.error);
    assert_boxes(MANY, MANY);
    assert_int_equal(parts_asked[0], 2); /* the last time all were asked for */
}

CASE(other_keys_than_asked_for_are_refused)
{
    publish_many(false);
    odd.of = MSG_BOXES;
    odd.act = IS_ASKEW;
    assert_int_equal(sync_wish(3, 10), FANIN_ERR_PROTOCOL);
    assert_error("boxes of other keys than those asked for");
    odd.act = AS_EVER;
    assert_ok(sync_wish(3, 10), s.error);
    assert_known(3, 10);
}

/* More ranges than a request may have: what lies between is fetched as well. */
CASE(scattered_keys_are_fetched_with_their_gaps)
{
    publish_many(false);
    assert_ok(sync_wish(1, 3), s.error);
    assert_boxes(MANY / 3, MANY / 3);
    assert_ok(sync_wish(0, 2), s.error);
    assert_known(0, 2);
    assert_known(1, 3);
    assert_ok(sync_wish(0, 2), s.error);
    assert_int_equal(parts_asked[0], 2);
}

/* ------------------------------------------------------------------- large */

/* Tables that threads decode: of whoever is at fault, and the others' are kept. */
CASE(a_large_table_that_lies_is_its_ranks)
{
    for (size_t liar = 0; liar < RANKS; liar++) {
        publish_many(true);
        buffer *b = &s.world.ranks[liar].boxes;
        b->data[b->size / 2] ^= 0x80;
        assert_int_equal(sync_now(), FANIN_ERR_PROTOCOL);
        assert_int_equal(s.error.rank, liar);
        assert_says(s.error.message, "box table, box ");
        assert_null(s.run->shards[liar].boxes);
        assert_int_equal(box_table_count(s.run->shards[1 - liar].boxes), MANY);
        b->data[b->size / 2] ^= 0x80;
        assert_ok(sync_now(), s.error);
        assert_asked(MSG_BOXES, liar == 0, liar == 1);
        assert_known(0, 1);
        tables_forget(s.run);
        for (size_t i = 0; i < RANKS; i++)
            box_table_free(&tables[i]);
    }
}

CASE(both_may_lie)
{
    publish_many(true);
    for (size_t i = 0; i < RANKS; i++)
        s.world.ranks[i].boxes.size -= 1;
    assert_int_equal(sync_now(), FANIN_ERR_PROTOCOL);
    assert_int_equal(s.error.rank, 0); /* the first one, whichever thread was quicker */
    for (size_t i = 0; i < RANKS; i++)
        s.world.ranks[i].boxes.size += 1;
    assert_ok(sync_now(), s.error);
    assert_known(0, 1);
}

CASE(who_stops_in_a_large_table_is_named)
{
    publish_many(true);
    odd.of = MSG_BOXES;
    odd.act = IS_HALF;
    assert_int_equal(sync_now(), FANIN_ERR_TIMEOUT);
    assert_error("waiting for rank 1");
    stub_time_at_ms(CALL_MS / 2, cancel, s.world.client);
    assert_int_equal(sync_now(), FANIN_ERR_CANCELLED);
    odd.act = AS_EVER;
    stub_world_reconnect(&s.world);
    assert_ok(sync_now(), s.error);
    assert_known(0, 1);
}
