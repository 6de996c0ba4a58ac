/* SPDX-License-Identifier: Apache-2.0 */
#include "error_set.h"
#include "testing.h"

static const fanin_status codes[] = {
    FANIN_OK,
    FANIN_ERR_ARGUMENT,
    FANIN_ERR_EXISTS,
    FANIN_ERR_NOT_FOUND,
    FANIN_ERR_STATE,
    FANIN_ERR_STALE,
    FANIN_ERR_TIMEOUT,
    FANIN_ERR_CANCELLED,
    FANIN_ERR_SUPERSEDED,
    FANIN_ERR_PAUSED,
    FANIN_ERR_UNREACHABLE,
    FANIN_ERR_CLOSED,
    FANIN_ERR_LIMIT,
    FANIN_ERR_AUTH,
    FANIN_ERR_PROTOCOL,
    FANIN_ERR_VERSION,
    FANIN_ERR_WORLD,
    FANIN_ERR_INCOMPLETE,
    FANIN_ERR_UNSUPPORTED,
    FANIN_ERR_MISMATCH,
    FANIN_ERR_IO,
    FANIN_ERR_MEMORY,
    FANIN_ERR_TRANSPORT,
    FANIN_ERR_FORKED,
    FANIN_ERR_INTERNAL,
};

TEST(every_code_has_a_name_and_a_text)
{
    size_t n = sizeof codes / sizeof *codes;
    for (size_t i = 0; i < n; i++) {
        assert_string_not_equal(fanin_status_name(codes[i]), "FANIN_ERR_UNKNOWN");
        for (size_t j = 0; j < i; j++) {
            assert_string_not_equal(fanin_status_name(codes[i]),
                                    fanin_status_name(codes[j]));
            assert_string_not_equal(fanin_status_text(codes[i]),
                                    fanin_status_text(codes[j]));
        }
    }
    assert_string_equal(fanin_status_name(FANIN_ERR_STALE), "FANIN_ERR_STALE");
}

/* Whoever returns an error without saying what to do says the usual thing, also for a code of a
   later version. */
TEST(every_error_has_a_remedy)
{
    static const fanin_status later[] = {-199, -299, -399, -499, -599, -699};
    const error_place none = {.remedy =
                                  ""}; /* as a peer of an earlier version leaves it */
    fanin_error e = FANIN_ERROR_INIT;
    for (size_t i = 1; i < sizeof codes / sizeof *codes; i++) {
        (void)error_set(&e, codes[i], NULL, "x");
        assert_string_not_equal(e.remedy, "");
        (void)error_set_errno(&e, codes[i], EIO, &none, "x");
        assert_string_not_equal(e.remedy, "");
    }
    for (size_t i = 0; i < sizeof later / sizeof *later; i++) {
        (void)error_set(&e, later[i], &none, "x");
        assert_string_not_equal(e.remedy, "");
    }
}

/* What a peer is called may end lines or not be seen; a key stays what it is, so that it can be
   looked up. */
TEST(a_message_is_one_line)
{
    fanin_error error = FANIN_ERROR_INIT;
    const error_place place = {.key = "a\nb"};
    (void)error_set(&error, FANIN_ERR_IO, &place, "the run %s",
                    "x\ny\033z\xe2\x80\x8b.");
    assert_string_equal(error.message, "the run x y z   .");
    assert_string_equal(error.key, "a\nb");
}

TEST(unknown_codes_are_described_by_their_hundred)
{
    assert_string_equal(fanin_status_name(-299), "FANIN_ERR_UNKNOWN");
    assert_non_null(strstr(fanin_status_text(-299), "pull"));
    assert_non_null(strstr(fanin_status_text(-399), "connection"));
    assert_string_equal(fanin_status_text(-4242), "unknown status");
    assert_string_equal(fanin_status_text(7), "unknown status");
    assert_true(fanin_status_is_retryable(-299));
    assert_false(fanin_status_is_retryable(-499));
}

TEST(only_what_may_pass_by_itself_is_retryable)
{
    assert_true(fanin_status_is_retryable(FANIN_ERR_STALE));
    assert_true(fanin_status_is_retryable(FANIN_ERR_TIMEOUT));
    assert_true(fanin_status_is_retryable(FANIN_ERR_PAUSED));
    assert_true(fanin_status_is_retryable(FANIN_ERR_UNREACHABLE));
    assert_true(fanin_status_is_retryable(FANIN_ERR_CLOSED));
    assert_false(fanin_status_is_retryable(FANIN_OK));
    assert_false(fanin_status_is_retryable(FANIN_ERR_SUPERSEDED));
    assert_false(fanin_status_is_retryable(FANIN_ERR_CANCELLED));
    assert_false(fanin_status_is_retryable(FANIN_ERR_ARGUMENT));
    assert_false(fanin_status_is_retryable(FANIN_ERR_WORLD));
}

TEST(all_fields_are_filled)
{
    fanin_error e = FANIN_ERROR_INIT;
    error_place place = {.phase = "read",
                         .address = "127.0.0.1:6003",
                         .key = "lora:0:a",
                         .remedy = "pull again",
                         .rank_plus_1 = 4,
                         .ucx_status = -3};
    assert_int_equal(error_set(&e, FANIN_ERR_STALE, &place, "step %d is gone", 7),
                     FANIN_ERR_STALE);
    assert_int_equal(e.status, FANIN_ERR_STALE);
    assert_int_equal(e.rank, 3);
    assert_int_equal(e.ucx_status, -3);
    assert_int_equal(e.sys_errno, 0);
    assert_string_equal(e.phase, "read");
    assert_string_equal(e.address, "127.0.0.1:6003");
    assert_string_equal(e.key, "lora:0:a");
    assert_string_equal(e.message, "step 7 is gone");
    assert_string_equal(e.remedy, "pull again");

    /* Nothing of an earlier failure stays behind. */
    error_set(&e, FANIN_ERR_LIMIT, NULL, "full");
    assert_int_equal(e.rank, -1);
    assert_string_equal(e.key, "");
    assert_string_not_equal(e.remedy, "pull again");
}

TEST(system_errors_carry_their_number)
{
    fanin_error e = FANIN_ERROR_INIT;
    assert_int_equal(error_set_errno(&e, FANIN_ERR_IO, ENOSPC, NULL, "cannot write %s",
                                     "fanin.json"),
                     FANIN_ERR_IO);
    assert_int_equal(e.sys_errno, ENOSPC);
    assert_string_equal(e.message, "cannot write fanin.json: No space left on device");
    assert_int_equal(error_set_memory(&e), FANIN_ERR_MEMORY);
    assert_string_not_equal(e.remedy, "");
}

TEST(without_descriptors_the_limit_is_the_remedy)
{
    const error_place place = {.remedy = "is the trainer running?"};
    fanin_error e = FANIN_ERROR_INIT;
    error_set_errno(&e, FANIN_ERR_IO, EMFILE, NULL, "cannot make a socket");
    assert_non_null(strstr(e.remedy, "ulimit -n"));
    error_set_errno(&e, FANIN_ERR_IO, ENFILE, NULL, "cannot make a socket");
    assert_non_null(strstr(e.remedy, "fs.file-max"));
    error_set_errno(&e, FANIN_ERR_IO, EIO, NULL, "cannot make a socket");
    assert_null(strstr(e.remedy, "ulimit"));
    error_set_errno(&e, FANIN_ERR_IO, EMFILE, &place, "who makes it knows better");
    assert_string_equal(e.remedy, place.remedy);
    assert_non_null(strstr(error_remedy(EMFILE, place.remedy), "ulimit -n"));
    assert_string_equal(error_remedy(EIO, place.remedy), place.remedy);
}

TEST(without_memory_it_is_the_remedy)
{
    fanin_error e = FANIN_ERROR_INIT;
    error_set_errno(&e, FANIN_ERR_IO, ENOBUFS, NULL, "cannot make a socket");
    assert_non_null(strstr(e.remedy, "free memory"));
    error_set_errno(&e, FANIN_ERR_IO, ENOMEM, NULL, "cannot make a socket");
    assert_non_null(strstr(e.remedy, "free memory"));
}

TEST(no_error_wanted)
{
    assert_int_equal(error_set(NULL, FANIN_ERR_IO, NULL, "x"), FANIN_ERR_IO);
    assert_int_equal(error_set_errno(NULL, FANIN_ERR_IO, 1, NULL, "x"), FANIN_ERR_IO);
    assert_int_equal(error_set_memory(NULL), FANIN_ERR_MEMORY);
    error_copy(NULL, NULL);
}

TEST(long_texts_are_cut_between_characters)
{
    fanin_error e = FANIN_ERROR_INIT;
    char key[2000];
    memset(key, 'k', sizeof key);
    key[sizeof key - 1] = '\0';
    memcpy(key + 638, "\xc3\xa4", 2); /* would end in the NUL's place */
    char text[3000];
    memset(text, 't', sizeof text);
    text[sizeof text - 1] = '\0';
    error_set(&e, FANIN_ERR_IO, &(error_place){.key = key}, "%s", text);
    assert_int_equal(strlen(e.key), 638);
    assert_int_equal(strlen(e.message), sizeof e.message - 1);
    error_set_errno(&e, FANIN_ERR_IO, EIO, NULL, "%s", text);
    assert_int_equal(strlen(e.message), sizeof e.message - 1);
}

TEST(older_and_newer_structs_are_respected)
{
    struct {
        fanin_error e;
        char guard[64];
    } newer, older;
    memset(&newer, 0x5a, sizeof newer);
    memset(&older, 0x5a, sizeof older);
    newer.e.struct_size = sizeof newer;
    older.e.struct_size = offsetof(fanin_error, key);
    error_place place = {.address = "a:1", .key = "k"};
    error_set(&newer.e, FANIN_ERR_IO, &place, "x");
    error_set(&older.e, FANIN_ERR_IO, &place, "x");
    assert_string_equal(newer.e.message, "x");
    assert_int_equal(newer.e.struct_size, sizeof newer);
    for (size_t i = 0; i < sizeof newer.guard; i++)
        assert_int_equal(newer.guard[i], 0x5a);
    assert_string_equal(older.e.address, "a:1");
    for (size_t i = offsetof(fanin_error, key); i < sizeof older.e; i++)
        assert_int_equal(((char *)&older.e)[i], 0x5a);

    fanin_error copy = FANIN_ERROR_INIT;
    error_copy(&copy, &older.e);
    assert_string_equal(copy.address, "a:1");
    assert_int_equal(copy.struct_size, sizeof copy);
    assert_string_equal(copy.key, "");
}
