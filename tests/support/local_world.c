/* SPDX-License-Identifier: Apache-2.0 */
#include "local_world.h"

#include "ends.h"
#include "testing.h"
#include <endian.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

const world_tensor world_lora[] = {
    {"base_model.model.layers.0.q_proj.lora_A.weight", FANIN_DTYPE_BF16, 2, {10, 33}},
    {"base_model.model.layers.0.q_proj.lora_B.weight", FANIN_DTYPE_BF16, 2, {70, 10}},
    {"base_model.model.layers.0.v_proj.lora_A.weight", FANIN_DTYPE_F32, 2, {3, 1000}},
    {"base_model.model.layers.0.v_proj.lora_B.weight", FANIN_DTYPE_F32, 2, {5000, 3}},
    {"base_model.model.layers.1.norm.weight", FANIN_DTYPE_F16, 1, {257}},
    {"base_model.model.layers.1.experts.weight", FANIN_DTYPE_U8, 3, {7, 5, 130}},
    {"base_model.model.layers.1.nothing.weight", FANIN_DTYPE_F32, 2, {0, 16}},
};
const size_t world_lora_count = sizeof world_lora / sizeof *world_lora;

#define MAX_BOXES 64

/* ------------------------------------------------------------------- bytes */

static uint64_t item(const world_tensor *t)
{
    return fanin_dtype_bits(t->dtype) / 8;
}

uint64_t world_bytes(const world_tensor *t)
{
    uint64_t bytes = item(t);
    for (uint32_t d = 0; d < t->n_dims; d++)
        bytes *= t->shape[d];
    return bytes;
}

/* What the bytes of a tensor at a step have in common. */
typedef struct step_bytes {
    uint64_t seed, of_step; /* of_step: what a step adds */
    uint64_t step;
    bool is_sparse;
} step_bytes;

static step_bytes bytes_of(const world *w, size_t tensor, uint64_t step)
{
    return (step_bytes){.seed = tensor * 0xD6E8FEB86659FD93u +
                                w->salt * 0xA0761D6478BD642Fu,
                        .of_step = 0x9E3779B97F4A7C15u,
                        .step = step,
                        .is_sparse = w->deltas > 0};
}

/* Of those that change seldom: at the last step whose turn theirs was. */
static inline uint8_t byte_at(const step_bytes *s, uint64_t offset)
{
    uint64_t step = s->step, turn = 0;
    if (s->is_sparse) {
        turn = (((offset + 1) * 0x9E3779B97F4A7C15u >> 40) + s->step) % 400;
        step = turn < step ? step - turn : 0;
    }
    uint64_t x = offset + s->seed + step * s->of_step;
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
    return (uint8_t)(x >> 40);
}

/* Eight of them: sanitizers look at one access, not at eight. */
static inline uint64_t word_at(const step_bytes *s, uint64_t offset)
{
    uint64_t word = 0;
    for (unsigned b = 0; b < sizeof word; b++)
        word |= (uint64_t)byte_at(s, offset + b) << 8 * b;
    return htole64(word);
}

static void fill(const step_bytes *s, uint64_t offset, uint8_t *to, uint64_t n)
{
    uint64_t i = 0, word;
    for (; i + sizeof word <= n; i += sizeof word) {
        word = word_at(s, offset + i);
        memcpy(to + i, &word, sizeof word);
    }
    for (; i < n; i++)
        to[i] = byte_at(s, offset + i);
}

uint8_t *world_whole(const world *w, size_t tensor, uint64_t step)
{
    uint64_t n = world_bytes(&w->tensors[tensor]);
    uint8_t *bytes = malloc(n + 1);
    step_bytes s = bytes_of(w, tensor, step);
    assert_non_null(bytes);
    fill(&s, 0, bytes, n);
    return bytes;
}

uint8_t world_byte(const world *w, size_t tensor, uint64_t step, uint64_t offset)
{
    step_bytes s = bytes_of(w, tensor, step);
    return byte_at(&s, offset);
}

void world_check(const world *w, size_t tensor, uint64_t step, const uint8_t *bytes)
{
    uint64_t n = world_bytes(&w->tensors[tensor]), i = 0, word;
    step_bytes s = bytes_of(w, tensor, step);
    for (; i + sizeof word <= n; i += sizeof word) {
        memcpy(&word, bytes + i, sizeof word);
        if (word != word_at(&s, i))
            break;
    }
    for (; i < n; i++) {
        if (bytes[i] != byte_at(&s, i))
            fail_msg("%s differs from step %llu at byte %llu", w->tensors[tensor].name,
                     (unsigned long long)step, (unsigned long long)i);
    }
}

/* --------------------------------------------------------------------- cuts */

static void chunk(uint64_t n, uint64_t parts, uint64_t part, uint64_t *offset,
                  uint64_t *extent)
{
    uint64_t size = (n + parts - 1) / parts;
    uint64_t start = part * size < n ? part * size : n;
    uint64_t end = start + size < n ? start + size : n;
    *offset = start;
    *extent = end - start;
}

static size_t cut(const world *w, const world_tensor *t, size_t rank, fanin_box *boxes)
{
    fanin_box box = {0};
    memcpy(box.extent, t->shape, sizeof box.extent);
    uint32_t second = t->n_dims > 1 ? 1 : 0;
    size_t n = w->size;
    switch (w->cut) {
    case CUT_CHUNK0:
        chunk(t->shape[0], n, rank, &box.offset[0], &box.extent[0]);
        break;
    case CUT_CHUNK1:
        chunk(t->shape[second], n, rank, &box.offset[second], &box.extent[second]);
        break;
    case CUT_GRID:
        chunk(t->shape[0], n / 2, rank / 2, &box.offset[0], &box.extent[0]);
        if (second)
            chunk(t->shape[1], 2, rank % 2, &box.offset[1], &box.extent[1]);
        else if (rank %
                 2) /* a vector has one dimension to cut: the odd ranks get none */
            box.extent[0] = 0;
        break;
    case CUT_STRIDED: {
        size_t count = 0;
        uint64_t block = t->shape[0] / (n * 4) + 1;
        for (uint64_t row = rank * block; row < t->shape[0]; row += n * block) {
            box.offset[0] = row;
            box.extent[0] = row + block < t->shape[0] ? block : t->shape[0] - row;
            assert_true(count < MAX_BOXES);
            boxes[count++] = box;
        }
        return world_bytes(t) ? count : 0;
    }
    case CUT_REPLICATE:
        break;
    case CUT_HSDP:
        chunk(t->shape[0], n / 2, rank % (n / 2), &box.offset[0], &box.extent[0]);
        break;
    }
    uint64_t volume = 1;
    for (uint32_t d = 0; d < t->n_dims; d++)
        volume *= box.extent[d];
    boxes[0] = box;
    return volume ? 1 : 0;
}

static uint64_t box_bytes(const world_tensor *t, const fanin_box *box)
{
    uint64_t bytes = item(t);
    for (uint32_t d = 0; d < t->n_dims; d++)
        bytes *= box->extent[d];
    return bytes;
}

/* Writes a box's packed bytes as they are in the whole tensor at a step, a run at a time. */
static void write_box(const world *w, size_t tensor, const fanin_box *box,
                      uint64_t step, uint8_t *to)
{
    const world_tensor *t = &w->tensors[tensor];
    step_bytes s = bytes_of(w, tensor, step);
    uint32_t last = t->n_dims ? t->n_dims - 1 : 0;
    uint64_t run = item(t) * (t->n_dims ? box->extent[last] : 1);
    uint64_t n = run ? box_bytes(t, box) / run : 0;
    for (uint64_t i = 0; i < n; i++, to += run) {
        uint64_t rest = i, at = t->n_dims ? box->offset[last] : 0;
        uint64_t scale = t->n_dims ? t->shape[last] : 1;
        for (uint32_t d = last; d-- > 0;) {
            at += (box->offset[d] + rest % box->extent[d]) * scale;
            rest /= box->extent[d];
            scale *= t->shape[d];
        }
        fill(&s, at * item(t), to, run);
    }
}

/* Calls for each box of a rank with its place in the rank's memory. */
typedef void (*box_fn)(const world *w, size_t tensor, const fanin_box *box, uint8_t *at,
                       uint64_t step);

static size_t for_boxes(const world *w, size_t rank, uint64_t step, box_fn fn)
{
    size_t used = 0;
    for (size_t i = 0; i < w->n_tensors; i++) {
        fanin_box boxes[MAX_BOXES];
        size_t n = cut(w, &w->tensors[i], rank, boxes);
        for (size_t j = 0; j < n; j++) {
            if (fn)
                fn(w, i, &boxes[j], w->ranks[rank].memory + used, step);
            used += (box_bytes(&w->tensors[i], &boxes[j]) + 63) / 64 * 64;
        }
    }
    return used;
}

static void write_at(const world *w, size_t tensor, const fanin_box *box, uint8_t *at,
                     uint64_t step)
{
    write_box(w, tensor, box, step, at);
}

void world_write(world *w, size_t rank, uint64_t step)
{
    for_boxes(w, rank, step, write_at);
}

/* ------------------------------------------------------------------ servers */

fanin_tensor world_boxes(const world_tensor *t, fanin_box *boxes, size_t n)
{
    fanin_tensor tensor = {.struct_size = sizeof tensor,
                           .name = t->name,
                           .dtype = t->dtype,
                           .n_dims = t->n_dims,
                           .boxes = boxes,
                           .n_boxes = n};
    memcpy(tensor.shape, t->shape, sizeof tensor.shape);
    return tensor;
}

/* In one call: the library looks for a GPU's driver once. */
static void put_all(world *w, size_t rank)
{
    world_rank *r = &w->ranks[rank];
    size_t used = 0;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_tensor *tensors = calloc(w->n_tensors, sizeof *tensors);
    fanin_box **boxes = calloc(w->n_tensors, sizeof *boxes);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const world_tensor *t = &w->tensors[i];
        fanin_box list[MAX_BOXES];
        size_t n = cut(w, t, rank, list);
        for (size_t j = 0; j < n; j++) {
            list[j].address = r->memory + used;
            used += (box_bytes(t, &list[j]) + 63) / 64 * 64;
        }
        boxes[i] = malloc(sizeof list[0] * (n + 1));
        memcpy(boxes[i], list, sizeof list[0] * n);
        tensors[i] = world_boxes(t, boxes[i], n);
    }
    fanin_status status =
        fanin_server_put(r->server, "lora:0", tensors, w->n_tensors, false, &error);
    assert_ok(status, error);
    for (size_t i = 0; i < w->n_tensors; i++)
        free(boxes[i]);
    free(boxes);
    free(tensors);
    const fanin_pair pairs[] = {{"base_model_name_or_path", "test/model"},
                                {"lora_alpha", "20"}};
    assert_ok(fanin_server_set_metadata(r->server, "lora:0", pairs, 2, &error), error);
}

static void start_rank(world *w, size_t rank, uint16_t port)
{
    world_rank *r = &w->ranks[rank];
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    memcpy(config.world_id, w->id, sizeof config.world_id);
    config.rank = (uint32_t)rank;
    config.world_size = (uint32_t)w->size;
    config.base_port = port ? (uint16_t)(port - rank) : 0;
    config.lease_ms = w->lease_ms;
    config.stranger_cpu = 16000;
    config.flags = w->flags;
    assert_ok(fanin_server_create(&config, &r->server, &error), error);
    if (!r->memory) {
        r->size = for_boxes(w, rank, 0, NULL);
        r->memory = aligned_alloc(64, r->size + 64);
        assert_non_null(r->memory);
        memset(r->memory, 0xee, r->size + 64);
    }
    r->step = 0;
    put_all(w, rank);
    snprintf(w->addresses[rank], sizeof w->addresses[rank], "127.0.0.1:%u",
             (unsigned)fanin_server_port(r->server));
    w->address_list[rank] = w->addresses[rank];
}

void world_start(world *w, size_t size, world_cut cut_by, const world_tensor *tensors,
                 size_t n_tensors)
{
    assert_true(size <= WORLD_MAX_RANKS);
    w->size = size;
    w->cut = cut_by;
    w->tensors = tensors;
    w->n_tensors = n_tensors;
    if (w->lease_ms == 0)
        w->lease_ms = 1000;
    memset(w->id, 0x5a, sizeof w->id);
    for (size_t i = 0; i < size; i++)
        start_rank(w, i, 0);
}

void world_begin(world *w, size_t size, world_cut cut_by, uint64_t step)
{
    world_start(w, size, cut_by, world_lora, world_lora_count);
    if (step > 0)
        world_commit(w, step);
}

static uint16_t port_of(const world *w, size_t rank)
{
    return (uint16_t)atoi(strrchr(w->addresses[rank], ':') + 1);
}

/* Bound, and nobody listens: who connects is refused. */
static void keep_port(world *w, size_t rank)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons(port_of(w, rank)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    (void)!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    (void)!bind(fd, (struct sockaddr *)&at,
                sizeof at); /* else another has it already */
    w->ranks[rank].port_keeper = fd;
}

static void free_port(world *w, size_t rank)
{
    if (w->ranks[rank].port_keeper > 0)
        close(w->ranks[rank].port_keeper);
    w->ranks[rank].port_keeper = 0;
}

void world_stop_rank(world *w, size_t rank)
{
    bool runs = w->ranks[rank].server;
    fanin_server_destroy(&w->ranks[rank].server, 0);
    if (runs)
        keep_port(w, rank);
}

void world_restart_rank(world *w, size_t rank)
{
    free_port(w, rank);
    start_rank(w, rank, port_of(w, rank));
}

void world_stop(world *w)
{
    for (size_t i = 0; i < w->size; i++) {
        fanin_server_destroy(&w->ranks[i].server, 0);
        free_port(w, i);
        free(w->ranks[i].memory);
    }
    *w = (world){0};
}

void world_commit_rank(world *w, size_t rank, uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server *server = w->ranks[rank].server;
    assert_ok(fanin_server_begin_update(server, "lora:0", &error), error);
    world_write(w, rank, step);
    fanin_commit_options options;
    fanin_commit_options_init(&options, sizeof options);
    options.flags = w->snapshots ? FANIN_COMMIT_SNAPSHOT : 0;
    options.deltas = w->deltas;
    assert_ok(fanin_server_commit(server, "lora:0", step, &options, &error), error);
    if (w->snapshots)
        memset(w->ranks[rank].memory, 0xee, w->ranks[rank].size);
    w->ranks[rank].step = step;
}

void world_commit(world *w, uint64_t step)
{
    for (size_t i = 0; i < w->size; i++)
        world_commit_rank(w, i, step);
}

/* ------------------------------------------------------------------ clients */

fanin_client *world_client_with(const world *w, const fanin_client_config *config)
{
    return connect_client(config, w->address_list, w->size);
}

fanin_client *world_client(const world *w, fanin_path path)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.path = path;
    return world_client_with(w, &config);
}

fanin_status world_pull(const world *w, fanin_client *client,
                        const fanin_pull_options *options, fanin_result_info *info_out,
                        fanin_error *error)
{
    fanin_pull_options defaults = make_options(FANIN_STEP_NEWEST, 0);
    fanin_tensor *tensors = calloc(w->n_tensors, sizeof *tensors);
    fanin_box *boxes = calloc(w->n_tensors, sizeof *boxes);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const world_tensor *t = &w->tensors[i];
        memcpy(boxes[i].extent, t->shape, sizeof boxes[i].extent);
        boxes[i].address = malloc(world_bytes(t) + 1);
        memset(boxes[i].address, 0xcc, world_bytes(t) + 1);
        tensors[i] = world_boxes(t, &boxes[i], 1);
    }
    fanin_result *result = NULL;
    fanin_status status = fanin_client_pull(client, options ? options : &defaults,
                                            tensors, w->n_tensors, &result, error);
    fanin_result_info info = {.struct_size = sizeof info};
    if (status == FANIN_OK)
        fanin_result_get(result, &info);
    for (size_t i = 0; i < w->n_tensors; i++) {
        const uint8_t *bytes = boxes[i].address;
        if (status == FANIN_OK)
            world_check(w, i, info.step, bytes);
        assert_int_equal(bytes[world_bytes(&w->tensors[i])], 0xcc);
        free(boxes[i].address);
    }
    if (info_out) {
        *info_out = info;
        info_out->path_reason = info_out->ranks_json = NULL;
    }
    fanin_result_free(&result);
    free(tensors);
    free(boxes);
    return status;
}

fanin_status world_pull_step(const world *w, fanin_client *client, fanin_step_rule rule,
                             uint64_t step, uint32_t timeout_ms, fanin_error *error)
{
    fanin_pull_options options = make_options(rule, step);
    options.timeout_ms = timeout_ms;
    return world_pull(w, client, &options, NULL, error);
}

uint64_t world_pulled(const world *w, fanin_client *client, fanin_step_rule rule,
                      uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_pull_options options = make_options(rule, step);
    fanin_result_info info;
    assert_ok(world_pull(w, client, &options, &info, &error), error);
    return info.step;
}

bool world_has_cma(void)
{
    uint8_t from = 1, to = 0;
    struct iovec there = {.iov_base = &from, .iov_len = 1};
    struct iovec here = {.iov_base = &to, .iov_len = 1};
    if (process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 1)
        return true;
    print_message("no process_vm_readv here: %s\n", strerror(errno));
    return false;
}

bool world_has_ucx(void)
{
    const char *library = getenv("FANIN_UCX_LIBRARY");
    const char *known = getenv("FANIN_TEST_UCX_LIBRARY");
    return (library && library[0]) || (!library && known && known[0]);
}
