/* SPDX-License-Identifier: Apache-2.0 */
/* Adapter directories: made whole or not at all, reused, refused, locked. Linked with
   --wrap=mmap64 and --wrap=fsync, which let these fail, and --wrap=geteuid: the files that we make
   are then another user's. */
#include "adapter/adapter.h"
#include "testing.h"

#include <dirent.h>
#include <fcntl.h>
#include <fanin/client.h>
#include <fanin/safetensors.h>
#include <jansson.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* ------------------------------------------------------------- faults */

static bool no_shared_mappings;
static unsigned refused_mappings;
static int fsync_to_fail; /* counts down; 0: none */

void *__real_mmap64(void *address, size_t size, int protection, int flags, int fd,
                    off_t offset);
void *__wrap_mmap64(void *address, size_t size, int protection, int flags, int fd,
                    off_t offset);
int __real_fallocate64(int fd, int mode, off_t offset, off_t size);
int __wrap_fallocate64(int fd, int mode, off_t offset, off_t size);
int __real_posix_fallocate64(int fd, off_t offset, off_t size);
int __wrap_posix_fallocate64(int fd, off_t offset, off_t size);
int __real_fsync(int fd);
int __wrap_fsync(int fd);

void *__wrap_mmap64(void *address, size_t size, int protection, int flags, int fd,
                    off_t offset)
{
    if (no_shared_mappings && (flags & MAP_SHARED)) {
        refused_mappings++;
        errno = ENODEV;
        return MAP_FAILED;
    }
    return __real_mmap64(address, size, protection, flags, fd, offset);
}

/* As a filter of system calls has it; the C library then falls back for nothing but EOPNOTSUPP. */
static bool no_fallocate;

int __wrap_fallocate64(int fd, int mode, off_t offset, off_t size)
{
    if (!no_fallocate)
        return __real_fallocate64(fd, mode, offset, size);
    errno = ENOSYS;
    return -1;
}

int __wrap_posix_fallocate64(int fd, off_t offset, off_t size)
{
    return no_fallocate ? ENOSYS : __real_posix_fallocate64(fd, offset, size);
}

static uid_t other_user; /* who we are; 0: who we really are */
uid_t __real_geteuid(void);
uid_t __wrap_geteuid(void);

uid_t __wrap_geteuid(void)
{
    return other_user ? other_user : __real_geteuid();
}

int __wrap_fsync(int fd)
{
    if (fsync_to_fail > 0 && --fsync_to_fail == 0) {
        errno = EIO;
        return -1;
    }
    return __real_fsync(fd);
}

/* ------------------------------------------------------------- fixture */

/* 9 MiB and some: three pieces of a digest, the last one cut. */
#define BIG_ROWS ((uint64_t)9 * 1024 + 1)

static key_entry entries[] = {
    {.name = "m.q.lora_A.default.weight",
     .dtype = FANIN_DTYPE_BF16,
     .n_dims = 2,
     .shape = {8, 512},
     .bytes = 8192},
    {.name = "m.q.lora_B.default.weight",
     .dtype = FANIN_DTYPE_BF16,
     .n_dims = 2,
     .shape = {BIG_ROWS * 64, 8},
     .bytes = BIG_ROWS * 1024},
};
static fanin_pair pairs[] = {{"base_model_name_or_path", "org/model"},
                             {"lora_alpha", "16"}};
static const key_table keys = {
    .entries = entries, .count = 2, .pairs = pairs, .n_pairs = 2};
static const adapter_identity identity = {.world_id = {1, 2, 3},
                                          .publication = "lora:0",
                                          .step = 12,
                                          .key_table = {{4, 5, 6}}};

static char root[64], place[80];
static int files; /* open before the test */

static int count_entries(const char *path);

static int setup(void **state)
{
    /* Memory, if there is: syncing a disk takes its time. */
    bool memory = access("/dev/shm", W_OK) == 0;
    strcpy(root,
           memory ? "/dev/shm/fanin-adapter-XXXXXX" : "/tmp/fanin-adapter-XXXXXX");
    if (!mkdtemp(root))
        return -1;
    snprintf(place, sizeof place, "%s/step", root);
    files = count_entries("/proc/self/fd");
    return 0;
}

static int teardown(void **state)
{
    char command[128];
    no_shared_mappings = false;
    no_fallocate = false;
    fsync_to_fail = 0;
    other_user = 0;
    snprintf(command, sizeof(command), "rm -rf '%s'", root);
    assert_int_equal(count_entries("/proc/self/fd"), files);
    return system(command);
}

#define CASE(name) TEST_WITH(name, setup, teardown)

/* How many entries @p path has, "." and ".." not counted; -1: it is not there. */
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

static adapter *open_at(const char *directory)
{
    adapter *a = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    if (adapter_open(
            &(adapter_terms){.directory = directory, .at = deadline_in_ms(10000)}, &a,
            &error))
        fail_msg("%s", error.message);
    return a;
}

/* What a tensor holds: the bytes of a pattern from here on, made once. */
static const uint8_t *content(unsigned seed)
{
    enum { SEEDS = 64 };
    static uint8_t pattern[BIG_ROWS * 1024 + SEEDS];
    if (!pattern[1]) {
        for (uint64_t i = 0; i < sizeof pattern; i++)
            pattern[i] = (uint8_t)(i * 31 + i / 4099);
    }
    assert_true(seed < SEEDS);
    return pattern + seed;
}

/* Fills all tensors, in pieces of an odd size from the end to the beginning. */
static void fill(adapter *a, uint8_t *base, const uint64_t *to, unsigned seed)
{
    for (uint32_t k = 0; k < keys.count; k++) {
        uint64_t step = 5611;
        for (uint64_t end = entries[k].bytes; end > 0;) {
            uint64_t begin = end > step ? end - step : 0;
            assert_int_equal(adapter_need(a, to[k] + begin, end - begin, NULL), 0);
            memcpy(base + to[k] + begin, content(seed + k) + begin, end - begin);
            adapter_landed(a, to[k] + begin, end - begin);
            end = begin;
        }
    }
}

static fanin_status write_it(adapter *a, unsigned seed, fanin_error *error)
{
    const uint64_t *to;
    uint64_t size;
    uint8_t *base;
    fanin_status status = adapter_prepare(a, &keys, "lora:0", &to, &size, error);
    if (!status)
        status = adapter_map(a, &base, error);
    if (!status)
        fill(a, base, to, seed);
    return status ? status : adapter_publish(a, &identity, error);
}

static void make_adapter(unsigned seed)
{
    adapter *a = open_at(place);
    fanin_error error = FANIN_ERROR_INIT;
    if (write_it(a, seed, &error))
        fail_msg("%s", error.message);
    adapter_close(&a);
    assert_null(a);
}

/* The file's digest as the format documents it. */
static digest file_digest(const char *path)
{
    digest pieces[8];
    size_t count = 0;
    FILE *file = fopen(path, "rbe");
    assert_non_null(file);
    char *data = malloc(DIGEST_PIECE);
    for (size_t size; (size = fread(data, 1, DIGEST_PIECE, file)) > 0;)
        pieces[count++] = digest_of(data, size);
    free(data);
    fclose(file);
    return digest_of(pieces, count * sizeof pieces[0]);
}

/* A file of the directory, to be freed. */
static size_t read_file(const char *name, char **text_out)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s", place, name);
    FILE *file = fopen(path, "rbe");
    assert_non_null(file);
    *text_out = calloc(1, 65536);
    size_t size = fread(*text_out, 1, 65535, file);
    fclose(file);
    return size;
}

static void assert_text(const json_t *object, const char *field, const char *wanted)
{
    assert_string_equal(json_string_value(json_object_get(object, field)), wanted);
}

/* The directory is complete and holds what fill() made. */
static void assert_whole(unsigned seed)
{
    char path[128], hex[33];
    assert_int_equal(count_entries(root), 1);
    assert_int_equal(count_entries(place), 3);
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", place);
    fanin_safetensors *file = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    if (fanin_safetensors_open(path, &file, &error))
        fail_msg("%s", error.message);
    static const char *const names[] = {"base_model.model.m.q.lora_A.weight",
                                        "base_model.model.m.q.lora_B.weight"};
    for (uint32_t k = 0; k < 2; k++) {
        fanin_safetensors_entry entry = {.struct_size = sizeof entry};
        int64_t index = fanin_safetensors_find(file, names[k]);
        assert_true(index >= 0 && fanin_safetensors_get(file, (size_t)index, &entry));
        uint8_t *data = malloc(entry.bytes);
        assert_int_equal(pread(fanin_safetensors_descriptor(file), data, entry.bytes,
                               (off_t)entry.offset),
                         entry.bytes);
        if (memcmp(data, content(seed + k), entry.bytes) != 0)
            fail_msg("%s differs", names[k]);
        free(data);
    }
    fanin_safetensors_close(&file);

    digest d = file_digest(path);
    digest_hex(d.bytes, hex);
    snprintf(path, sizeof path, "%s/fanin.json", place);
    json_t *json = json_load_file(path, 0, NULL);
    const json_t *model =
        json_object_get(json_object_get(json, "files"), "adapter_model.safetensors");
    assert_text(model, "xxh3_128_of_4mib_pieces", hex);
    const json_t *config =
        json_object_get(json_object_get(json, "files"), "adapter_config.json");
    char *text = NULL;
    size_t size = read_file("adapter_config.json", &text);
    d = digest_of(text, size);
    free(text);
    digest_hex(d.bytes, hex);
    assert_text(config, "xxh3_128", hex);
    assert_text(json, "publication", "lora:0");
    assert_text(json, "world_id", "01020300000000000000000000000000");
    assert_text(json, "key_table", "04050600000000000000000000000000");
    assert_text(json, "fanin_version", fanin_version());
    assert_int_equal(json_integer_value(json_object_get(json, "step")), 12);
    json_decref(json);
    snprintf(path, sizeof path, "%s/adapter_config.json", place);
    json = json_load_file(path, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(json, "r")), 8);
    json_decref(json);
}

static fanin_status try_reuse(const adapter_identity *wanted, bool *reuse,
                              fanin_error *error)
{
    adapter *a = open_at(place);
    const uint64_t *to;
    uint64_t size;
    *error = (fanin_error)FANIN_ERROR_INIT;
    assert_int_equal(adapter_prepare(a, &keys, wanted->publication, &to, &size, error),
                     0);
    fanin_status status = adapter_reusable(a, wanted, reuse, error);
    adapter_close(&a);
    return status;
}

/* Of the test that runs: what open_at() gave, and what follows. */
static adapter *a;
static const uint64_t *to;
static uint64_t size;
static uint8_t *base;

static void prepare(void)
{
    a = open_at(place);
    assert_int_equal(adapter_prepare(a, &keys, "lora:0", &to, &size, NULL), 0);
}

/* As far as memory to be filled. */
static void begin(void)
{
    prepare();
    assert_int_equal(adapter_map(a, &base, NULL), 0);
}

/* ------------------------------------------------------------- making */

CASE(a_directory_appears_whole)
{
    bool reuse = true;
    fanin_error error;
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_OK);
    assert_false(reuse);
    make_adapter(1);
    assert_whole(1);
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_OK);
    assert_true(reuse);
    assert_int_equal(count_entries(root), 1);
}

CASE(it_appears_without_shared_mappings)
{
    no_shared_mappings = true;
    make_adapter(2);
    assert_true(refused_mappings > 0);
    assert_whole(2);
}

/* The space is there before the bytes come, without the system call for that too. */
CASE(it_appears_without_fallocate)
{
    struct stat made;
    no_fallocate = true;
    begin();
    fill(a, base, to, 2);
    assert_int_equal(adapter_publish(a, &identity, NULL), 0);
    adapter_close(&a);
    assert_whole(2);
    char file[120];
    snprintf(file, sizeof file, "%s/adapter_model.safetensors", place);
    assert_int_equal(stat(file, &made), 0);
    assert_true((uint64_t)made.st_blocks * 512 >= BIG_ROWS * 1024);
}

CASE(nothing_is_there_before_it_is_published)
{
    begin();
    fill(a, base, to, 3);
    assert_int_equal(access(place, F_OK), -1);
    adapter_close(&a);
    assert_int_equal(count_entries(root), 0);
}

CASE(bytes_that_never_landed_are_found)
{
    for (int twice = 0; twice < 2; twice++) {
        fanin_error error = FANIN_ERROR_INIT;
        begin();
        adapter_landed(a, to[0], entries[0].bytes);
        adapter_landed(a, to[1], entries[1].bytes - 1);
        if (twice) {
            adapter_landed(a, to[1] + entries[1].bytes - 1, 1);
            adapter_landed(a, to[1], 1);
        }
        assert_int_equal(adapter_publish(a, &identity, &error), FANIN_ERR_INTERNAL);
        adapter_close(&a);
        assert_int_equal(count_entries(root), 0);
    }
}

CASE(an_attempt_can_be_made_again)
{
    uint8_t *again;
    prepare();
    adapter_restart(a); /* before there is anything: no effect */
    assert_int_equal(adapter_map(a, &base, NULL), 0);
    fill(a, base, to, 4);
    adapter_restart(a);
    adapter_landed(a, to[0], 100);
    adapter_restart(a);
    assert_int_equal(adapter_map(a, &again, NULL), 0);
    assert_ptr_equal(base, again);
    fill(a, base, to, 5);
    assert_int_equal(adapter_publish(a, &identity, NULL), 0);
    adapter_close(&a);
    assert_whole(5);
}

CASE(a_catalog_may_move)
{
    key_entry smaller[2] = {entries[0], entries[1]};
    smaller[1].shape[0] = 64;
    smaller[1].bytes = 1024;
    key_entry renamed[2] = {entries[0], entries[1]};
    renamed[0].name = "m.v.lora_A.default.weight";
    renamed[1].name = "m.v.lora_B.default.weight";
    const key_table other = {
        .entries = smaller, .count = 2, .pairs = pairs, .n_pairs = 2};
    const key_table same_size = {
        .entries = renamed, .count = 2, .pairs = pairs, .n_pairs = 2};
    const key_table *const before[] = {&other, &same_size};
    for (size_t i = 0; i < 2; i++) {
        a = open_at(place);
        assert_int_equal(adapter_prepare(a, before[i], "lora:0", &to, &size, NULL), 0);
        assert_int_equal(adapter_map(a, &base, NULL), 0);
        adapter_landed(a, to[0], before[i]->entries[0].bytes);
        assert_int_equal(adapter_prepare(a, &keys, "lora:0", &to, &size, NULL), 0);
        assert_int_equal(adapter_map(a, &base, NULL), 0);
        fill(a, base, to, 6);
        assert_int_equal(adapter_publish(a, &identity, NULL), 0);
        adapter_close(&a);
        assert_whole(6);
        teardown(NULL);
        setup(NULL);
    }
}

CASE(an_empty_directory_is_replaced)
{
    assert_int_equal(mkdir(place, 0750), 0);
    bool reuse = true;
    fanin_error error;
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_OK);
    assert_false(reuse);
    make_adapter(7);
    assert_whole(7);
    struct stat info;
    assert_int_equal(stat(place, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0750);
}

CASE(a_trailing_slash_changes_nothing)
{
    strcat(place, "//");
    make_adapter(8);
    place[strlen(place) - 2] = '\0';
    assert_whole(8);
}

/* ------------------------------------------------------------- refusing */

CASE(another_identity_is_refused)
{
    make_adapter(1);
    adapter_identity other[4] = {identity, identity, identity, identity};
    other[0].step = 13;
    other[1].world_id[15] = 1;
    other[2].publication = "lora:1";
    other[3].key_table.bytes[0] = 9;
    static const char *const why[] = {"another step: step 12 of lora:0", "another life",
                                      "another publication",
                                      "other tensors or metadata"};
    for (size_t i = 0; i < 4; i++) {
        bool reuse = true;
        fanin_error error;
        assert_int_equal(try_reuse(&other[i], &reuse, &error), FANIN_ERR_EXISTS);
        assert_false(reuse);
        if (!strstr(error.message, why[i]))
            fail_msg("%s", error.message);
        assert_true(error.remedy[0] != '\0');
    }
    assert_whole(1);
}

static void write_text(const char *file, const char *text)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s", place, file);
    FILE *out = fopen(path, "we");
    assert_non_null(out);
    fputs(text, out);
    fclose(out);
}

static void assert_exists(const char *why)
{
    bool reuse = true;
    fanin_error error;
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_ERR_EXISTS);
    assert_false(reuse);
    if (!strstr(error.message, why))
        fail_msg("'%s', not '%s'", error.message, why);
}

static void flip_byte(const char *path, off_t at)
{
    unsigned char byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

CASE(damaged_and_foreign_content_is_refused)
{
    char path[160];
    make_adapter(1);
    write_text("README.md", "more files do no harm");
    bool reuse;
    fanin_error error;
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_OK);
    assert_true(reuse);
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", place);
    flip_byte(path, 5 << 20);
    assert_exists("adapter_model.safetensors is not as fanin.json says");
    flip_byte(path, 5 << 20);
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_OK);
    snprintf(path, sizeof path, "%s/adapter_config.json", place);
    flip_byte(path, 30); /* of the same size */
    assert_exists("adapter_config.json is not as fanin.json says");
    write_text("adapter_config.json", "{}");
    assert_exists("adapter_config.json is not as fanin.json says");
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", place);
    assert_int_equal(truncate(path, 100), 0);
    assert_exists("damaged");
    write_text("fanin.json", "{\"format\": 1}");
    assert_exists("no readable fanin.json");
}

CASE(what_is_no_directory_is_refused)
{
    FILE *file = fopen(place, "we");
    fclose(file);
    assert_exists("no directory");
    unlink(place);
    assert_int_equal(symlink("nowhere", place), 0);
    assert_exists("symbolic link");
    unlink(place);
    char target[80];
    snprintf(target, sizeof(target), "%s/real", root);
    assert_int_equal(mkdir(target, 0777), 0);
    assert_int_equal(symlink("real", place), 0);
    assert_exists("symbolic link");
    assert_int_equal(count_entries(root), 2);
}

CASE(links_are_not_followed)
{
    static const char *const files[] = {"adapter_model.safetensors",
                                        "adapter_config.json", "fanin.json"};
    make_adapter(1);
    char real[80], path[160], moved[160];
    snprintf(real, sizeof real, "%s/real", root);
    assert_int_equal(rename(place, real), 0);
    assert_int_equal(symlink("real", place), 0);
    assert_exists("is a symbolic link, which is not followed");
    assert_int_equal(unlink(place), 0);
    assert_int_equal(rename(real, place), 0);
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", place, files[i]);
        snprintf(moved, sizeof moved, "%s/moved", root);
        assert_int_equal(rename(path, moved), 0);
        assert_int_equal(symlink("../moved", path), 0);
        assert_exists("is a symbolic link");
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mkfifo(path, 0600), 0); /* opened, it would wait */
        assert_exists("is no regular file");
        assert_int_equal(unlink(path), 0);
        assert_int_equal(rename(moved, path), 0);
    }
    /* Another name of a file that only we can write to does no harm. */
    snprintf(path, sizeof path, "%s/%s", place, files[0]);
    assert_int_equal(link(path, moved), 0);
    bool reuse = false;
    fanin_error error;
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_OK);
    assert_true(reuse);
}

CASE(what_another_user_made_is_refused)
{
    char path[160];
    make_adapter(1);
    bool reuse = true;
    fanin_error error = FANIN_ERROR_INIT;
    prepare();
    /* Everything fits, but it is not ours. The parent is, as /tmp, fine. */
    other_user = 4321;
    assert_int_equal(adapter_reusable(a, &identity, &reuse, &error), FANIN_ERR_EXISTS);
    assert_false(reuse);
    assert_non_null(strstr(error.message, "this process is uid 4321"));
    other_user = 0;
    assert_int_equal(adapter_reusable(a, &identity, &reuse, &error), FANIN_OK);
    assert_true(reuse);
    adapter_close(&a);

    static const char *const files[] = {"adapter_model.safetensors",
                                        "adapter_config.json", "fanin.json"};
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", place, files[i]);
        assert_int_equal(chmod(path, 0664), 0);
        assert_exists("may be written by other users (mode 0664)");
        assert_int_equal(chmod(path, 0600), 0);
    }
    assert_int_equal(chmod(place, 0757), 0);
    assert_exists("it may be written by other users (mode 0757)");
    assert_int_equal(chmod(place, 0700), 0);
    assert_int_equal(chmod(root, 01777), 0);
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_OK);
    assert_true(reuse);
}

/* Whoever may rename there could exchange what is being made. */
CASE(a_parent_of_others_is_refused_before_anything_is_made)
{
    static const mode_t modes[] = {0770, 02775, 0777};
    fanin_error error = FANIN_ERROR_INIT;
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        assert_int_equal(chmod(root, modes[i]), 0);
        assert_int_equal(adapter_open(&(adapter_terms){.directory = place,
                                                       .at = deadline_in_ms(10000)},
                                      &a, &error),
                         FANIN_ERR_EXISTS);
        assert_null(a);
        assert_non_null(strstr(error.message, "the directory that it lies in may be "
                                              "written by other users"));
        assert_non_null(strstr(error.remedy, "chmod +t"));
        assert_int_equal(count_entries(root), 0);
    }
    assert_int_equal(chmod(root, 01777), 0);
    make_adapter(1);
}

static void find_temporary(char out[160])
{
    DIR *dir = opendir(root);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strstr(entry->d_name, ".fanin-tmp-"))
            snprintf(out, 160, "%.60s/%.90s", root, entry->d_name);
    }
    closedir(dir);
}

CASE(what_was_exchanged_meanwhile_is_noticed)
{
    char temporary[160] = "", stolen[160], elsewhere[160];
    snprintf(stolen, sizeof stolen, "%s/stolen", root);
    snprintf(elsewhere, sizeof elsewhere, "%s-elsewhere", root);
    for (int way = 0; way < 2; way++) {
        fanin_error error = FANIN_ERROR_INIT;
        begin();
        fill(a, base, to, 3);
        find_temporary(temporary);
        /* The half-made directory, or the one that it lies in. */
        assert_int_equal(rename(way ? root : temporary, way ? elsewhere : stolen), 0);
        assert_int_equal(mkdir(way ? root : temporary, 0700), 0);
        if (adapter_publish(a, &identity, &error) != FANIN_ERR_EXISTS ||
            !strstr(error.message, "is not the directory that was filled"))
            fail_msg("%s", error.message);
        adapter_close(&a);
        /* What is another's stays. */
        assert_int_equal(count_entries(way ? root : place), 0);
        assert_int_equal(rmdir(way ? root : place), 0);
        assert_true(!way || rename(elsewhere, root) == 0);
    }
}

CASE(an_empty_directory_of_another_user_is_refused)
{
    assert_int_equal(mkdir(place, 0777), 0);
    bool reuse;
    fanin_error error = FANIN_ERROR_INIT;
    begin();
    other_user = 4321;
    assert_int_equal(adapter_reusable(a, &identity, &reuse, &error), FANIN_ERR_EXISTS);
    /* Appeared after the look: its mode is not taken over. */
    fill(a, base, to, 1);
    assert_int_equal(chmod(place, 0707), 0);
    assert_int_equal(adapter_publish(a, &identity, NULL), 0);
    struct stat info;
    assert_int_equal(stat(place, &info), 0);
    assert_int_equal(info.st_mode & 07002, 0);
    other_user = 0;
    adapter_close(&a);
}

CASE(nobody_else_may_write_what_is_published)
{
    char path[160];
    struct stat info;
    mode_t before = umask(0);
    assert_int_equal(mkdir(place, 0777), 0);
    make_adapter(1);
    umask(before);
    assert_int_equal(stat(place, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0755);
    static const char *const files[] = {"adapter_model.safetensors",
                                        "adapter_config.json", "fanin.json"};
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", place, files[i]);
        assert_int_equal(stat(path, &info), 0);
        assert_int_equal(info.st_mode & 07777, 0644);
    }
}

/* As a user without privileges, to whom modes mean something. */
static int refused_under(mode_t mask)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {{0}, {0}};
    if (syscall(SYS_capset, &header, none) != 0)
        return 1;
    umask(mask);
    a = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = adapter_open(
        &(adapter_terms){.directory = place, .at = deadline_in_ms(10000)}, &a, &error);
    if (!status)
        status = write_it(a, 1, &error);
    adapter_close(&a);
    return status == FANIN_OK || error.message[0] == '\0' ? 2 : 0;
}

CASE(a_umask_that_denies_us_all_leaves_nothing)
{
    static const mode_t masks[] = {0777, 0477, 0177, 0277};
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            _exit(refused_under(masks[i]));
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        assert_int_equal(count_entries(root), 0);
    }
}

/* Of a version that wrote no digest of adapter_config.json: its bytes are looked at. */
CASE(a_directory_of_an_earlier_version_is_reused)
{
    char *text, path[160];
    make_adapter(1);
    read_file("fanin.json", &text);
    json_t *json = json_loads(text, 0, NULL);
    json_t *config =
        json_object_get(json_object_get(json, "files"), "adapter_config.json");
    assert_int_equal(json_object_del(config, "xxh3_128"), 0);
    snprintf(path, sizeof path, "%s/fanin.json", place);
    assert_int_equal(json_dump_file(json, path, 0), 0);
    json_decref(json);
    free(text);
    bool reuse = false;
    fanin_error error;
    assert_int_equal(try_reuse(&identity, &reuse, &error), FANIN_OK);
    assert_true(reuse);
    read_file("adapter_config.json", &text);
    char *alpha = strstr(text, "16");
    assert_non_null(alpha);
    alpha[1] = '7';
    write_text("adapter_config.json", text);
    free(text);
    assert_exists("another adapter_config.json");
}

CASE(a_lock_of_another_user_is_not_waited_for)
{
    char path[160], file[160];
    fanin_error error = FANIN_ERROR_INIT;
    snprintf(path, sizeof path, "%s/.step.fanin-lock", root);
    snprintf(file, sizeof file, "%s/file", root);
    static const char *const why[] = {"is no regular file", "is no regular file",
                                      "is no regular file", "has other names",
                                      "is not empty",       "belongs to uid"};
    for (size_t i = 0; i < sizeof why / sizeof why[0]; i++) {
        FILE *other = fopen(i == 4 ? path : file, "we");
        if (i == 4)
            fputs("precious", other);
        fclose(other);
        int held = -1;
        if (i == 0) {
            assert_int_equal(symlink("file", path), 0);
        } else if (i == 1) {
            assert_int_equal(mkfifo(path, 0600), 0);
        } else if (i == 2) {
            assert_int_equal(mkdir(path, 0700), 0);
        } else if (i == 3) {
            assert_int_equal(link(file, path), 0);
        } else if (i == 5) {
            held = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
            assert_int_equal(flock(held, LOCK_EX), 0);
            other_user = 4321;
        }
        /* Without a deadline: it must not even begin to wait. */
        assert_int_equal(
            adapter_open(&(adapter_terms){.directory = place, .at = UINT64_MAX}, &a,
                         &error),
            FANIN_ERR_EXISTS);
        other_user = 0;
        assert_null(a);
        if (!strstr(error.message, why[i]) ||
            !strstr(error.message, ".step.fanin-lock"))
            fail_msg("%s", error.message);
        assert_int_equal(access(path, F_OK), 0);
        assert_int_equal(remove(path), 0);
        if (held >= 0)
            close(held);
    }
}

CASE(what_appears_meanwhile_is_kept)
{
    a = open_at(place);
    assert_int_equal(mkdir(place, 0777), 0);
    write_text("mine", "precious");
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(write_it(a, 1, &error), FANIN_ERR_EXISTS);
    adapter_close(&a);
    assert_int_equal(count_entries(root), 1);
    assert_int_equal(count_entries(place), 1);
}

CASE(bad_places_are_refused)
{
    char longest[400], path[512];
    memset(longest, 'x', sizeof longest);
    longest[201] = '\0';
    snprintf(path, sizeof path, "%s/%s", root, longest);
    const char *const wrong[] = {"",     "/",      "//", ".", "..",
                                 "a/..", "/tmp/.", path, NULL};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        assert_int_equal(adapter_open(&(adapter_terms){.directory = wrong[i],
                                                       .at = deadline_in_ms(100)},
                                      &a, &error),
                         FANIN_ERR_ARGUMENT);
        assert_null(a);
        assert_true(error.message[0] != '\0');
    }
    longest[200] = '\0';
    snprintf(path, sizeof path, "%s/%s", root, longest);
    a = open_at(path);
    adapter_close(&a);
    snprintf(path, sizeof path, "%s/no/such", root);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(
        adapter_open(&(adapter_terms){.directory = path, .at = deadline_in_ms(100)}, &a,
                     &error),
        FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ENOENT);
    assert_non_null(strstr(error.remedy, "parent"));
    snprintf(path, sizeof path, "%s/file", root);
    fclose(fopen(path, "we"));
    strcat(path, "/x");
    assert_int_equal(
        adapter_open(&(adapter_terms){.directory = path, .at = deadline_in_ms(100)}, &a,
                     &error),
        FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ENOTDIR);
}

CASE(an_unwritable_parent_is_refused)
{
    if (geteuid() == 0) {
        /* Root may write everywhere but into the kernel's own filesystems. */
        strcpy(place, "/proc/fanin-adapter");
    } else {
        assert_int_equal(chmod(root, 0500), 0);
    }
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(
        adapter_open(&(adapter_terms){.directory = place, .at = deadline_in_ms(100)},
                     &a, &error),
        FANIN_ERR_IO);
    assert_true(error.sys_errno != 0);
    assert_int_equal(chmod(root, 0700), 0);
}

CASE(a_failed_sync_leaves_nothing)
{
    /* model, config, identity, directory, parent */
    for (int n = 1; n <= 5; n++) {
        a = open_at(place);
        fanin_error error = FANIN_ERROR_INIT;
        fsync_to_fail = n;
        assert_int_equal(write_it(a, 1, &error), FANIN_ERR_IO);
        assert_int_equal(error.sys_errno, EIO);
        assert_int_equal(fsync_to_fail, 0);
        adapter_close(&a);
        assert_int_equal(count_entries(root), 0);
    }
    fsync_to_fail = 6;
    make_adapter(1);
    assert_int_equal(fsync_to_fail, 1);
}

CASE(a_full_disk_is_an_error)
{
    if (mount("none", root, "tmpfs", 0, "size=4m") != 0) {
        print_message("cannot mount a filesystem of its own\n");
        skip();
    }
    a = open_at(place);
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = write_it(a, 1, &error);
    adapter_close(&a);
    int left = count_entries(root);
    assert_int_equal(umount2(root, MNT_DETACH), 0);
    assert_int_equal(status, FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ENOSPC);
    assert_non_null(strstr(error.message, "4194304 are free"));
    assert_int_equal(left, 0);
}

/* What the file of the adapter that is being made takes of the disk. */
static uint64_t space_taken(void)
{
    uint64_t bytes = 0;
    char path[512];
    DIR *beside = opendir(root);
    assert_non_null(beside);
    for (struct dirent *d; (d = readdir(beside));) {
        struct stat info;
        snprintf(path, sizeof path, "%s/%s/adapter_model.safetensors", root, d->d_name);
        if (stat(path, &info) == 0)
            bytes += (uint64_t)info.st_blocks * 512;
    }
    closedir(beside);
    return bytes;
}

/* A layout of as many GiB as a rank cares to announce. */
static adapter *map_claim(uint64_t gib, uint64_t *size_out)
{
    key_entry claimed[2] = {entries[0], entries[1]};
    key_table table = keys;
    claimed[1].shape[0] = gib << 26;
    claimed[1].bytes = gib << 30;
    table.entries = claimed;
    a = open_at(place);
    assert_works(adapter_prepare(a, &table, "lora:0", &to, size_out, ERROR));
    assert_works(adapter_map(a, &base, ERROR));
    return a;
}

#define MIB ((uint64_t)1 << 20)

CASE(a_claim_takes_no_space)
{
    a = map_claim(1, &size);
    /* The threads go ahead by 64 MiB, whenever they get to it. */
    for (int i = 0; i < 100; i++)
        assert_true(space_taken() <= 72 * MIB);
    uint64_t before = space_taken();
    assert_int_equal(adapter_need(a, 900 * MIB, 100, NULL), 0);
    assert_true(space_taken() >= before + 4 * MIB);
    assert_int_equal(adapter_need(a, size - 1, 1, NULL), 0);
    adapter_close(&a);
    assert_int_equal(count_entries(root), 0);
}

CASE(a_disk_that_fills_up_is_an_error)
{
    if (mount("none", root, "tmpfs", 0, "size=1100m") != 0) {
        print_message("cannot mount a filesystem of its own\n");
        skip();
    }
    fanin_error error = FANIN_ERROR_INIT;
    a = map_claim(1, &size);
    assert_int_equal(mount("none", root, "tmpfs", MS_REMOUNT, "size=80m"), 0);
    fanin_status status = FANIN_OK;
    for (uint64_t at = 200 * MIB; at < 400 * MIB && status == FANIN_OK; at += MIB)
        status = adapter_need(a, at, MIB, &error);
    adapter_close(&a);
    int left = count_entries(root);
    assert_int_equal(umount2(root, MNT_DETACH), 0);
    assert_int_equal(status, FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ENOSPC);
    assert_non_null(strstr(error.message, "no room for"));
    assert_int_equal(left, 0);
}

CASE(sizes_have_a_limit)
{
    if (mount("none", root, "tmpfs", 0, "size=32m") != 0) {
        print_message("cannot mount a filesystem of its own\n");
        skip();
    }
    fanin_error error = FANIN_ERROR_INIT;
    prepare();
    fanin_status by_default = adapter_check_size(a, 0, &error);
    fanin_status enough = adapter_check_size(a, size, NULL);
    fanin_error told = FANIN_ERROR_INIT;
    fanin_status given = adapter_check_size(a, size - 1, &told);
    adapter_close(&a);
    assert_int_equal(umount2(root, MNT_DETACH), 0);
    assert_int_equal(by_default, FANIN_ERR_LIMIT);
    assert_non_null(strstr(error.message, "a quarter of its file system"));
    assert_non_null(strstr(error.remedy, "--max-bytes"));
    assert_int_equal(enough, FANIN_OK);
    assert_int_equal(given, FANIN_ERR_LIMIT);
    assert_non_null(strstr(told.message, "(max_bytes)"));
}

/* In a child: a limit cannot be raised again. Neither writing a file nor making its space ends it.
   */
static void limit_of_file_sizes(bool mappings, rlim_t bytes)
{
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {bytes, bytes};
        fanin_error error = FANIN_ERROR_INIT;
        no_shared_mappings = !mappings;
        a = open_at(place);
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
            _exit(1);
        fanin_status status = write_it(a, 1, &error);
        adapter_close(&a);
        bool told = error.sys_errno == EFBIG && strstr(error.remedy, "ulimit -f");
        _exit(status == FANIN_ERR_IO && told ? 0 : 2);
    }
    assert_int_equal(tests_await(child), 0);
    assert_int_equal(count_entries(root), 0);
}

CASE(a_limit_of_file_sizes_is_an_error)
{
    limit_of_file_sizes(true, 1 << 20);
    limit_of_file_sizes(true, 100);
    limit_of_file_sizes(false, 1 << 20);
}

/* From now on no descriptor can be had, nor any again that is closed; *before is for give_back().
   */
static void use_up_descriptors(struct rlimit *before)
{
    assert_int_equal(getrlimit(RLIMIT_NOFILE, before), 0);
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = before->rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
}

static void give_back(const struct rlimit *before)
{
    assert_int_equal(setrlimit(RLIMIT_NOFILE, before), 0);
}

/* Which looks a name up before it counts descriptors: what is not there is not there. */
static bool on_valgrind(void)
{
    const char *loaded = getenv("LD_PRELOAD");
    return loaded && strstr(loaded, "vgpreload");
}

static void assert_out_of_descriptors(const fanin_error *error, const char *what)
{
    assert_int_equal(error->status, FANIN_ERR_IO);
    assert_int_equal(error->sys_errno, EMFILE);
    assert_non_null(strstr(error->message, what));
    assert_non_null(strstr(error->remedy, "ulimit -n"));
}

/* Each step names what could not be opened and the limit, and nothing stays behind. */
CASE(without_descriptors_nothing_is_left)
{
    struct rlimit before;
    bool reuse;
    fanin_error error = FANIN_ERROR_INIT;
    use_up_descriptors(&before);
    adapter_open(&(adapter_terms){.directory = place, .at = deadline_in_ms(100)}, &a,
                 &error);
    give_back(&before);
    assert_out_of_descriptors(&error, "parent directory");

    a = open_at(place);
    assert_ok(adapter_prepare(a, &keys, "lora:0", &to, &size, &error), error);
    use_up_descriptors(&before);
    fanin_status reusable = adapter_reusable(a, &identity, &reuse, &error);
    fanin_error of_reuse = error;
    fanin_status mapped = adapter_map(a, &base, &error);
    give_back(&before);
    if (!on_valgrind()) {
        assert_int_equal(reusable, FANIN_ERR_IO);
        assert_out_of_descriptors(&of_reuse, "cannot open");
    }
    assert_int_equal(mapped, FANIN_ERR_IO);
    assert_out_of_descriptors(&error, "cannot make");
    assert_int_equal(count_entries(root), 1); /* the lock's file */

    assert_ok(adapter_map(a, &base, &error), error);
    use_up_descriptors(&before);
    fill(a, base, to, 1);
    fanin_status published = adapter_publish(a, &identity, &error);
    adapter_close(&a);
    give_back(&before);
    assert_int_equal(published, FANIN_ERR_IO);
    assert_out_of_descriptors(&error, "adapter_config.json");
    assert_int_equal(count_entries(root), 0);
}

/* ------------------------------------------------------------- other processes */

/* A directory under @p name with an empty file @p file in it. */
static void make_leftover(const char *name, const char *file)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", root, name);
    assert_int_equal(mkdir(path, 0755), 0);
    strcat(path, "/");
    strcat(path, file);
    fclose(fopen(path, "we"));
}

static void make_lock_file(const char *name)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s", root, name);
    fclose(fopen(path, "we"));
}

static bool is_there(const char *name)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s", root, name);
    return access(path, F_OK) == 0;
}

#define MODEL "adapter_model.safetensors"

static void make_leftovers(void)
{
    make_leftover(".step.fanin-tmp-0123456789abcdef", MODEL);
    make_lock_file(".step.fanin-lock");
    make_leftover(".other.fanin-tmp-0123456789abcdef", MODEL);
    make_leftover(".other.fanin-tmp-1123456789abcdef", "fanin.json");
    make_lock_file(".other.fanin-lock");
    make_lock_file(".third.fanin-lock");
}

/* Names that are like those of leftovers, or a directory of something else. */
static void make_neighbours(void)
{
    make_leftover(".step.fanin-tmp-0123456789abcde", MODEL);
    make_leftover(".step.fanin-tmp-0123456789abcdefa", MODEL);
    make_leftover(".step.fanin-tmp-q.fanin-tmp-0123456789ab", MODEL);
    make_leftover("step.fanin-tmp-0123456789abcdef", MODEL);
    make_leftover(".full.fanin-tmp-0123456789abcdef", "thesis.tex");
}
#define NEIGHBOURS 5

CASE(leftovers_of_the_dead_are_removed)
{
    make_leftovers();
    make_neighbours();
    a = open_at(place);
    adapter_close(&a);
    assert_int_equal(count_entries(root), NEIGHBOURS);
    assert_true(is_there(".full.fanin-tmp-0123456789abcdef/thesis.tex"));
}

CASE(a_directory_can_be_swept)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint64_t removed = 9;
    make_leftovers();
    make_neighbours();
    assert_int_equal(fanin_sweep_adapter_directory(root, &removed, &error), FANIN_OK);
    assert_int_equal(removed, 3);
    assert_int_equal(count_entries(root), NEIGHBOURS);
    assert_int_equal(fanin_sweep_adapter_directory(root, &removed, &error), FANIN_OK);
    assert_int_equal(removed, 0);
    assert_int_equal(fanin_sweep_adapter_directory("", NULL, &error),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_sweep_adapter_directory(place, NULL, &error), FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ENOENT);
}

CASE(a_sweep_leaves_what_may_be_alive_or_not_ours)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint64_t removed;
    char path[160];
    make_leftovers();
    snprintf(path, sizeof path, "%s/.other.fanin-lock", root);
    int held = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(flock(held, LOCK_EX), 0);
    assert_int_equal(fanin_sweep_adapter_directory(root, &removed, &error), FANIN_OK);
    assert_int_equal(removed, 1);
    assert_int_equal(count_entries(root), 3);
    assert_true(is_there(".other.fanin-tmp-0123456789abcdef/" MODEL));
    close(held);
    /* In /tmp or in a directory of root's, where others have theirs. */
    other_user = 4321;
    fanin_status status = fanin_sweep_adapter_directory(root, &removed, &error);
    other_user = 0;
    assert_true(status == FANIN_OK || __real_geteuid() != 0);
    assert_int_equal(count_entries(root), 3);
    /* Where others may rename, a leftover's name proves nothing. */
    assert_int_equal(chmod(root, 0777), 0);
    assert_int_equal(fanin_sweep_adapter_directory(root, &removed, &error),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(chmod(root, 01777), 0);
    a = open_at(place);
    adapter_close(&a);
    assert_int_equal(count_entries(root), 0);
}

static bool yes(void *cookie)
{
    ++*(int *)cookie;
    return true;
}

/* A child that holds the lock and a half-made directory until it is killed. */
static pid_t start_holder(void)
{
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        a = NULL;
        if (adapter_open(
                &(adapter_terms){.directory = place, .at = deadline_in_ms(10000)}, &a,
                NULL) ||
            adapter_prepare(a, &keys, "lora:0", &to, &size, NULL) ||
            adapter_map(a, &base, NULL) || write(ready[1], "x", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    char byte;
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return child;
}

CASE(a_held_lock_is_waited_for)
{
    pid_t child = start_holder();
    fanin_error error = FANIN_ERROR_INIT;
    uint64_t before = clock_ns();
    assert_int_equal(
        adapter_open(&(adapter_terms){.directory = place, .at = deadline_in_ms(60)}, &a,
                     &error),
        FANIN_ERR_TIMEOUT);
    assert_true(clock_ns() - before >= 60000000);
    assert_null(a);
    int asked = 0;
    assert_int_equal(adapter_open(&(adapter_terms){.directory = place,
                                                   .at = UINT64_MAX,
                                                   .cancelled = yes,
                                                   .cookie = &asked},
                                  &a, &error),
                     FANIN_ERR_CANCELLED);
    assert_true(asked > 0);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(count_entries(root), 2);
    make_adapter(9);
    assert_whole(9);
}

/* What one of several processes does that want the same directory: 0 made it, 1 found it. */
static int worker(void)
{
    a = NULL;
    bool reuse = false;
    if (adapter_open(&(adapter_terms){.directory = place, .at = deadline_in_ms(20000)},
                     &a, NULL) ||
        adapter_prepare(a, &keys, "lora:0", &to, &size, NULL) ||
        adapter_reusable(a, &identity, &reuse, NULL))
        return 2;
    int result = reuse ? 1 : write_it(a, 11, NULL) ? 3 : 0;
    adapter_close(&a);
    return result;
}

CASE(of_many_processes_one_makes_it)
{
    enum { WORKERS = 8 };
    int count[4] = {0};
    pid_t children[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        children[i] = fork();
        if (children[i] == 0)
            _exit(worker());
    }
    for (int i = 0; i < WORKERS; i++) {
        int status = 0;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 4);
        count[WEXITSTATUS(status)]++;
    }
    assert_int_equal(count[0], 1);
    assert_int_equal(count[1], WORKERS - 1);
    assert_whole(11);
}

CASE(a_forked_child_does_not_keep_the_lock)
{
    a = open_at(place);
    pid_t child = fork();
    if (child == 0) {
        for (;;)
            pause();
    }
    adapter_close(&a);
    a = open_at(place);
    adapter_close(&a);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_int_equal(count_entries(root), 0);
}
