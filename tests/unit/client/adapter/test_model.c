/* SPDX-License-Identifier: Apache-2.0 */
/* Directories of models: several files in one range of addresses, whole or not at all, reused,
   refused. What holds for every directory is tested with adapters (test_adapter.c). Linked with
   --wrap=mmap64, which lets shared mappings fail. */
#include "adapter/adapter.h"
#include "testing.h"

#include <dirent.h>
#include <fanin/safetensors.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

static bool no_shared_mappings;
static bool no_mappings_in_range, unmapped_from_null;

int __real_munmap(void *address, size_t size);
int __wrap_munmap(void *address, size_t size);

int __wrap_munmap(void *address, size_t size)
{
    unmapped_from_null = unmapped_from_null || !address;
    return address ? __real_munmap(address, size) : 0;
}

void *__real_mmap64(void *address, size_t size, int protection, int flags, int fd,
                    off_t offset);
void *__wrap_mmap64(void *address, size_t size, int protection, int flags, int fd,
                    off_t offset);

void *__wrap_mmap64(void *address, size_t size, int protection, int flags, int fd,
                    off_t offset)
{
    if (no_mappings_in_range && (flags & MAP_FIXED)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (no_shared_mappings && (flags & MAP_SHARED)) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return __real_mmap64(address, size, protection, flags, fd, offset);
}

/* ------------------------------------------------------------- fixture */

#define MIB ((uint64_t)1 << 20)
enum { KEYS = 5 };

/* The second one is larger than a file: three pieces of a digest, the last one cut. */
static key_entry entries[KEYS] = {
    {.name = "model.a", .dtype = FANIN_DTYPE_U8, .n_dims = 1},
    {.name = "model.b", .dtype = FANIN_DTYPE_U8, .n_dims = 1},
    {.name = "model.c", .dtype = FANIN_DTYPE_U8, .n_dims = 1},
    {.name = "model.d", .dtype = FANIN_DTYPE_U8, .n_dims = 1},
    {.name = "model.e", .dtype = FANIN_DTYPE_U8, .n_dims = 1},
};
static const uint64_t sizes[KEYS] = {MIB, 9 * MIB + 5, 2 * MIB, 0, MIB + 1};
static fanin_pair pairs[] = {{"config", "{\"model_type\": \"m\"}"}};
static const key_table keys = {
    .entries = entries, .count = KEYS, .pairs = pairs, .n_pairs = 1};
static const adapter_identity identity = {.world_id = {1, 2, 3},
                                          .publication = "full:0",
                                          .step = 12,
                                          .key_table = {{4, 5, 6}}};
/* a and c; b alone; e */
#define FILE_BYTES (3 * MIB)
enum { FILES = 3, ALL_FILES = FILES + 3 };

static char root[64], place[80];

static int setup(void **state)
{
    for (size_t i = 0; i < KEYS; i++)
        entries[i].bytes = entries[i].shape[0] = sizes[i];
    bool memory = access("/dev/shm", W_OK) == 0;
    strcpy(root, memory ? "/dev/shm/model-XXXXXX" : "/tmp/model-XXXXXX");
    if (!mkdtemp(root))
        return -1;
    snprintf(place, sizeof place, "%s/step", root);
    return 0;
}

static int teardown(void **state)
{
    char command[128];
    no_shared_mappings = false;
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

#define CASE(name) TEST_WITH(name, setup, teardown)

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir)
        return -1;
    int count = 0;
    while (readdir(dir))
        count++;
    closedir(dir);
    return count - 2;
}

static adapter *open_model(uint64_t file_bytes, const uint64_t **to, uint64_t *span)
{
    adapter *a = NULL;
    assert_works(adapter_open(&(adapter_terms){.directory = place,
                                               .at = deadline_in_ms(10000),
                                               .is_model = true,
                                               .max_file_bytes = file_bytes},
                              &a, ERROR));
    assert_works(adapter_prepare(a, &keys, "full:0", to, span, ERROR));
    return a;
}

/* What a tensor holds: the bytes of a pattern from here on, made once. */
static const uint8_t *content(uint32_t key)
{
    static uint8_t pattern[10 * MIB];
    if (!pattern[1]) {
        for (uint64_t i = 0; i < sizeof pattern; i++)
            pattern[i] = (uint8_t)(i * 31 + i / 4099);
    }
    return pattern + key;
}

/* From the end to the beginning, so that files are not filled one after the other. */
static void fill(adapter *a, uint8_t *base, const uint64_t *to)
{
    enum { STEP = 700001 };
    for (uint32_t k = KEYS; k-- > 0;) {
        for (uint64_t end = sizes[k]; end > 0;) {
            uint64_t begin = end > STEP ? end - STEP : 0;
            assert_works(adapter_need(a, to[k] + begin, end - begin, ERROR));
            memcpy(base + to[k] + begin, content(k) + begin, end - begin);
            adapter_landed(a, to[k] + begin, end - begin);
            end = begin;
        }
    }
}

static void make_model(void)
{
    const uint64_t *to;
    uint64_t span;
    uint8_t *base;
    adapter *a = open_model(FILE_BYTES, &to, &span);
    assert_works(adapter_map(a, &base, ERROR));
    fill(a, base, to);
    assert_works(adapter_publish(a, &identity, ERROR));
    adapter_close(&a);
}

static json_t *load(const char *name)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s", place, name);
    json_t *root_value = json_load_file(path, 0, NULL);
    assert_non_null(root_value);
    return root_value;
}

static void assert_tensor(const char *file_name, uint32_t key)
{
    char path[160];
    fanin_safetensors *file = NULL;
    fanin_safetensors_entry entry = {.struct_size = sizeof entry};
    snprintf(path, sizeof path, "%s/%s", place, file_name);
    assert_works(fanin_safetensors_open(path, &file, ERROR));
    int64_t index = fanin_safetensors_find(file, entries[key].name);
    assert_true(index >= 0 && fanin_safetensors_get(file, (size_t)index, &entry));
    assert_int_equal(entry.bytes, sizes[key]);
    uint8_t *data = malloc(entry.bytes + 1);
    assert_int_equal(pread(fanin_safetensors_descriptor(file), data, entry.bytes,
                           (off_t)entry.offset),
                     entry.bytes);
    if (memcmp(data, content(key), entry.bytes) != 0)
        fail_msg("%s differs", entries[key].name);
    free(data);
    fanin_safetensors_close(&file);
}

/* Every tensor is where the index says, and fanin.json names every other file. */
static void assert_whole(void)
{
    assert_int_equal(count_entries(root), 1);
    assert_int_equal(count_entries(place), ALL_FILES);
    json_t *index = load("model.safetensors.index.json");
    const json_t *map = json_object_get(index, "weight_map");
    for (uint32_t k = 0; k < KEYS; k++)
        assert_tensor(json_string_value(json_object_get(map, entries[k].name)), k);
    json_decref(index);
    json_t *said = load("fanin.json");
    assert_int_equal(json_object_size(json_object_get(said, "files")), ALL_FILES - 1);
    json_decref(said);
    json_t *config = load("config.json");
    assert_string_equal(json_string_value(json_object_get(config, "model_type")), "m");
    json_decref(config);
}

static fanin_status try_reuse(uint64_t file_bytes, bool *reuse, fanin_error *error)
{
    const uint64_t *to;
    uint64_t span;
    adapter *a = open_model(file_bytes, &to, &span);
    *error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = adapter_reusable(a, &identity, reuse, error);
    adapter_close(&a);
    return status;
}

/* ------------------------------------------------------------- tests */

CASE(a_model_appears_whole_and_is_used_again)
{
    bool reuse = true;
    fanin_error error;
    assert_ok(try_reuse(FILE_BYTES, &reuse, &error), error);
    assert_false(reuse);
    make_model();
    assert_whole();
    assert_ok(try_reuse(FILE_BYTES, &reuse, &error), error);
    assert_true(reuse);
}

CASE(it_appears_without_shared_mappings)
{
    no_shared_mappings = true;
    make_model();
    assert_whole();
}

/* Nothing but the range is given back: who unmapped from NULL on would have the program itself. */
CASE(a_mapping_that_fails_takes_nothing_with_it)
{
    const uint64_t *to;
    uint64_t span;
    uint8_t *base;
    fanin_error error = FANIN_ERROR_INIT;
    adapter *a = open_model(FILE_BYTES, &to, &span);
    no_mappings_in_range = true;
    fanin_status status = adapter_map(a, &base, &error);
    no_mappings_in_range = false;
    assert_true(status != FANIN_OK);
    adapter_close(&a);
    assert_false(unmapped_from_null);
    assert_int_equal(count_entries(root), 0);
}

CASE(files_lie_side_by_side)
{
    const uint64_t *to;
    uint64_t span;
    uint8_t *base;
    adapter *a = open_model(FILE_BYTES, &to, &span);
    assert_works(adapter_map(a, &base, ERROR));
    /* what most paths ask for before they begin */
    assert_works(adapter_need(a, 0, span, ERROR));
    memset(base, 7, (size_t)span);
    assert_int_equal(access(place, F_OK), -1);
    adapter_close(&a);
    assert_int_equal(count_entries(root), 0);
}

CASE(a_new_attempt_fills_it_anew)
{
    const uint64_t *to;
    uint64_t span;
    uint8_t *base, *again;
    adapter *a = open_model(FILE_BYTES, &to, &span);
    assert_works(adapter_map(a, &base, ERROR));
    assert_works(adapter_need(a, to[1], sizes[1], ERROR));
    memset(base + to[1], 9, sizes[1]);
    adapter_landed(a, to[1], sizes[1]);
    adapter_restart(a);
    assert_works(adapter_map(a, &again, ERROR));
    assert_ptr_equal(again, base);
    fill(a, base, to);
    assert_works(adapter_publish(a, &identity, ERROR));
    adapter_close(&a);
    assert_whole();
}

CASE(a_table_of_other_sizes_is_mapped_anew)
{
    const uint64_t *to;
    uint64_t span;
    uint8_t *base;
    entries[4].bytes = entries[4].shape[0] = 17; /* two files */
    adapter *a = open_model(FILE_BYTES, &to, &span);
    assert_works(adapter_map(a, &base, ERROR));
    entries[4].bytes = entries[4].shape[0] = sizes[4];
    assert_works(adapter_prepare(a, &keys, "full:0", &to, &span, ERROR));
    assert_works(adapter_map(a, &base, ERROR));
    fill(a, base, to);
    assert_works(adapter_publish(a, &identity, ERROR));
    adapter_close(&a);
    assert_whole();
}

CASE(other_files_of_the_same_step_are_refused)
{
    bool reuse;
    fanin_error error;
    make_model();
    assert_int_equal(try_reuse(0, &reuse, &error), FANIN_ERR_EXISTS);
    assert_says(error.message, "max_file_bytes");
    assert_int_equal(try_reuse(2 * MIB, &reuse, &error), FANIN_ERR_EXISTS);
    assert_whole();
}

CASE(damage_in_any_file_is_found)
{
    static const char *const files[] = {"model-00001-of-00003.safetensors",
                                        "model-00002-of-00003.safetensors",
                                        "model-00003-of-00003.safetensors",
                                        "model.safetensors.index.json", "config.json"};
    bool reuse;
    fanin_error error;
    make_model();
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[160], byte;
        snprintf(path, sizeof path, "%s/%s", place, files[i]);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        off_t last = lseek(fd, -1, SEEK_END);
        assert_int_equal(pread(fd, &byte, 1, last), 1);
        byte ^= 1;
        assert_int_equal(pwrite(fd, &byte, 1, last), 1);
        assert_int_equal(try_reuse(FILE_BYTES, &reuse, &error), FANIN_ERR_EXISTS);
        assert_says(error.message, files[i]);
        byte ^= 1;
        assert_int_equal(pwrite(fd, &byte, 1, last), 1);
        close(fd);
    }
    assert_ok(try_reuse(FILE_BYTES, &reuse, &error), error);
}

CASE(what_a_killed_process_left_is_removed)
{
    pid_t pid = fork();
    if (pid == 0) {
        const uint64_t *to;
        uint64_t span;
        uint8_t *base;
        adapter *a = open_model(FILE_BYTES, &to, &span);
        if (adapter_map(a, &base, NULL) == FANIN_OK)
            kill(getpid(), SIGKILL);
        _exit(1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(count_entries(root), 2); /* the half-made one and its lock */
    make_model();
    assert_whole();
}

/* Takes all but so many of the descriptors that this process may have. */
static void leave_descriptors(int count)
{
    int last = -1;
    for (int fd; (fd = dup(0)) >= 0;)
        last = fd;
    while (count-- > 0)
        close(last--);
}

/* In a process of its own, whose limits are its own. */
static fanin_status with_limit(int resource, rlim_t most, char *message, size_t size)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        const struct rlimit limit = {most, most};
        const uint64_t *to;
        uint64_t span;
        uint8_t *base;
        fanin_error error = FANIN_ERROR_INIT;
        adapter *a = open_model(FILE_BYTES, &to, &span);
        setrlimit((__rlimit_resource_t)resource, &limit);
        if (resource == RLIMIT_NOFILE)
            leave_descriptors(2); /* the directory and one file of three */
        fanin_status status = adapter_map(a, &base, &error);
        adapter_close(&a);
        char text[1024];
        snprintf(text, sizeof text, "%s; %s", error.message, error.remedy);
        ssize_t written = write(ends[1], text, strlen(text) + 1);
        _exit(written > 0 && status != FANIN_OK ? 0 : 1);
    }
    int status;
    close(ends[1]);
    ssize_t n = read(ends[0], message, size);
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 && n > 0 ? FANIN_ERR_IO
                                                                  : FANIN_OK;
}

CASE(limits_of_the_process_are_named)
{
    char message[1024];
    assert_int_equal(with_limit(RLIMIT_FSIZE, 5 * MIB, message, sizeof message),
                     FANIN_ERR_IO);
    assert_says(message, "limit of file sizes");
    assert_int_equal(with_limit(RLIMIT_NOFILE, 64, message, sizeof message),
                     FANIN_ERR_IO);
    assert_says(message, "ulimit -n");
    assert_int_equal(count_entries(root), 0);
}

CASE(a_full_disk_is_an_error)
{
    const uint64_t *to;
    uint64_t span;
    uint8_t *base;
    fanin_error error = FANIN_ERROR_INIT;
    if (mount("none", root, "tmpfs", 0, "size=8m") != 0) {
        print_message("cannot mount a filesystem of its own\n");
        skip();
    }
    adapter *a = open_model(FILE_BYTES, &to, &span);
    fanin_status known = adapter_check_size(a, 0, &error);
    fanin_status status = adapter_map(a, &base, &error);
    adapter_close(&a);
    int left = count_entries(root);
    assert_int_equal(umount2(root, MNT_DETACH), 0);
    assert_int_equal(known, FANIN_ERR_IO); /* before there is a plan */
    assert_int_equal(status, FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ENOSPC);
    assert_says(error.message, "8388608 are free");
    assert_int_equal(left, 0);
}

CASE(a_model_has_a_size)
{
    const uint64_t *to;
    uint64_t span;
    fanin_error error = FANIN_ERROR_INIT;
    adapter *a = open_model(FILE_BYTES, &to, &span);
    assert_int_equal(adapter_check_size(a, MIB, &error), FANIN_ERR_LIMIT);
    assert_says(error.message, "the model has");
    assert_ok(adapter_check_size(a, 0, &error), error);
    adapter_close(&a);
}
