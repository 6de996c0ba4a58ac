/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are made before they are needed, and adapters that take them. */
#include "adapter/adapter.h"
#include "adapter/file_pages.h"
#include "testing.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define SIZE ((uint64_t)37 * 1000 * 1000) /* no multiple of anything */

static char root[64];
static int parent = -1;
static logger nobody;
static uint64_t mapped_inode; /* of the last nameless file that was mapped; 0: none */

static int setup(void **state)
{
    bool memory = access("/dev/shm", W_OK) == 0;
    strcpy(root, memory ? "/dev/shm/fanin-spare-XXXXXX" : "/tmp/fanin-spare-XXXXXX");
    if (!mkdtemp(root))
        return -1;
    parent = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    mapped_inode = 0;
    return parent < 0 ? -1 : 0;
}

static int teardown(void **state)
{
    char command[128];
    close(parent);
    snprintf(command, sizeof(command), "rm -rf '%s'", root);
    return system(command);
}

#define CASE(name) TEST_WITH(name, setup, teardown)

static int count_entries(void)
{
    int count = 0;
    DIR *dir = opendir(root);
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count - 2;
}

static spare_file *start(uint64_t size)
{
    file_memory none = {.file = -1};
    spare_file *s = spare_file_start(parent, size, NULL, &none, &nobody);
    if (!s)
        skip(); /* a filesystem without nameless files */
    return s;
}

/* ---------------------------------------------------------------- the file */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t mapped = PTHREAD_COND_INITIALIZER;

void *__real_mmap64(void *at, size_t size, int protection, int flags, int fd,
                    off_t from);
void *__wrap_mmap64(void *at, size_t size, int protection, int flags, int fd,
                    off_t from);
void *__wrap_mmap64(void *at, size_t size, int protection, int flags, int fd,
                    off_t from)
{
    struct stat info;
    void *base = __real_mmap64(at, size, protection, flags, fd, from);
    if (base != MAP_FAILED && fd >= 0 && fstat(fd, &info) == 0 && info.st_nlink == 0) {
        pthread_mutex_lock(&lock);
        mapped_inode = info.st_ino;
        pthread_cond_signal(&mapped);
        pthread_mutex_unlock(&lock);
    }
    return base;
}

/* Of the spare file that was begun last, once it has come so far that it can be taken. */
static uint64_t spare_inode(void)
{
    pthread_mutex_lock(&lock);
    while (mapped_inode == 0)
        pthread_cond_wait(&mapped, &lock);
    uint64_t inode = mapped_inode;
    mapped_inode = 0;
    pthread_mutex_unlock(&lock);
    return inode;
}

CASE(a_file_has_no_name_and_fits_one_place)
{
    file_memory m;
    spare_file *s = start(SIZE);
    assert_true(spare_file_fits(s, parent, SIZE));
    assert_false(spare_file_fits(s, parent, SIZE - 1));
    int other = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_false(spare_file_fits(s, other, SIZE));
    close(other);
    assert_int_equal(count_entries(), 0);
    uint64_t inode = spare_inode();
    assert_true(spare_file_take(&s, &m));
    assert_null(s);
    struct stat info;
    assert_int_equal(fstat(m.file, &info), 0);
    assert_int_equal(info.st_ino, inode);
    assert_int_equal(info.st_size, SIZE);
    assert_int_equal(info.st_nlink, 0);
    m.base[SIZE - 1] = 1;
    file_memory_release(&m);
    assert_int_equal(m.file, -1);
    assert_null(m.base);
    assert_false(spare_file_fits(NULL, parent, SIZE));
    assert_false(spare_file_take(&s, &m));
}

/* However far it has come, dropping ends it, and what it took is free again. */
CASE(making_can_be_ended_at_any_time)
{
    for (int i = 0; i < 20; i++) {
        spare_file *s = start(SIZE + (uint64_t)i * 4096);
        spare_file_drop(&s);
        assert_null(s);
    }
    assert_int_equal(count_entries(), 0);
}

CASE(what_was_retired_goes)
{
    char path[100];
    snprintf(path, sizeof path, "%s/old", root);
    file_memory old = {.file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600),
                       .size = 8192};
    assert_int_equal(ftruncate(old.file, 8192), 0);
    old.base = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, old.file, 0);
    assert_ptr_not_equal(old.base, MAP_FAILED);
    int file = old.file;
    spare_file *s = spare_file_start(parent, SIZE, NULL, &old, &nobody);
    assert_int_equal(old.file, -1);
    assert_null(old.base);
    spare_file_drop(&s);
    assert_int_equal(fcntl(file, F_GETFD), -1);
    assert_int_equal(errno, EBADF);
}

/* In a thread: who lets it go waits for no unmapping. */
CASE(a_file_is_retired)
{
    spare_file *s = start(SIZE);
    spare_inode();
    spare_file_retire(&s);
    assert_false(spare_file_fits(s, parent, SIZE));
    assert_false(spare_file_fits(s, parent, 0));
    spare_file_drop(&s);
    spare_file_retire(&s);
    assert_null(s);
}

/* Others need room as well: half of what is free is the most that is taken. */
CASE(none_is_made_where_there_is_no_room)
{
    struct statvfs info;
    file_memory none = {.file = -1};
    spare_file *s = start(SIZE); /* the filesystem has nameless files */
    spare_file_drop(&s);
    assert_int_equal(fstatvfs(parent, &info), 0);
    uint64_t most = (uint64_t)info.f_bavail * info.f_frsize;
    assert_null(spare_file_start(parent, most / 4 * 3, NULL, &none, &nobody));
    assert_null(spare_file_start(parent, 0, NULL, &none, &nobody));
}

CASE(pages_are_made_whole)
{
    uint8_t *base =
        mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(base, MAP_FAILED);
    bool whole = file_pages_touch(base, SIZE);
    size_t pages = (SIZE + 4095) / 4096;
    unsigned char *there = calloc(pages, 1);
    assert_int_equal(mincore(base, SIZE, there), 0);
    for (size_t i = 0; i < pages && whole; i++)
        assert_int_equal(there[i] & 1, 1);
    free(there);
    munmap(base, SIZE);
    assert_false(file_pages_touch(base, SIZE)); /* nothing is there any more */
}

/* ---------------------------------------------------------------- adapters */

#define ROWS ((uint64_t)600 * 1024)

static key_entry entries[] = {
    {.name = "m.q.lora_A.default.weight",
     .dtype = FANIN_DTYPE_F32,
     .n_dims = 2,
     .shape = {8, 512},
     .bytes = 16384},
    {.name = "m.q.lora_B.default.weight",
     .dtype = FANIN_DTYPE_F32,
     .n_dims = 2,
     .shape = {ROWS, 8},
     .bytes = ROWS * 32},
};
static fanin_pair pairs[] = {{"base_model_name_or_path", "org/model"},
                             {"lora_alpha", "16"}};
static const key_table keys = {
    .entries = entries, .count = 2, .pairs = pairs, .n_pairs = 2};

typedef struct made {
    uint64_t size, inode;
    bool pinned;
} made;

static made make_adapter(const char *name, fanin_dtype dtype, spare_file **spare)
{
    char path[100];
    adapter *a;
    const uint64_t *to;
    uint8_t *base;
    made m = {0};
    struct stat info;
    adapter_identity identity = {
        .publication = "lora:0", .step = 3, .dtype = dtype, .key_table = {{1}}};
    snprintf(path, sizeof path, "%s/%s", root, name);
    assert_works(adapter_open(&(adapter_terms){.directory = path,
                                               .at = deadline_in_ms(20000),
                                               .log = nobody,
                                               .dtype = dtype,
                                               .spare = spare},
                              &a, ERROR));
    assert_works(adapter_prepare(a, &keys, "lora:0", &to, &m.size, ERROR));
    assert_works(adapter_map(a, &base, ERROR));
    for (uint32_t i = 0; i < keys.count; i++) {
        uint64_t bytes = entries[i].bytes / (dtype ? 2 : 1);
        memset(base + to[i], (int)i + 1, bytes);
        adapter_landed(a, to[i], bytes);
    }
    m.pinned = adapter_is_pinned(a);
    assert_works(adapter_publish(a, &identity, ERROR));
    adapter_make_spare(a, spare, NULL);
    adapter_close(&a);
    strcat(path, "/adapter_model.safetensors");
    assert_int_equal(stat(path, &info), 0);
    assert_int_equal(info.st_size, m.size);
    assert_int_equal(info.st_mode & 0111, 0);
    m.inode = info.st_ino;
    return m;
}

/* The file that was made beforehand is the one that is published, once. */
CASE(adapters_take_the_spare)
{
    spare_file *spare = NULL;
    make_adapter("first", 0, &spare);
    if (!spare)
        skip();
    for (int i = 0; i < 3; i++) {
        char name[20];
        snprintf(name, sizeof name, "next%d", i);
        uint64_t inode = spare_inode();
        made next = make_adapter(name, 0, &spare);
        assert_int_equal(next.inode, inode);
        assert_false(next.pinned);
        assert_non_null(spare);
    }
    /* Of another size: the next one is made fresh, and another spare is begun. */
    made half = make_adapter("half", FANIN_DTYPE_BF16, &spare);
    assert_true(spare_file_fits(spare, parent, half.size));
    assert_int_equal(count_entries(), 5); /* the directories, no locks, no spares */
    spare_file_drop(&spare);
}

CASE(another_dtype_is_another_content)
{
    char path[100];
    bool reuse = true;
    uint64_t size;
    adapter *a;
    const uint64_t *to;
    spare_file *none = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    made whole = make_adapter("whole", 0, &none);
    spare_file_drop(&none);
    made half = make_adapter("half", FANIN_DTYPE_F16, &none);
    spare_file_drop(&none);
    uint64_t data = entries[0].bytes + entries[1].bytes;
    assert_true(whole.size - half.size >= data / 2 - 64 &&
                whole.size - half.size <= data / 2 + 64);
    snprintf(path, sizeof path, "%s/half", root);
    adapter_identity identity = {
        .publication = "lora:0", .step = 3, .key_table = {{1}}};
    assert_ok(adapter_open(&(adapter_terms){.directory = path,
                                            .at = deadline_in_ms(20000),
                                            .log = nobody,
                                            .dtype = FANIN_DTYPE_F16},
                           &a, &error),
              error);
    assert_ok(adapter_prepare(a, &keys, "lora:0", &to, &size, &error), error);
    assert_int_equal(adapter_reusable(a, &identity, &reuse, &error), FANIN_ERR_EXISTS);
    assert_non_null(strstr(error.message, "another dtype"));
    identity.dtype = FANIN_DTYPE_BF16;
    assert_int_equal(adapter_reusable(a, &identity, &reuse, &error), FANIN_ERR_EXISTS);
    identity.dtype = FANIN_DTYPE_F16;
    assert_ok(adapter_reusable(a, &identity, &reuse, &error), error);
    assert_true(reuse);
    adapter_close(&a);
}
