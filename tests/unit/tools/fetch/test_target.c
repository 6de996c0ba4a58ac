/* SPDX-License-Identifier: Apache-2.0 */
/* Targets and durations as the tool understands them. */
#include "fetch/options.h"
#include "fetch/target.h"
#include "testing.h"

#include <sys/stat.h>

/* Parses and gives the addresses joined by blanks; "" if it was refused. */
static const char *joined(const char *text, uint32_t world_size, fanin_status *status)
{
    static char out[4096];
    fanin_error error = FANIN_ERROR_INIT;
    target t;
    out[0] = '\0';
    *status = target_parse(text, world_size, &t, &error);
    if (*status != FANIN_OK) {
        assert_null(t.addresses);
        assert_true(error.message[0] != '\0');
    }
    for (uint32_t i = 0; i < t.count; i++)
        snprintf(out + strlen(out), sizeof out - strlen(out), "%s%s", i > 0 ? " " : "",
                 t.addresses[i]);
    target_free(&t);
    return out;
}

static void expect(const char *text, uint32_t world_size, const char *addresses)
{
    fanin_status status;
    assert_string_equal(joined(text, world_size, &status), addresses);
    assert_int_equal(status, FANIN_OK);
}

static void refuse(const char *text, uint32_t world_size)
{
    fanin_status status;
    joined(text, world_size, &status);
    assert_int_equal(status, FANIN_ERR_ARGUMENT);
}

TEST(lists_and_base_ports)
{
    expect("h:6000", 0, "h:6000");
    expect("h:6000", 3, "h:6000 h:6001 h:6002");
    expect("h:6000,g:1", 0, "h:6000 g:1");
    expect("h:6000,g:1", 2, "h:6000 g:1");
    expect("[::1]:6000", 2, "[::1]:6000 [::1]:6001");
    expect("h:6000, g:1 ,f:2", 0, "h:6000 g:1 f:2");
    expect("10.0.0.1:65535", 1, "10.0.0.1:65535");
}

TEST(malformed_words)
{
    static const char *const words[] = {
        "",     "h",    "h:",   ":1",       "h:0",      "h:65536", "h:1x",    "h:-1",
        "h: 1", "h:1,", ",h:1", "h:1,,g:2", "::1:6000", "[]:6000", "h:999999"};
    for (size_t i = 0; i < sizeof(words) / sizeof words[0]; i++)
        refuse(words[i], 0);
    refuse("h:65535", 2);
    refuse("h:1,g:2", 3);
    refuse("h:1", 100000);
}

static char path[] = "/tmp/fanin-target-XXXXXX.json";

static int make_file(void **state)
{
    int descriptor = mkstemps(path, 5);
    return descriptor < 0 ? -1 : close(descriptor);
}

static int remove_file(void **state)
{
    return unlink(path);
}

static const char *file_with(const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
    return path;
}

/* Calls of read() that this process has made. */
static unsigned long reads_made(void)
{
    unsigned long calls = 0;
    char line[128];
    FILE *file = fopen("/proc/self/io", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        (void)sscanf(line, "syscr: %lu", &calls);
    if (file != NULL)
        fclose(file);
    return calls;
}

/* A call for each byte is what takes the time of large ones. */
TEST(large_files_are_read_in_pieces)
{
    static char text[256 << 10];
    int begun = snprintf(text, sizeof text,
                         "{\"host\":\"h\",\"base_port\":6000,\"world_size\":1}");
    memset(text + begun, ' ', sizeof text - 1 - (size_t)begun);
    file_with(text);
    unsigned long before = reads_made();
    if (before == 0) {
        skip(); /* a kernel that does not count */
    }
    expect(path, 0, "h:6000");
    assert_true(reads_made() - before < 4096);
}

TEST(info_files)
{
    expect(
        file_with("{\"run_idx\":0,\"host\":\"h\",\"base_port\":6000,\"world_size\":2,"
                  "\"more\":[1]}"),
        0, "h:6000 h:6001");
    expect(file_with("{\"host\":\"fd00::1\",\"base_port\":1,\"world_size\":1}"), 1,
           "[fd00::1]:1");
    expect(file_with(
               "{\"world_size\":4,\"hosts\":[{\"host\":\"a\",\"base_port\":10,"
               "\"ranks\":[3,1]},{\"host\":\"b\",\"base_port\":20,\"ranks\":[0,2]}]}"),
           0, "b:20 a:11 b:22 a:13");
    expect(file_with("{\"hosts\":[{\"host\":\"a\",\"base_port\":10,\"ranks\":2},"
                     "{\"host\":\"b\",\"base_port\":10,\"ranks\":1}]}"),
           0, "a:10 a:11 b:12");
}

TEST(info_files_name_the_run)
{
    target t;
    assert_works(target_parse(file_with("{\"run_idx\":7,\"host\":\"h\",\"base_port\":1,"
                                        "\"world_size\":1}"),
                              0, &t, ERROR));
    assert_string_equal(t.run, "7");
    target_free(&t);
    assert_works(target_parse(file_with("{\"run_idx\":\"best\",\"host\":\"h\","
                                        "\"base_port\":1,\"world_size\":1}"),
                              0, &t, ERROR));
    assert_string_equal(t.run, "best");
    target_free(&t);
}

/* What is chosen of a file with this run and these publications; "": none, the choices are in @p
   all. */
static void chooses(const char *fields, const char *wanted, const char *all)
{
    char text[512], choices[TARGET_CHOICES];
    target t;
    snprintf(text, sizeof text, "{\"host\":\"h\",\"base_port\":1,\"world_size\":1%s}",
             fields);
    assert_works(target_parse(file_with(text), 0, &t, ERROR));
    const char *chosen = target_choose(&t, choices);
    assert_string_equal(chosen ? chosen : "", wanted);
    assert_string_equal(choices, all);
    target_free(&t);
}

TEST(info_files_name_publications)
{
    chooses("", "0", "");
    chooses(",\"run_idx\":7", "7", "");
    chooses(",\"publications\":[]", "0", "");
    chooses(",\"publications\":null,\"run_idx\":7", "7", "");
    chooses(",\"publications\":[\"full:0\"]", "full:0", "full:0");
    chooses(",\"publications\":[\"full:0\"],\"run_idx\":0", "full:0", "full:0");
    chooses(",\"publications\":[\"full:0\"],\"run_idx\":3", "full:0", "full:0");
    chooses(",\"publications\":[\"full:0\",\"kv:1\",\"full:0\"]", "full:0", "full:0");
    chooses(",\"publications\":[\"full:0\",\"lora:a\"],\"run_idx\":\"a\"", "lora:a",
            "full:0, lora:a");
    chooses(",\"publications\":[\"full:0\",\"lora:a\"]", "", "full:0, lora:a");
    chooses(",\"publications\":[\"full:0\",\"lora:0\"],\"run_idx\":0", "",
            "full:0, lora:0");
    refuse(file_with("{\"host\":\"h\",\"base_port\":1,\"world_size\":1,"
                     "\"publications\":\"full:0\"}"),
           0);
    refuse(file_with("{\"host\":\"h\",\"base_port\":1,\"world_size\":1,"
                     "\"publications\":[0]}"),
           0);
}

TEST(info_files_name_world_and_job)
{
    static const uint8_t id[FANIN_WORLD_ID_SIZE] = {0x0a, [15] = 0xff};
    static const uint8_t none[FANIN_WORLD_ID_SIZE];
    target t;
    assert_works(
        target_parse(file_with("{\"host\":\"h\",\"base_port\":1,\"world_size\":1,"
                               "\"server_name\":\"job\",\"world_id\":"
                               "\"0A0000000000000000000000000000ff\"}"),
                     0, &t, ERROR));
    assert_memory_equal(t.world_id, id, sizeof id);
    assert_string_equal(t.server_name, "job");
    assert_string_equal(t.file, path);
    target_free(&t);
    assert_works(
        target_parse(file_with("{\"host\":\"h\",\"base_port\":1,\"world_size\":1,"
                               "\"server_name\":null,\"world_id\":null,"
                               "\"run_idx\":null}"),
                     0, &t, ERROR));
    assert_memory_equal(t.world_id, none, sizeof none);
    assert_null(t.server_name);
    assert_string_equal(t.run, "");
    target_free(&t);
}

TEST(directories)
{
    char directory[] = "/tmp/fanin-target-XXXXXX";
    char file[64];
    fanin_status status;
    assert_non_null(mkdtemp(directory));
    joined(directory, 0, &status);
    assert_int_equal(status, FANIN_ERR_NOT_FOUND);
    snprintf(file, sizeof file, "%s/nixl_info.json", directory);
    assert_int_equal(symlink(file_with("{\"host\":\"h\",\"base_port\":6000,"
                                       "\"world_size\":2}"),
                             file),
                     0);
    expect(directory, 0, "h:6000 h:6001");
    expect(file, 0, "h:6000 h:6001");
    /* Without a slash: a name that exists. */
    char *here = getcwd(NULL, 0);
    assert_non_null(here);
    assert_int_equal(chdir("/tmp"), 0);
    expect(directory + strlen("/tmp/"), 0, "h:6000 h:6001");
    assert_int_equal(chdir(here), 0);
    free(here);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(mkfifo(file, 0600), 0);
    refuse(file, 0);
    refuse(directory, 0);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rmdir(directory), 0);
}

TEST(a_forgotten_port)
{
    fanin_error error = FANIN_ERROR_INIT;
    target t;
    assert_int_equal(target_parse("127.0.0.1", 0, &t, &error), FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "'127.0.0.1' has no port"));
}

TEST(wrong_info_files)
{
    static const char *const texts[] = {
        "",
        "[]",
        "{\"host\":\"h\",\"base_port\":6000}",
        "{\"host\":\"h\",\"base_port\":0,\"world_size\":1}",
        "{\"host\":\"h\",\"base_port\":\"6000\",\"world_size\":1}",
        "{\"host\":\"h\",\"base_port\":6000,\"world_size\":0}",
        "{\"host\":\"h\",\"base_port\":6000,\"world_size\":-1}",
        "{\"host\":\"h\",\"base_port\":65535,\"world_size\":2}",
        "{\"base_port\":6000,\"world_size\":1}",
        "{\"host\":\"h\",\"host\":\"g\",\"base_port\":6000,\"world_size\":1}",
        "{\"hosts\":[]}",
        "{\"hosts\":[{\"host\":\"h\",\"base_port\":1,\"ranks\":[0,0]}]}",
        "{\"hosts\":[{\"host\":\"h\",\"base_port\":1,\"ranks\":[0,2]}]}",
        "{\"hosts\":[{\"host\":\"h\",\"base_port\":1,\"ranks\":[-1]}]}",
        "{\"hosts\":[{\"host\":\"h\",\"base_port\":1,\"ranks\":[\"0\"]}]}",
        "{\"hosts\":[{\"host\":\"h\",\"base_port\":1,\"ranks\":\"all\"}]}",
        "{\"hosts\":[{\"host\":\"h\",\"ranks\":[0]}]}",
        "{\"world_size\":3,\"hosts\":[{\"host\":\"h\",\"base_port\":1,\"ranks\":[0]}]}",
        "{\"host\":\"h\",\"base_port\":1,\"world_size\":1,\"hosts\":{}}",
#define BASE "{\"host\":\"h\",\"base_port\":1,\"world_size\":1,"
        BASE "\"run_idx\":1.5}",
        BASE "\"run_idx\":-1}",
        BASE "\"run_idx\":true}",
        BASE "\"run_idx\":\"a/b\"}",
        BASE "\"run_idx\":\"\"}",
        BASE "\"server_name\":\"\"}",
        BASE "\"server_name\":7}",
        BASE "\"world_id\":\"00000000000000000000000000000000\"}",
        BASE "\"world_id\":\"0a\"}",
        BASE "\"world_id\":16}",
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        refuse(file_with(texts[i]), 0);
    refuse(file_with("{\"host\":\"h\",\"base_port\":1,\"world_size\":2}"), 3);
}

TEST(absent_files)
{
    fanin_status status;
    joined("/nonexistent/nixl_info.json", 0, &status);
    assert_int_equal(status, FANIN_ERR_NOT_FOUND);
    joined("absent.json", 0, &status);
    assert_int_equal(status, FANIN_ERR_NOT_FOUND);
}

TEST(durations)
{
    static const struct {
        const char *text;
        uint32_t ms;
    } good[] = {{"30", 30000},   {"500ms", 500}, {"1.5s", 1500}, {"2m", 120000},
                {"1h", 3600000}, {"0.001", 1},   {".5s", 500},   {"1000h", 3600000000}};
    static const char *const bad[] = {"",    "0",   "s",    "-1",    "1 s", "1d",
                                      "inf", "nan", "1e99", "1001h", "0ms", "ms"};
    uint32_t ms;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_true(options_duration(good[i].text, &ms));
        assert_int_equal(ms, good[i].ms);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_false(options_duration(bad[i], &ms));
}

TEST(typos)
{
    static const char *const names[] = {"list", "show", "pull", "verify", NULL};
    assert_string_equal(options_nearest("lisst", names), "list");
    assert_string_equal(options_nearest("pul", names), "pull");
    assert_string_equal(options_nearest("verivy", names), "verify");
    assert_null(options_nearest("frobnicate", names));
    static const char *const keys[] = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", NULL};
    assert_string_equal(
        options_nearest("base_model.model.layers.0.self_attn.q_porj.lora_B.wei_ght",
                        keys),
        keys[1]);
    char longest[OPTIONS_NEAREST_LENGTH + 2];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_null(options_nearest(longest, names));
    longest[sizeof longest - 2] = '\0';
    assert_null(options_nearest(longest, names));
    assert_null(options_nearest("x", names));
}

TEST(runs_and_dtypes)
{
    assert_true(options_run_valid("0"));
    assert_true(options_run_valid("a.B_c-9"));
    assert_false(options_run_valid(""));
    assert_false(options_run_valid(".."));
    assert_false(options_run_valid("a/b"));
    assert_false(options_run_valid("a:b"));
    assert_int_equal(options_dtype("bf16"), FANIN_DTYPE_BF16);
    assert_int_equal(options_dtype("bfloat16"), FANIN_DTYPE_BF16);
    assert_int_equal(options_dtype("Float32"), FANIN_DTYPE_F32);
    assert_int_equal(options_dtype("f8_e4m3"), FANIN_DTYPE_F8_E4M3);
    assert_int_equal(options_dtype("int3"), 0);
}

TESTS_BETWEEN(make_file, remove_file)
