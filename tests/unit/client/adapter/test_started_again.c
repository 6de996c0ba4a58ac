/* SPDX-License-Identifier: Apache-2.0 */
/* A directory holds the step of ranks by one life of their processes each: what came of others is
   replaced, unless those that are still there have all of it. */
#include "adapter/adapter.h"
#include "log_catcher.h"
#include "testing.h"

#include <fcntl.h>
#include <jansson.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RANKS = 4, BYTES = 16384 };

static key_entry entry = {.name = "w",
                          .dtype = FANIN_DTYPE_F32,
                          .n_dims = 1,
                          .shape = {BYTES / 4},
                          .bytes = BYTES};
static const key_table keys = {.entries = &entry, .count = 1};

static char root[64], place[80];
static identity_rank ranks[RANKS];
static struct {
    unsigned times;
    bool which[RANKS], answer;
} asked;
static fanin_error error = FANIN_ERROR_INIT;

static bool suffices(void *cookie, const bool *which)
{
    assert_ptr_equal(cookie, &asked);
    memcpy(asked.which, which, sizeof asked.which);
    asked.times++;
    return asked.answer;
}

static const adapter_identity identity = {.publication = "full:0",
                                          .step = 7,
                                          .ranks = ranks,
                                          .n_ranks = RANKS,
                                          .suffice = suffices,
                                          .cookie = &asked};

/* Ranks 10 to 12 have the step; of the fourth peer nothing is known. */
static int setup(void **state)
{
    memset(&asked, 0, sizeof asked);
    for (uint32_t i = 0; i < RANKS; i++) {
        ranks[i] = (identity_rank){.has_step = i < 3, .rank = 10 + i};
        memset(ranks[i].incarnation, (int)(0xa0 + i), sizeof ranks[i].incarnation);
    }
    strcpy(root, "/tmp/again-fanin-XXXXXX");
    if (!mkdtemp(root))
        return -1;
    snprintf(place, sizeof place, "%s/model", root);
    return 0;
}

static int teardown(void **state)
{
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

#define CASE(name) TEST_WITH(name, setup, teardown)

static adapter *open_model(void)
{
    static const logger log = {.fn = log_catch};
    adapter *a;
    const uint64_t *to;
    uint64_t span;
    assert_works(adapter_open(&(adapter_terms){.directory = place,
                                               .at = deadline_in_ms(20000),
                                               .log = log,
                                               .is_model = true},
                              &a, ERROR));
    assert_works(adapter_prepare(a, &keys, "full:0", &to, &span, ERROR));
    return a;
}

static fanin_status fill(adapter *a, uint8_t with)
{
    const uint64_t *to;
    uint64_t span;
    uint8_t *base;
    assert_works(adapter_prepare(a, &keys, "full:0", &to, &span, ERROR));
    assert_works(adapter_map(a, &base, ERROR));
    memset(base + to[0], with, BYTES);
    adapter_landed(a, to[0], BYTES);
    return adapter_publish(a, &identity, &error);
}

/* The last byte of the tensor. */
static uint8_t held(void)
{
    char path[120];
    uint8_t byte = 0;
    snprintf(path, sizeof path, "%s/model.safetensors", place);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    assert_int_equal(fstat(file, &info), 0);
    assert_int_equal(pread(file, &byte, 1, info.st_size - 1), 1);
    close(file);
    return byte;
}

/* A pull whose bytes are @p with. @p why: what is logged; NULL: it finds them there. */
static void pull(uint8_t with, const char *why)
{
    bool reuse = true;
    adapter *a = open_model();
    log_listen("started-again");
    assert_works(adapter_reusable(a, &identity, &reuse, ERROR));
    assert_int_equal(reuse, !why);
    log_expect(why != NULL, why ? why : "");
    if (why)
        assert_ok(fill(a, with), error);
    adapter_close(&a);
    if (why)
        assert_int_equal(held(), with);
}

static void make(uint8_t with)
{
    adapter *a = open_model();
    assert_ok(fill(a, with), error);
    adapter_close(&a);
}

static void put(const char *name)
{
    char path[120];
    snprintf(path, sizeof path, "%s/%s", place, name);
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    fclose(file);
}

static bool is_there(const char *name)
{
    char path[120];
    snprintf(path, sizeof path, "%s/%s", place, name);
    return access(path, F_OK) == 0;
}

CASE(a_rank_that_was_started_again)
{
    make(1);
    pull(9, NULL);
    ranks[1].incarnation[15]++;
    pull(2, "holds step 7 of full:0, but rank 11 was started again since");
    assert_int_equal(asked.times, 1);
    pull(9, NULL);
    assert_int_equal(asked.times, 1);
    ranks[2].incarnation[0]++;
    pull(3, "rank 12 was started again since: it is pulled again");
}

/* The others have all that it had: their bytes are as good. */
CASE(a_replica_that_was_started_again)
{
    const bool others[RANKS] = {true, false, true, false};
    make(1);
    ranks[1].incarnation[15]++;
    asked.answer = true;
    pull(9, NULL);
    assert_int_equal(asked.times, 1);
    assert_memory_equal(asked.which, others, sizeof others);
}

CASE(a_rank_that_is_gone_or_behind)
{
    make(1);
    ranks[1].has_step = false;
    memset(ranks[1].incarnation, 0, sizeof ranks[1].incarnation);
    pull(9, NULL); /* the others suffice, or there would be no plan */
    assert_int_equal(asked.times, 0);
}

CASE(a_rank_that_had_no_step_then)
{
    make(1);
    ranks[3].has_step = true;
    asked.answer = true;
    pull(9, NULL);
    asked.answer = false;
    pull(2, "rank 13 did not have it then");
    /* One that was started again says more. */
    ranks[3] = (identity_rank){.has_step = true, .rank = 14};
    ranks[0].incarnation[3]++;
    pull(3, "rank 10 was started again");
}

CASE(a_directory_that_does_not_say)
{
    char path[120];
    make(1);
    snprintf(path, sizeof path, "%s/fanin.json", place);
    json_t *said = json_load_file(path, 0, NULL);
    assert_int_equal(json_object_size(json_object_get(said, "incarnations")), 3);
    assert_int_equal(json_object_del(said, "incarnations"), 0);
    assert_int_equal(json_dump_file(said, path, 0), 0);
    json_decref(said);
    pull(2, "it does not say of which incarnations of the ranks");
    pull(9, NULL);
}

/* What pulls have not made is nobody's to replace. */
CASE(a_file_of_the_users)
{
    bool reuse = true;
    make(1);
    put("tokenizer.json");
    pull(9, NULL); /* as before: it does no harm */
    ranks[0].incarnation[0]++;
    adapter *a = open_model();
    log_listen("started-again");
    assert_int_equal(adapter_reusable(a, &identity, &reuse, &error), FANIN_ERR_EXISTS);
    adapter_close(&a);
    log_expect(0, "");
    assert_says(error.message, "but rank 10 was started again since");
    assert_says(error.message, "'tokenizer.json' in it was made by no pull");
    assert_false(reuse);
    assert_int_equal(held(), 1);
}

/* It comes while the bytes come, or takes the place of what was to be replaced. */
CASE(a_file_that_comes_meanwhile)
{
    static const char *const names[] = {"tokenizer.json", "config.json"};
    char other[200];
    bool reuse;
    make(1);
    ranks[0].incarnation[0]++;
    for (size_t i = 0; i < 2; i++) {
        adapter *a = open_model();
        assert_works(adapter_reusable(a, &identity, &reuse, ERROR));
        put(names[i]);
        assert_int_equal(fill(a, 2), FANIN_ERR_EXISTS);
        adapter_close(&a);
        assert_says(error.message, names[i]);
        assert_int_equal(held(), 1);
        assert_true(is_there(names[i]));
        snprintf(other, sizeof other, "%s/%s", place, names[i]);
        assert_int_equal(unlink(other), 0);
    }
    adapter *a = open_model();
    assert_works(adapter_reusable(a, &identity, &reuse, ERROR));
    snprintf(other, sizeof other, "%s/aside", root);
    assert_int_equal(rename(place, other), 0);
    assert_int_equal(mkdir(place, 0755), 0);
    put("mine");
    assert_int_equal(fill(a, 2), FANIN_ERR_EXISTS);
    adapter_close(&a);
    assert_says(error.message, "was exchanged while its content was pulled");
    assert_true(is_there("mine"));
    snprintf(other, sizeof other, "rm -r '%s' && [ \"$(ls -A '%s')\" = aside ]", place,
             root);
    assert_int_equal(system(other), 0);
}

/* Removed by hand meanwhile: there is nothing to replace. */
CASE(a_directory_that_goes_meanwhile)
{
    bool reuse;
    char command[120];
    make(1);
    ranks[0].incarnation[0]++;
    adapter *a = open_model();
    assert_works(adapter_reusable(a, &identity, &reuse, ERROR));
    snprintf(command, sizeof command, "rm -r '%s'", place);
    assert_int_equal(system(command), 0);
    assert_ok(fill(a, 2), error);
    adapter_close(&a);
    assert_int_equal(held(), 2);
}
