/* SPDX-License-Identifier: Apache-2.0 */
/* Names on disk, and the configuration that is checked or derived. */
#include "peft/peft_config.h"
#include "peft/peft_maker.h"
#include "peft/peft_pattern.h"
#include "testing.h"

#include <jansson.h>

/* ------------------------------------------------------------- names */

TEST(names_become_those_on_disk)
{
    static const struct {
        const char *from, *to;
        peft_part part;
    } cases[] = {
        {"m.q.lora_A.weight", "m.q.lora_A.weight", PEFT_LORA_A},
        {"m.q.lora_A.default.weight", "m.q.lora_A.weight", PEFT_LORA_A},
        {"m.q.lora_B.run1.weight", "m.q.lora_B.weight", PEFT_LORA_B},
        {"m.q.lora_B.weight.weight", "m.q.lora_B.weight", PEFT_LORA_B},
        {"m.q.lora_B.default.bias", "m.q.lora_B.bias", PEFT_LORA_B_BIAS},
        {"m.q.lora_B.bias", "m.q.lora_B.bias", PEFT_LORA_B_BIAS},
        {"m.e.lora_embedding_A", "m.e.lora_embedding_A", PEFT_EMBEDDING_A},
        {"m.e.lora_embedding_A.run1", "m.e.lora_embedding_A", PEFT_EMBEDDING_A},
        {"m.e.lora_embedding_B.default", "m.e.lora_embedding_B", PEFT_EMBEDDING_B},
        {"m.q.lora_magnitude_vector", "m.q.lora_magnitude_vector", PEFT_MAGNITUDE},
        {"m.q.lora_magnitude_vector.a", "m.q.lora_magnitude_vector", PEFT_MAGNITUDE},
        {"m.q.lora_magnitude_vector.a.weight", "m.q.lora_magnitude_vector",
         PEFT_MAGNITUDE},
        {"m.q.lora_diag.default", "m.q.lora_diag", PEFT_DIAGONAL},
        {"m.q.lora_diag", "m.q.lora_diag", PEFT_DIAGONAL},
        {"_fsdp_wrapped_module.m.0._fsdp_wrapped_module.q.lora_A.x.weight",
         "m.0.q.lora_A.weight", PEFT_LORA_A},
        {"m._orig_mod.q._checkpoint_wrapped_module.lora_A.weight", "m.q.lora_A.weight",
         PEFT_LORA_A},
        {"lm_head.modules_to_save.default.weight", "lm_head.weight", PEFT_SAVED_MODULE},
        {"m.s.modules_to_save.a.dense.bias", "m.s.dense.bias", PEFT_SAVED_MODULE},
        {"m.e.token_adapter.trainable_tokens_delta.default",
         "m.e.token_adapter.trainable_tokens_delta", PEFT_OTHER},
        {"lm_head.weight", "lm_head.weight", PEFT_OTHER},
        {"m.lora_Ax.weight", "m.lora_Ax.weight", PEFT_OTHER},
        {"m.q.lora_A.a.b.weight", "m.q.lora_A.a.b.weight", PEFT_MALFORMED},
        {"m.q.lora_A.default", "m.q.lora_A.default", PEFT_MALFORMED},
        {"m.q.lora_A", "m.q.lora_A", PEFT_MALFORMED},
        {"lora_A.weight", "lora_A.weight", PEFT_MALFORMED},
        {"m.experts.base_layer.lora_A.default.weight",
         "m.experts.base_layer.lora_A.weight", PEFT_LORA_A},
        {"", "", PEFT_OTHER},
        {"..", "..", PEFT_OTHER},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char wanted[PEFT_NAME_SIZE], prefixed[PEFT_NAME_SIZE], buffer[PEFT_NAME_SIZE];
        snprintf(wanted, sizeof wanted, PEFT_PREFIX "%s", cases[i].to);
        snprintf(prefixed, sizeof prefixed, PEFT_PREFIX "%s", cases[i].from);
        const char *given[] = {cases[i].from, prefixed};
        for (size_t k = 0; k < 2; k++) {
            peft_name name = peft_name_on_disk(given[k], buffer);
            assert_string_equal(name.text, wanted);
            assert_int_equal(name.size, strlen(wanted));
            assert_int_equal(name.part, cases[i].part);
            bool layer = name.part != PEFT_OTHER && name.part != PEFT_MALFORMED;
            assert_int_equal(name.module > 0, layer);
        }
    }
    char buffer[PEFT_NAME_SIZE];
    peft_name ddp = peft_name_on_disk("module." PEFT_PREFIX "q.lora_A.weight", buffer);
    assert_string_equal(ddp.text, PEFT_PREFIX "q.lora_A.weight");
}

TEST(the_longest_name_fits)
{
    char name[FANIN_MAX_NAME + 1], buffer[PEFT_NAME_SIZE];
    memset(name, 'a', FANIN_MAX_NAME);
    name[FANIN_MAX_NAME] = '\0';
    peft_name on_disk = peft_name_on_disk(name, buffer);
    assert_int_equal(on_disk.size, FANIN_MAX_NAME + strlen(PEFT_PREFIX));
}

TEST(suffixes_do_not_begin_with_numbers)
{
    static const char *const cases[][2] = {
        {"model.layers.0.self_attn.q_proj", "q_proj"},
        {"q_proj", "q_proj"},
        {"mlp.0", "mlp.0"},
        {"a.mlp.0.1", "mlp.0.1"},
        {"0.1", "0.1"},
        {"a.4bit", "a.4bit"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t size;
        const char *suffix = peft_suffix(cases[i][0], strlen(cases[i][0]), &size);
        assert_int_equal(size, strlen(cases[i][1]));
        assert_memory_equal(suffix, cases[i][1], size);
    }
}

/* ------------------------------------------------------------- patterns */

static pattern_result match(const char *pattern_of, pattern_use use, const char *text)
{
    pattern_budget budget = PATTERN_BUDGET;
    pattern *p = pattern_compile(pattern_of, use, &budget);
    assert_non_null(p);
    pattern_result result = pattern_match(p, text, strlen(text), &budget);
    assert_string_equal(pattern_text(p), pattern_of);
    if (result == PATTERN_INVALID)
        assert_true(pattern_problem(p)[0] != '\0');
    pattern_free(p);
    return result;
}

TEST(patterns_match_as_in_peft)
{
    static const struct {
        const char *pattern, *text;
        pattern_result key, whole; /* as rank_pattern's, as target_modules */
    } cases[] = {
        {"q_proj", "model.layers.0.q_proj", PATTERN_YES, PATTERN_NO},
        {"q_proj", "q_proj", PATTERN_YES, PATTERN_YES},
        {"q_proj", "model.xq_proj", PATTERN_NO, PATTERN_NO},
        {"q_proj", "model.q_proj.x", PATTERN_NO, PATTERN_NO},
        {"^q_proj", "model.q_proj", PATTERN_NO, PATTERN_NO},
        {"^model.q_proj", "model.q_proj", PATTERN_YES, PATTERN_YES},
        {"^model\\.q_proj$", "model.q_proj", PATTERN_YES, PATTERN_YES},
        {"layers.1.q", "model.layers.1.q", PATTERN_YES, PATTERN_NO},
        {"layers.1.q", "model.layers.11.q", PATTERN_NO, PATTERN_NO},
        {"layers.1.q", "model.layersx1.q", PATTERN_YES, PATTERN_NO},
        {"layers\\.1\\.q", "model.layersx1.q", PATTERN_NO, PATTERN_NO},
        {".*\\.gate_up_proj", "mlp.experts.gate_up_proj", PATTERN_YES, PATTERN_YES},
        {".*\\.gate_up_proj", "gate_up_proj", PATTERN_NO, PATTERN_NO},
        {"layers\\.\\d+\\.q", "model.layers.117.q", PATTERN_YES, PATTERN_NO},
        {"layers\\.\\d+\\.q", "model.layers.x.q", PATTERN_NO, PATTERN_NO},
        {".*?q", "a.b.q", PATTERN_YES, PATTERN_YES},
        {"ab?c", "m.ac", PATTERN_YES, PATTERN_NO},
        {"\\w+_proj", "m.q_proj", PATTERN_YES, PATTERN_NO},
        {"", "a.b", PATTERN_NO, PATTERN_NO},
        {"", "a.", PATTERN_YES, PATTERN_NO},
        {"", "", PATTERN_YES, PATTERN_YES},
        {"(q|v)_proj", "m.q_proj", PATTERN_YES, PATTERN_NO},
        {"(q|v)_proj", "q_proj", PATTERN_YES, PATTERN_YES},
        {"q|v", "q", PATTERN_YES, PATTERN_YES},
        {"q|v", "m.v", PATTERN_YES, PATTERN_NO},
        {"a)|(q", "m.q", PATTERN_NO, PATTERN_INVALID},
        {"[qv]_proj", "q_proj", PATTERN_YES, PATTERN_YES},
        {"[^qv]_proj", "q_proj", PATTERN_NO, PATTERN_NO},
        {"[\\]]q[\\\\]", "]q\\", PATTERN_YES, PATTERN_YES},
        {"[]q]", "q", PATTERN_YES, PATTERN_YES},
        {"[a\\]-]", "-", PATTERN_YES, PATTERN_YES},
        {"a{2}", "aa", PATTERN_YES, PATTERN_YES},
        {"a{2,}", "aaaa", PATTERN_YES, PATTERN_YES},
        {"a{1,2}?b", "m.aab", PATTERN_YES, PATTERN_NO},
        {"\\bq", "q", PATTERN_YES, PATTERN_YES},
        {"\\bq", "m.q", PATTERN_YES, PATTERN_NO},
        {"a++", "aa", PATTERN_YES, PATTERN_YES},
        {"a*+a", "aa", PATTERN_NO, PATTERN_NO},
        {"a|ab", "ab", PATTERN_YES, PATTERN_YES},
        {"(?:q|k)", "m.k", PATTERN_YES, PATTERN_NO},
        {"(?=q).", "q", PATTERN_YES, PATTERN_YES},
        {"(?!q).", "q", PATTERN_NO, PATTERN_NO},
        {"(?<=\\.)q", "m.q", PATTERN_YES, PATTERN_NO},
        {"(?<!m\\.)q", "m.q", PATTERN_NO, PATTERN_NO},
        {"(?P<n>q)(?P=n)", "qq", PATTERN_YES, PATTERN_YES},
        {"(?P<n>q)(?P=n)", "qk", PATTERN_NO, PATTERN_NO},
        {"(?i:Q)", "m.q", PATTERN_YES, PATTERN_NO},
        {"(?#note)q", "q", PATTERN_YES, PATTERN_YES},
        {"(q)\\1", "qq", PATTERN_UNKNOWN, PATTERN_YES},
        {"\\x71", "q", PATTERN_YES, PATTERN_YES},
        {"[\\w.]+", "a.b", PATTERN_YES, PATTERN_YES},
        {".*\\.\\d{1,2}\\.(q|k|v)_proj", "model.layers.31.k_proj", PATTERN_YES,
         PATTERN_YES},
        {".*\\.(self_attn|mlp)\\.(q|up)_proj$", "m.layers.0.mlp.up_proj", PATTERN_YES,
         PATTERN_YES},
        {"q_proj", "caf\303\251.q_proj", PATTERN_YES, PATTERN_NO},
        {"caf.", "caf\303\251", PATTERN_YES, PATTERN_YES},
        {"\\w+", "caf\303\251", PATTERN_YES, PATTERN_YES},
        {"\\d", "\331\243", PATTERN_YES, PATTERN_YES},
        {"q$", "q\n", PATTERN_YES, PATTERN_NO},
        {".", "\n", PATTERN_NO, PATTERN_NO},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        pattern_result key = match(cases[i].pattern, PATTERN_KEY, cases[i].text);
        pattern_result whole = match(cases[i].pattern, PATTERN_WHOLE, cases[i].text);
        if (key != cases[i].key || whole != cases[i].whole)
            fail_msg("'%s' on '%s': %d, %d", cases[i].pattern, cases[i].text, key,
                     whole);
    }
}

/* What Python and PCRE2 read differently, or only one of them reads. */
TEST(what_python_reads_otherwise_is_unknown)
{
    static const char *const patterns[] = {
        "[[:alpha:]]", "[a&&b]",  "[a--b]",  "a{,2}",        "a{x}",    "\\vq",
        "q\\Z",        "\\x4",    "\\Qq\\E", "\\h",          "\\R",     "\\K",
        "\\p{L}",      "\\N",     "\\G",     "\\g1",         "(?<n>q)", "(?|q)",
        "(?R)",        "(?1)",    "(?&n)",   "(?>q)",        "(?x:q )", "(?a:q)",
        "(*ACCEPT)",   "(*UTF)q", "q(?i)",   "(a)(?(1)b|c)", "\\012",   "\\u0071",
        "(?C1)q",      "\\C",     "(?P>n)",  "\\",           "(?-i)q",  "\\10",
    };
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        if (match(patterns[i], PATTERN_WHOLE, "q") != PATTERN_UNKNOWN)
            fail_msg("'%s' was evaluated", patterns[i]);
    }
    /* Flags for the whole are only allowed at its beginning. */
    assert_int_equal(match("(?i)Q", PATTERN_WHOLE, "q"), PATTERN_YES);
    assert_int_equal(match("(?i)Q", PATTERN_KEY, "q"), PATTERN_UNKNOWN);
    /* A limit of PCRE2, not an error of the pattern. */
    assert_int_equal(match("(a{60000}){60000}", PATTERN_WHOLE, "q"), PATTERN_UNKNOWN);
    assert_int_equal(match("q", PATTERN_WHOLE, "\xff"), PATTERN_UNKNOWN);
}

TEST(what_is_no_expression_is_invalid)
{
    static const char *const patterns[] = {
        "(q",  "q)",     "[q",    "*q",    "a**", "(?P<n>a)(?P<n>b)",
        "\\1", "a{3,2}", "[b-a]", "(?P=n)"};
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        if (match(patterns[i], PATTERN_WHOLE, "q") != PATTERN_INVALID)
            fail_msg("'%s' was taken", patterns[i]);
    }
}

TEST(hostile_patterns_end)
{
    static const char *const patterns[] = {
        "(a*)*b",  "(a|aa)+[bc]",        "(.*)*(.*)*(.*)*[^x]b",
        "(a+)+$b", "(a|a)*b|(a|b|ab)*c", "((a?){30}a*){30}b"};
    char text[401];
    memset(text, 'a', sizeof(text) - 1);
    text[400] = '\0';
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        pattern_result result = match(patterns[i], PATTERN_KEY, text);
        if (result != PATTERN_LIMIT && result != PATTERN_NO)
            fail_msg("'%s': %d", patterns[i], result);
    }
    assert_int_equal(match(patterns[1], PATTERN_WHOLE, text), PATTERN_LIMIT);
    /* All matches of a configuration share what they may cost. */
    pattern_budget budget = PATTERN_BUDGET;
    pattern *p = pattern_compile("(a|aa)+[bc]", PATTERN_WHOLE, &budget);
    budget = (pattern_budget){.ns = 1};
    unsigned tried = 0;
    while (pattern_match(p, text, 20, &budget) == PATTERN_NO)
        assert_true(tried++ < 1000);
    assert_true(tried > 0);
    assert_int_equal(pattern_match(p, "ab", 2, &budget), PATTERN_UNKNOWN);
    pattern_free(p);
}

/* Thirty characters may become kilobytes. */
TEST(compiled_patterns_are_bounded)
{
    pattern_budget budget = PATTERN_BUDGET;
    uint64_t before = budget.bytes;
    budget.ns = UINT64_MAX / 2;
    pattern *p = pattern_compile("((((x{0,9}){0,9}){0,9}){0,9})", PATTERN_KEY, &budget);
    assert_non_null(p);
    assert_true(before - budget.bytes > 10000);
    pattern_free(p);
    budget.bytes = 100;
    p = pattern_compile("((((x{0,9}){0,9}){0,9}){0,9})", PATTERN_KEY, &budget);
    assert_non_null(p);
    assert_true(budget.spent);
    assert_int_equal(pattern_match(p, "x", 1, &budget), PATTERN_UNKNOWN);
    pattern_free(p);
    p = pattern_compile("x", PATTERN_KEY, &budget);
    assert_non_null(p);
    assert_int_equal(pattern_match(p, "x", 1, &budget), PATTERN_UNKNOWN);
    pattern_free(p);
}

TEST(escaped_text_matches_itself_only)
{
    static const char text[] = "a.b+c$(d)[e]\\f-g_h{2}";
    buffer out = {0};
    pattern_escape(&out, text, strlen(text));
    buffer_append(&out, "", 1);
    assert_string_equal((char *)out.data, "a\\.b\\+c\\$\\(d\\)\\[e\\]\\\\f-g_h\\{2\\}");
    assert_int_equal(match((char *)out.data, PATTERN_WHOLE, text), PATTERN_YES);
    assert_int_equal(match((char *)out.data, PATTERN_WHOLE, "axb+c$(d)[e]\\f-g_h{2}"),
                     PATTERN_NO);
    buffer_free(&out);
}

/* ------------------------------------------------------------- configuration */

#define TENSORS 64

/* A publication in the making. */
typedef struct fixture {
    key_table table;
    key_entry entries[TENSORS];
    fanin_pair pairs[16];
    char names[TENSORS][256];
} fixture;

static void add(fixture *f, const char *name, uint64_t rows, uint64_t columns)
{
    uint32_t i = f->table.count++;
    assert_true(i < TENSORS);
    snprintf(f->names[i], sizeof f->names[i], "%s", name);
    f->entries[i] = (key_entry){.name = f->names[i],
                                .dtype = FANIN_DTYPE_BF16,
                                .n_dims = columns ? 2 : 1,
                                .shape = {rows, columns},
                                .bytes = 2 * rows * (columns ? columns : 1)};
    f->table.entries = f->entries;
}

static void add_layer(fixture *f, const char *module, uint64_t r, uint64_t in,
                      uint64_t out)
{
    char name[256];
    snprintf(name, sizeof name, PEFT_PREFIX "%s.lora_A.weight", module);
    add(f, name, r, in);
    snprintf(name, sizeof name, PEFT_PREFIX "%s.lora_B.weight", module);
    add(f, name, out, r);
}

static void pair(fixture *f, const char *key, const char *value)
{
    f->pairs[f->table.n_pairs++] = (fanin_pair){key, value};
    f->table.pairs = f->pairs;
}

static void usual_pairs(fixture *f)
{
    pair(f, "base_model_name_or_path", "org/model");
    pair(f, "lora_alpha", "32");
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const key_entry *)a)->name, ((const key_entry *)b)->name);
}

static bool trusted; /* what the next make() is told */
static work_stop *stop;
static char dropped[256];

static fanin_status try_make(fixture *f, json_t **out, fanin_error *error)
{
    qsort(f->entries, f->table.count, sizeof f->entries[0], compare_entries);
    peft_names names;
    *error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = peft_names_make(&f->table, "lora:7", &names, error);
    peft_config made = {0};
    if (!status)
        status =
            peft_config_make(&f->table, &names, "lora:7", trusted, stop, &made, error);
    peft_names_free(&names);
    *out = NULL;
    if (!status) {
        assert_int_equal(strlen(made.text), made.size);
        *out = json_loads(made.text, JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(*out);
    }
    snprintf(dropped, sizeof dropped, "%s", made.dropped ? made.dropped : "");
    peft_config_free(&made);
    return status;
}

static json_t *config; /* the last one */

static void make(fixture *f)
{
    fanin_error error;
    json_decref(config);
    if (try_make(f, &config, &error))
        fail_msg("%s (%s)", error.message, error.key);
}

static int forget(void **state)
{
    json_decref(config);
    return 0;
}

TESTS_BETWEEN(NULL, forget)

/* The field of the last configuration is the JSON @p wanted. */
static void assert_field(const char *field, const char *wanted)
{
    json_t *value = json_loads(wanted, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    json_t *there = json_object_get(config, field);
    if (!json_equal(there, value)) {
        char *text = there ? json_dumps(there, JSON_ENCODE_ANY) : NULL;
        fail_msg("%s is %s, not %s", field, text ? text : "absent", wanted);
    }
    json_decref(value);
}

/* Making it fails with MISMATCH; the message contains @p why, the key @p key. */
static void assert_refused(fixture *f, const char *why, const char *key)
{
    json_t *none;
    fanin_error error;
    fanin_status status = try_make(f, &none, &error);
    if (status != FANIN_ERR_MISMATCH || !strstr(error.message, why) ||
        !strstr(error.key, key))
        fail_msg("%d: '%s' (key '%s'), not '%s' (key '%s')", status, error.message,
                 error.key, why, key);
    assert_true(error.remedy[0] != '\0');
    json_decref(none);
}

TEST(a_plain_adapter_is_derived)
{
    fixture f = {0};
    usual_pairs(&f);
    pair(&f, "lora_dropout", "0.05");
    pair(&f, "use_rslora", "True");
    add_layer(&f, "model.layers.0.self_attn.q_proj", 8, 64, 64);
    add_layer(&f, "model.layers.0.self_attn.k_proj", 8, 64, 32);
    add_layer(&f, "model.layers.1.mlp.0", 8, 64, 32);
    add_layer(&f, "model.layers.1.mlp.experts.3.gate_proj", 8, 64, 32);
    make(&f);
    assert_field("peft_type", "\"LORA\"");
    assert_field("task_type", "\"CAUSAL_LM\"");
    assert_field("base_model_name_or_path", "\"org/model\"");
    assert_field("r", "8");
    assert_field("lora_alpha", "32");
    assert_field("lora_dropout", "0.05");
    assert_field("use_rslora", "true");
    assert_field("use_dora", "false");
    assert_field("bias", "\"none\"");
    assert_field("fan_in_fan_out", "false");
    assert_field("inference_mode", "true");
    assert_field("modules_to_save", "null");
    assert_field("rank_pattern", "{}");
    assert_field("alpha_pattern", "{}");
    assert_field("target_modules",
                 "[\"gate_proj\", \"k_proj\", \"mlp.0\", \"q_proj\"]");
    assert_null(json_object_get(config, "target_parameters"));
}

static bool say_stop(void *asked)
{
    ++*(unsigned *)asked;
    return true;
}

/* Every layer against every name of a list: that is looked away from when nobody waits. */
TEST(long_lists_are_not_looked_through_in_vain)
{
    static const char *const heads[] = {
        "\"target_modules\":[\"q\"",
        "\"rank_pattern\":{\"q\":8",
        "\"target_modules\":[\"y\"],\"modules_to_save\":[\"w\"",
    };
    static const char *const tails[] = {",\"y\"]}", "},\"target_modules\":[\"y\"]}",
                                        "]}"};
    for (size_t i = 0; i < 3; i++) {
        fixture f = {0};
        unsigned asked = 0;
        work_stop over = {.fn = say_stop, .cookie = &asked};
        json_t *none;
        fanin_error error;
        buffer text = {0};
        const char *head = "{\"peft_type\":\"LORA\",\"r\":8,"
                           "\"base_model_name_or_path\":\"m\",";
        buffer_append(&text, head, strlen(head));
        buffer_append(&text, heads[i], strlen(heads[i]));
        for (int n = 0; n < 2000; n++) {
            char item[32];
            /* No pattern that Python and PCRE2 read alike. */
            snprintf(item, sizeof item, i == 1 ? ",\"(?<=%d)x\":8" : ",\"x%d\"", n);
            buffer_append(&text, item, strlen(item));
        }
        buffer_append(&text, tails[i], strlen(tails[i]) + 1);
        pair(&f, "peft_config", (const char *)text.data);
        for (int n = 0; n < 8; n++) {
            char name[32];
            snprintf(name, sizeof name, "m.%d.y", n);
            add_layer(&f, name, 8, 16, 16);
        }
        stop = &over;
        assert_int_equal(try_make(&f, &none, &error), FANIN_ERR_TIMEOUT);
        stop = NULL;
        assert_int_equal(asked, 1);
        assert_non_null(strstr(error.message, "the configuration was looked through"));
        buffer_free(&text);
    }
}

TEST(the_text_is_as_peft_writes_it)
{
    fixture f = {0};
    pair(&f, "peft_config",
         "{\"r\":8,\"peft_type\":\"LORA\",\"lora_dropout\":0.1,\"x\":0."
         "30000000000000004,"
         "\"base_model_name_or_path\":\"caf\xc3\xa9\",\"target_modules\":[\"q\"],\"e\":"
         "{}}");
    add_layer(&f, "m.q", 8, 16, 16);
    peft_names names;
    peft_config made;
    assert_int_equal(peft_names_make(&f.table, "lora:7", &names, NULL), FANIN_OK);
    assert_int_equal(
        peft_config_make(&f.table, &names, "lora:7", true, NULL, &made, NULL),
        FANIN_OK);
    assert_string_equal(made.text, "{\n"
                                   "  \"base_model_name_or_path\": \"caf\\u00E9\",\n"
                                   "  \"e\": {},\n"
                                   "  \"lora_dropout\": 0.10000000000000001,\n"
                                   "  \"peft_type\": \"LORA\",\n"
                                   "  \"r\": 8,\n"
                                   "  \"target_modules\": [\n"
                                   "    \"q\"\n"
                                   "  ],\n"
                                   "  \"x\": 0.30000000000000004\n"
                                   "}");
    peft_config_free(&made);
    peft_names_free(&names);
}

TEST(differing_ranks_become_a_pattern)
{
    fixture f = {0};
    usual_pairs(&f);
    for (int layer = 0; layer < 3; layer++) {
        char module[64];
        snprintf(module, sizeof module, "model.layers.%d.q_proj", layer);
        add_layer(&f, module, layer == 1 ? 4 : 8, 64, 64);
        snprintf(module, sizeof module, "model.layers.%d.k_proj", layer);
        add_layer(&f, module, 8, 64, 64);
        snprintf(module, sizeof module, "model.layers.%d.o_proj", layer);
        add_layer(&f, module, 16, 64, 64);
    }
    make(&f);
    assert_field("r", "8");
    assert_field("rank_pattern",
                 "{\"o_proj\": 16, \"^model\\\\.layers\\\\.1\\\\.q_proj\": 4}");
    /* A statement that fits the tensors as well is believed. */
    pair(&f, "r", "16");
    make(&f);
    assert_field("r", "16");
    assert_field("rank_pattern",
                 "{\"k_proj\": 8, \"^model\\\\.layers\\\\.0\\\\.q_proj\": 8,"
                 "\"^model\\\\.layers\\\\.1\\\\.q_proj\": 4,"
                 "\"^model\\\\.layers\\\\.2\\\\.q_proj\": 8}");
    f.pairs[2].value = "32";
    assert_refused(&f, "r is 32", "lora_A");
    pair(&f, "rank_pattern", "{\"o_proj\": 16, \"q_proj\": 8}");
    f.pairs[2].value = "8";
    assert_refused(&f, "has 4 rows", "layers.1.q_proj.lora_A");
    f.pairs[3].value = "{\"o_proj\": 16, \"layers.1.q_proj\": 4}";
    make(&f);
    assert_field("rank_pattern", "{\"o_proj\": 16, \"layers.1.q_proj\": 4}");
}

TEST(what_nothing_tells_is_refused)
{
    fixture f = {0};
    add_layer(&f, "m.q", 8, 16, 16);
    assert_refused(&f, "base model", "");
    pair(&f, "base_model_name_or_path", "");
    assert_refused(&f, "base model", "");
    f.pairs[0].value = "org/model";
    assert_refused(&f, "lora_alpha", "");
    pair(&f, "lora_alpha", "much");
    assert_refused(&f, "lora_alpha is 'much'", "");
    f.pairs[1].value = "-1";
    assert_refused(&f, "lora_alpha is '-1'", "");
    f.pairs[1].value = "16.5";
    make(&f);
    assert_field("lora_alpha", "16.5");
    fixture empty = {0};
    usual_pairs(&empty);
    add(&empty, "lm_head.weight", 4, 4);
    assert_refused(&empty, "no tensor of lora:7", "");
    pair(&empty, "r", "8");
    pair(&empty, "target_modules", "all-linear");
    make(&empty);
    assert_field("target_modules", "\"all-linear\"");
}

TEST(broken_layers_are_refused)
{
    fixture a = {0}, b = {0}, c = {0}, d = {0}, e = {0};
    usual_pairs(&a);
    add_layer(&a, "m.q", 8, 16, 16);
    add(&a, "m.k.lora_A.default.weight", 8, 16);
    assert_refused(&a, "without its lora_B", "lora:7:m.k.lora_A.default.weight");
    usual_pairs(&b);
    add_layer(&b, "m.q", 8, 16, 16);
    add(&b, "m.k.lora_B.default.weight", 16, 8);
    assert_refused(&b, "without its lora_A", "m.k.lora_B");
    usual_pairs(&c);
    add(&c, "m.k.lora_A.weight", 8, 16);
    add(&c, "m.k.lora_B.weight", 16, 4);
    assert_refused(&c, "8 rows, lora_B has 4 columns", "m.k.lora_A");
    usual_pairs(&d);
    add(&d, "m.k.lora_A.weight", 8, 0);
    add(&d, "m.k.lora_B.weight", 16, 8);
    assert_refused(&d, "fewer than two dimensions", "m.k.lora_A");
    usual_pairs(&e);
    add_layer(&e, "m.q", 8, 16, 16);
    add(&e, "m.k.lora_A.default", 8, 16);
    assert_refused(&e, "not one that PEFT", "m.k.lora_A.default");
}

TEST(one_name_twice_is_refused)
{
    fixture f = {0};
    usual_pairs(&f);
    add_layer(&f, "m.q", 8, 16, 16);
    add(&f, "m.q.lora_A.run2.weight", 8, 16);
    json_t *none;
    fanin_error error;
    assert_int_equal(try_make(&f, &none, &error), FANIN_ERR_MISMATCH);
    assert_non_null(strstr(error.message, "'m.q.lora_A.run2.weight'"));
    assert_non_null(strstr(error.message, "'" PEFT_PREFIX "m.q.lora_A.weight'"));
}

TEST(embeddings_dora_and_bias_are_derived)
{
    fixture f = {0};
    usual_pairs(&f);
    add(&f, "m.embed_tokens.lora_embedding_A.default", 8, 100);
    add(&f, "m.embed_tokens.lora_embedding_B.default", 16, 8);
    add_layer(&f, "m.q", 8, 16, 16);
    add(&f, "m.q.lora_magnitude_vector.default.weight", 16, 0);
    make(&f);
    assert_field("target_modules", "[\"embed_tokens\", \"q\"]");
    assert_field("use_dora", "true");
    pair(&f, "use_dora", "false");
    assert_refused(&f, "use_dora is not set", "m.q.lora_A");

    fixture g = {0};
    usual_pairs(&g);
    add_layer(&g, "m.q", 8, 16, 16);
    pair(&g, "use_dora", "true");
    assert_refused(&g, "use_dora is set", "m.q.lora_A");
    f.table.n_pairs = g.table.n_pairs = 2;
    add(&g, "m.q.lora_B.default.bias", 16, 0);
    make(&g);
    assert_field("lora_bias", "true");
}

TEST(saved_modules_are_listed)
{
    fixture f = {0};
    usual_pairs(&f);
    add_layer(&f, "m.q", 8, 16, 16);
    add(&f, "lm_head.modules_to_save.default.weight", 16, 16);
    add(&f, "lm_head.modules_to_save.default.bias", 16, 0);
    add(&f, "m.score.modules_to_save.default.weight", 16, 16);
    add(&f, "m.other.weight", 4, 4);
    make(&f);
    assert_field("modules_to_save", "[\"lm_head\", \"score\"]");
    pair(&f, "modules_to_save", "[\"score\"]");
    assert_refused(&f, "lm_head is published as a saved module", "lm_head");

    fixture g = {0};
    usual_pairs(&g);
    add_layer(&g, "m.q", 8, 16, 16);
    pair(&g, "modules_to_save", "[\"lm_head\"]");
    assert_refused(&g, "no tensor", "");
    add(&g, "lm_head.weight", 16, 16);
    make(&g);
    assert_field("modules_to_save", "[\"lm_head\"]");
}

/* 4 experts, hidden 32, experts' width 16. */
static void add_fused(fixture *f, const char *module, uint64_t r_gate_up,
                      uint64_t r_down)
{
    char inner[128];
    snprintf(inner, sizeof inner, "%s.base_layer", module);
    add_layer(f, inner, r_gate_up * 4, 32, 32);
    add_layer(f, module, r_down * 4, 16, 32);
}

TEST(fused_experts_are_derived_where_provable)
{
    fixture f = {0};
    usual_pairs(&f);
    add_layer(&f, "model.layers.0.self_attn.q_proj", 4, 32, 32);
    add_fused(&f, "model.layers.0.mlp.experts", 8, 4);
    add_fused(&f, "model.layers.1.mlp.experts", 8, 4);
    assert_refused(&f, "neither r nor num_experts", "mlp.experts.lora_A");
    pair(&f, "r", "4");
    for (int i = 0; i < 2; i++) {
        make(&f);
        assert_field("r", "4");
        assert_field("rank_pattern", "{\"gate_up_proj\": 8}");
        assert_field("target_modules", "[\"q_proj\"]");
        assert_field("target_parameters",
                     "[\"mlp.experts.down_proj\", \"mlp.experts.gate_up_proj\"]");
        f.pairs[2] = (fanin_pair){"num_experts", "4"};
    }
    f.pairs[2].value = "3";
    assert_refused(&f, "no multiple", "mlp.experts");
    f.pairs[2].value = "4";
    pair(&f, "lora_dropout", "0.1");
    assert_refused(&f, "lora_dropout", "");
    f.table.n_pairs--;
    pair(&f, "target_parameters", "[\"mlp.experts.gate_up_proj\"]");
    assert_refused(&f, "names cannot be told", "mlp.experts");
    f.pairs[3].value = "[\"mlp.experts.w13\", \"mlp.experts.w2\"]";
    assert_refused(&f, "names cannot be told", "mlp.experts");
    f.pairs[3].value = "[\"gate_up_proj\", \"down_proj\"]";
    make(&f);
    assert_field("target_parameters", "[\"gate_up_proj\", \"down_proj\"]");
}

TEST(fused_experts_of_unusual_shape_are_refused)
{
    fixture f = {0};
    usual_pairs(&f);
    pair(&f, "r", "4");
    add_layer(&f, "model.mlp.experts", 16, 16, 32);
    assert_refused(&f, "names cannot be told", "mlp.experts");
    pair(&f, "target_parameters", "[\"mlp.experts.w2\"]");
    make(&f);
    assert_field("rank_pattern", "{}");
    assert_field("target_modules", "[]");

    fixture g = {0};
    usual_pairs(&g);
    pair(&g, "r", "4");
    add_layer(&g, "model.mlp.experts.base_layer", 16, 32, 32);
    assert_refused(&g, "not complete", "mlp.experts.base_layer");
}

#define CONFIG(fields)                                                                 \
    "{\"peft_type\": \"LORA\", \"base_model_name_or_path\": \"org/model\"," fields "}"

TEST(a_given_configuration_is_kept_whole)
{
    fixture f = {0};
    pair(&f, "peft_config",
         CONFIG("\"r\": 8, \"lora_alpha\": 16, \"target_modules\": [\"q\", \"unused\"],"
                "\"inference_mode\": false, \"corda_config\": null, \"zz\": [1, "
                "{\"a\": 2}]"));
    pair(&f, "lora_alpha", "16.0");
    pair(&f, "target_modules", "[\"unused\", \"q\"]");
    pair(&f, "revision", "main");
    add_layer(&f, "m.q", 8, 16, 16);
    trusted = true;
    make(&f);
    trusted = false;
    assert_string_equal(dropped, "");
    json_t *wanted = json_loads(f.pairs[0].value, 0, NULL);
    json_object_set_new(wanted, "revision", json_string("main"));
    assert_true(json_equal(config, wanted));
    /* Not trusted: the same without what is no field of PEFT's, or names a revision. */
    make(&f);
    assert_string_equal(dropped, "zz, revision");
    json_object_del(wanted, "zz");
    json_object_del(wanted, "revision");
    assert_true(json_equal(config, wanted));
    json_decref(wanted);
    f.pairs[1].value = "32";
    assert_refused(&f, "lora_alpha is '32', which contradicts", "");
}

TEST(fields_that_load_code_are_dropped)
{
    static const struct {
        const char *field, *kept, *dropped; /* kept NULL: the field is absent */
    } cases[] = {
        {"\"auto_mapping\": {\"base_model_class\": \"X\", \"parent_library\": "
         "\"evil\"}",
         NULL, "auto_mapping"},
        {"\"megatron_config\": {\"a\": 1}", NULL, "megatron_config"},
        {"\"megatron_core\": \"evil.module\"", NULL, "megatron_core"},
        {"\"revision\": \"refs/pr/1\"", NULL, "revision"},
        {"\"runtime_config\": {\"ephemeral_gpu_offload\": true}", NULL,
         "runtime_config"},
        {"\"trust_remote_code\": true", NULL, "trust_remote_code"},
        {"\"custom_code\": \"x.py\"", NULL, "custom_code"},
        {"\"a\\u001b[2J\\n\": 1", NULL, "a?[2J?"},
        {"\"exclude_modules\": [[[\"deep\"]], \"x\"]", "[[[\"deep\"]], \"x\"]", ""},
        {"\"alpha_pattern\": {\"q\": 1.5}", "{\"q\": 1.5}", ""},
        {"\"corda_config\": {\"cache_file\": \"/etc/x\", \"covariance_file\": null,"
         "\"corda_method\": \"kpm\"}",
         "{\"corda_method\": \"kpm\", \"covariance_file\": null}",
         "corda_config.cache_file"},
        {"\"loftq_config\": {\"loftq_bits\": 4, \"evil\": 2}", "{\"loftq_bits\": 4}",
         "loftq_config.evil"},
        {"\"eva_config\": {\"rho\": 2.0}", "{\"rho\": 2.0}", ""},
        {"\"arrow_config\": {\"top_k\": 3, \"task_adapter_names\": [\"a\"]}",
         "{\"top_k\": 3, \"task_adapter_names\": [\"a\"]}", ""},
        {"\"trainable_token_indices\": {\"embed\": [1, 2]}", "{\"embed\": [1, 2]}", ""},
        /* What PEFT writes into every file, and what asks for nothing. */
        {"\"megatron_core\": \"megatron.core\"", "\"megatron.core\"", ""},
        {"\"auto_mapping\": null", "null", ""},
        {"\"of_the_future\": null", "null", ""},
        {"\"layer_replication\": [[0, 4], [2, 5]]", "[[0, 4], [2, 5]]", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[512], name[64];
        fixture f = {0};
        snprintf(text, sizeof(text),
                 CONFIG("\"r\": 8, \"target_modules\": [\"q\"], %s"), cases[i].field);
        pair(&f, "peft_config", text);
        add_layer(&f, "m.q", 8, 16, 16);
        make(&f);
        if (strcmp(dropped, cases[i].dropped) != 0)
            fail_msg("%s: dropped '%s'", cases[i].field, dropped);
        snprintf(name, sizeof name, "%.*s", (int)strcspn(cases[i].field + 1, "\""),
                 cases[i].field + 1);
        if (cases[i].kept)
            assert_field(name, cases[i].kept);
        else
            assert_null(json_object_get(config, name));
    }
    /* Metadata pairs of these names are no other way in. */
    fixture f = {0};
    usual_pairs(&f);
    pair(&f, "auto_mapping", "{\"parent_library\": \"evil\"}");
    pair(&f, "revision", "refs/pr/1");
    add_layer(&f, "m.q", 8, 16, 16);
    make(&f);
    assert_field("auto_mapping", "null");
    assert_field("revision", "null");
    assert_string_equal(dropped, "auto_mapping, revision");
}

TEST(fields_of_another_shape_are_refused)
{
    static const char *const fields[] = {
        "\"init_lora_weights\": {\"_target_\": \"os.system\"}",
        "\"exclude_modules\": [[[[\"deep\"]]], \"x\"]",
        "\"exclude_modules\": [\"x\", {\"y\": 1}]",
        "\"alpha_pattern\": {\"q\": \"__import__\"}",
        "\"eva_config\": [\"rho\"]",
        "\"loftq_config\": {\"loftq_bits\": {\"x\": 1}}",
        "\"trainable_token_indices\": {\"embed\": {\"x\": 2}}",
        "\"base_model_name_or_path\": {\"x\": 2}",
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        char text[512], why[64];
        fixture f = {0};
        snprintf(
            text, sizeof(text),
            "{\"peft_type\": \"LORA\", \"r\": 8, \"target_modules\": [\"q\"], %s%s}",
            fields[i], i < 7 ? ", \"base_model_name_or_path\": \"m\"" : "");
        pair(&f, "peft_config", text);
        add_layer(&f, "m.q", 8, 16, 16);
        snprintf(why, sizeof why, "%.*s", (int)strcspn(fields[i] + 1, "\""),
                 fields[i] + 1);
        if (i == 7) /* asked for before */
            strcpy(why, "do not name the base model");
        assert_refused(&f, why, "");
    }
}

TEST(kasa_needs_its_diagonals)
{
    fixture f = {0}, g = {0};
    pair(
        &f, "peft_config",
        CONFIG(
            "\"r\": 8, \"target_modules\": [\"q\"], \"kasa_config\": {\"beta\": 0.5}"));
    add_layer(&f, "m.q", 8, 16, 16);
    assert_refused(&f, "kasa_config is set, but no lora_diag is published",
                   "m.q.lora_A");
    add(&f, "m.q.lora_diag.default", 8, 0);
    make(&f);
    assert_field("kasa_config", "{\"beta\": 0.5}");
    f.pairs[0].value = CONFIG("\"r\": 8, \"target_modules\": [\"q\"]");
    assert_refused(&f, "a lora_diag is published, but kasa_config is not set",
                   "m.q.lora_A");
    f.table.n_pairs = 0;
    usual_pairs(&f);
    make(&f);
    assert_field("kasa_config", "{}");

    usual_pairs(&g);
    add_layer(&g, "m.q", 8, 16, 16);
    add(&g, "m.k.lora_diag.default", 8, 0);
    assert_refused(&g, "a part of a LoRA layer is published without", "m.k.lora_diag");
}

TEST(embeddings_may_be_tied)
{
    static const struct {
        const char *tying, *module;
        uint64_t r, in, out;
        bool good;
    } cases[] = {
        {"true", "lm_head", 4, 16, 100, true},
        {"false", "lm_head", 4, 16, 100, false},
        /* What has not the embedding's shape is not tied to it. */
        {"true", "lm_head", 2, 16, 100, false},
        {"true", "m.q", 4, 16, 16, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[512];
        fixture f = {0};
        snprintf(text, sizeof text,
                 CONFIG("\"r\": 8, \"target_modules\": [\"embed_tokens\"],"
                        "\"rank_pattern\": {\"embed_tokens\": 4},"
                        "\"ensure_weight_tying\": %s"),
                 cases[i].tying);
        pair(&f, "peft_config", text);
        add(&f, "m.embed_tokens.lora_embedding_A.default", 4, 100);
        add(&f, "m.embed_tokens.lora_embedding_B.default", 16, 4);
        add_layer(&f, cases[i].module, cases[i].r, cases[i].in, cases[i].out);
        if (cases[i].good)
            make(&f);
        else
            assert_refused(&f, "do not name it", cases[i].module);
    }
}

TEST(a_rank_may_be_divided)
{
    static const char blocks[] =
        CONFIG("\"r\": 8, \"target_modules\": [\"c\"],"
               "\"use_bdlora\": {\"target_modules_bd_b\": [\"c\"], \"nblocks\": 2}");
    for (uint32_t n_dims = 2; n_dims <= 5; n_dims++) {
        fixture f = {0};
        pair(&f, "peft_config", CONFIG("\"r\": 8, \"target_modules\": [\"c\"]"));
        add(&f, "m.c.lora_A.default.weight", 8, 16);
        add(&f, "m.c.lora_B.default.weight", 16, 4);
        for (uint32_t i = 0; i < 2; i++) {
            f.entries[i].n_dims = n_dims;
            for (uint32_t d = 2; d < n_dims; d++)
                f.entries[i].shape[d] = 1;
        }
        if (n_dims > 2) { /* a convolution with groups */
            make(&f);
            continue;
        }
        assert_refused(&f, "both should be the rank", "m.c.lora_A");
        f.pairs[0].value = blocks;
        make(&f);
        f.entries[1].shape[1] = 3;
        assert_refused(&f, "both should be the rank", "m.c.lora_A");
    }
}

TEST(attentions_have_a_projection_of_their_own)
{
    fixture f = {0};
    pair(&f, "peft_config",
         CONFIG("\"r\": 8, \"target_modules\": [\"mha\"],"
                "\"rank_pattern\": {\"mha\": 4}"));
    add_layer(&f, "m.mha", 4, 16, 48);
    add_layer(&f, "m.mha.base_layer.out_proj", 4, 16, 16);
    make(&f);
    f.pairs[0].value = CONFIG("\"r\": 4, \"target_modules\": [\"out_proj\"]");
    assert_refused(&f, "m.mha has a LoRA layer", "m.mha");
    f.table.n_pairs = 0;
    usual_pairs(&f);
    make(&f);
    assert_field("target_modules", "[\"mha\"]");
    assert_field("r", "4");
}

TEST(other_methods_than_lora_need_trust)
{
    fixture f = {0};
    pair(&f, "peft_config",
         "{\"peft_type\": \"IA3\", \"base_model_name_or_path\": \"m\", \"r\": 3}");
    add_layer(&f, "m.q", 8, 16, 16);
    assert_refused(&f, "peft_type is IA3", "");
    trusted = true;
    make(&f);
    /* In memory PEFT names an AdaLoRA's matrices lora_A.<adapter>, in the file lora_A. */
    f.pairs[0].value =
        "{\"peft_type\": \"ADALORA\", \"base_model_name_or_path\": \"m\"}";
    add(&f, "m.k.lora_A", 8, 16);
    make(&f);
    add(&f, "m.v.lora_A.default", 8, 16);
    assert_refused(&f, "peft_type is ADALORA, and '" PEFT_PREFIX "m.v.lora_A.default'",
                   "m.v.lora_A.default");
    trusted = false;
    assert_refused(&f, "peft_type is ADALORA, of which it is not known", "");
}

/* In PEFT the first pattern that matches wins. */
TEST(patterns_keep_the_trainers_order)
{
    static const char alphas[] = "{\"q\": 6, \"a.q\": 12, \"Z\": 1}";
    static const char given[] =
        CONFIG("\"r\": 4, \"lora_alpha\": 16, \"target_modules\": [\"q\"],"
               "\"rank_pattern\": {\"q\": 8, \"a.q\": 2},"
               "\"alpha_pattern\": {\"q\": 6, \"a.q\": 12, \"Z\": 1}");
    for (int i = 0; i < 2; i++) {
        fixture f = {0};
        if (i == 0) {
            pair(&f, "peft_config", given);
        } else {
            usual_pairs(&f);
            pair(&f, "alpha_pattern", alphas);
        }
        add_layer(&f, "m.a.q", 8, 16, 16);
        add_layer(&f, "m.b.q", 8, 16, 16);
        make(&f);
        char *text =
            json_dumps(json_object_get(config, "alpha_pattern"), JSON_PRESERVE_ORDER);
        assert_string_equal(text, alphas);
        free(text);
    }
    fixture f = {0};
    pair(&f, "peft_config",
         CONFIG("\"r\": 4, \"target_modules\": [\"q\"],"
                "\"rank_pattern\": {\"a.q\": 2, \"q\": 8}"));
    add_layer(&f, "m.a.q", 8, 16, 16);
    assert_refused(&f, "rank 2", "m.a.q");
}

TEST(a_given_configuration_must_fit)
{
    static const struct {
        const char *config, *why, *key;
    } cases[] = {
        {"{", "no JSON object", ""},
        {"[]", "no JSON object", ""},
        {"{\"r\": 8, \"r\": 9}", "no JSON object", ""},
        {"{\"r\": 8}", "no peft_type", ""},
        {"{\"peft_type\": \"LORA\", \"r\": 8}", "base model", ""},
        {CONFIG("\"r\": 4, \"target_modules\": [\"q\", \"k\"]"), "rank 4", "lora_A"},
        {CONFIG("\"r\": \"8\", \"target_modules\": [\"q\", \"k\"]"), "positive integer",
         ""},
        {CONFIG("\"r\": 8, \"target_modules\": [\"q\"]"), "m.k has a LoRA layer",
         "m.k"},
        {CONFIG("\"r\": 8, \"target_modules\": [\"q\", \"xk\", \"k.x\"]"),
         "m.k has a LoRA layer", "m.k"},
        {CONFIG("\"r\": 8, \"target_modules\": \"m.q\""), "m.k has a LoRA layer",
         "m.k"},
        {CONFIG("\"r\": 8, \"rank_pattern\": {\"q\": 16}"), "rank 16", "m.q"},
        {CONFIG("\"r\": 8, \"rank_pattern\": {\"(q|x)\": 16, \"k\": 4}"), "rank 4",
         "m.k"},
        {CONFIG("\"r\": 16, \"rank_pattern\": {\"(q)\": 4}"), "16", "m."},
        {CONFIG("\"r\": 8, \"rank_pattern\": {\"q\": \"x\"}"), "rank_pattern", ""},
        {CONFIG("\"r\": 8, \"rank_pattern\": {\"(q|x)\": 16}"), "rank 16", "m.q"},
        {CONFIG("\"r\": 8, \"target_modules\": \".*\\\\.(q|v)\""),
         "m.k has a LoRA layer", "m.k"},
        {CONFIG("\"r\": 8, \"rank_pattern\": {\"(q\": 16}"),
         "the pattern '(q' in rank_pattern is no regular expression: missing", ""},
        {CONFIG("\"r\": 8, \"target_modules\": \"[q\""),
         "the pattern '[q' in target_modules is no regular expression: missing", ""},
        {CONFIG("\"r\": 8, \"target_modules\": \"(.?.?.?.?.?){60}[xy]\""),
         "the pattern '(.?.?.?.?.?){60}[xy]' in target_modules takes too long to "
         "match m.k",
         ""},
        {CONFIG("\"r\": 8, \"rank_pattern\": []"), "rank_pattern", ""},
        {CONFIG("\"r\": 8, \"use_dora\": true"), "use_dora is set", "m."},
        {CONFIG("\"r\": 8, \"lora_bias\": true"), "lora_bias is set", "m."},
        {CONFIG("\"r\": 8, \"modules_to_save\": [\"lm_head\"]"), "no tensor", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture f = {0};
        pair(&f, "peft_config", cases[i].config);
        add_layer(&f, "m.q", 8, 16, 16);
        add_layer(&f, "m.k", 8, 16, 16);
        assert_refused(&f, cases[i].why, cases[i].key);
    }
}

TEST(what_cannot_be_proven_is_believed)
{
    static const char *const configs[] = {
        CONFIG("\"target_modules\": \"all-linear\""), /* PEFT's default r is 8 */
        CONFIG("\"r\": 8, \"target_modules\": null"),
        CONFIG("\"r\": 8, \"target_modules\": \".*\\\\.(q|k)\""),
        CONFIG("\"r\": 8, \"target_modules\": \"m\\\\.\\\\w\""),
        CONFIG("\"r\": 4, \"rank_pattern\": {\"(q|k)\": 8}"),
        CONFIG("\"r\": 4, \"rank_pattern\": {\"(?x: q)\": 8, \"k\": 8}"),
        CONFIG("\"r\": 4, \"rank_pattern\": {\"q\": 8, \"m.k\": 8}"),
    };
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        fixture f = {0};
        pair(&f, "peft_config", configs[i]);
        add_layer(&f, "m.q", 8, 16, 16);
        add_layer(&f, "m.k", 8, 16, 16);
        add(&f, "m.k.lora_A.odd.one.weight", 2, 2);
        make(&f);
    }
}

TEST(given_fused_experts_are_checked)
{
    static const struct {
        const char *config, *why;
    } cases[] = {
        {CONFIG("\"r\": 4, \"target_modules\": [\"q_proj\"], \"target_parameters\":"
                "[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"],"
                "\"rank_pattern\": {\".*\\\\.gate_up_proj\": 8}"),
         NULL},
        {CONFIG("\"r\": 4, \"target_modules\": [\"q_proj\"], \"target_parameters\":"
                "[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]"),
         "times the number of experts"},
        {CONFIG("\"r\": 4, \"target_modules\": [\"q_proj\"], \"target_parameters\":"
                "[\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"],"
                "\"rank_pattern\": {\".*\\\\.gate_up_proj\": 16}"),
         "times the number of experts"},
        {CONFIG("\"r\": 4, \"target_modules\": [\"q_proj\"], \"target_parameters\":"
                "[\"other.gate_up_proj\"]"),
         "do not name it"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fixture f = {0};
        pair(&f, "peft_config", cases[i].config);
        add_layer(&f, "model.layers.0.self_attn.q_proj", 4, 32, 32);
        add_fused(&f, "model.layers.0.mlp.experts", 8, 4);
        if (cases[i].why)
            assert_refused(&f, cases[i].why, "mlp.experts");
        else
            make(&f);
        pair(&f, "num_experts", "5");
        assert_refused(&f, "", "mlp.experts");
    }
}
