/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/safetensors.h"
#include "error_set.h"
#include "utf8.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 8
#define N_DTYPES (FANIN_DTYPE_U64 + 1)

/* Counts while at is NULL, writes otherwise: the same code finds the size and fills. */
typedef struct sink {
    uint8_t *at;
    uint64_t size;
} sink;

static void put(sink *s, const void *data, size_t size)
{
    if (s->at)
        memcpy(s->at + s->size, data, size);
    s->size += size;
}

#define PUT_LITERAL(s, text) put(s, text, sizeof(text) - 1)

static void put_number(sink *s, uint64_t value)
{
    char digits[20];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    put(s, digits + at, sizeof digits - at);
}

/* A JSON string as serde_json writes it: two-character escapes where JSON has them, \u00xx
   in lower case for the other control characters, everything else as it is. */
static void put_string(sink *s, const char *text)
{
    static const char short_escapes[32] = {
        ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r'};
    static const char digits[] = "0123456789abcdef";

    PUT_LITERAL(s, "\"");
    for (const char *run = text;;) {
        const char *at = run;
        while ((unsigned char)*at >= 0x20 && *at != '"' && *at != '\\')
            at++;
        put(s, run, (size_t)(at - run));
        unsigned char c = (unsigned char)*at;
        if (c == '\0')
            break;
        char escape[6] = {'\\', (char)c, '0', '0'};
        size_t size = 2;
        if (c < 0x20 && short_escapes[c]) {
            escape[1] = short_escapes[c];
        } else if (c < 0x20) {
            escape[1] = 'u';
            escape[4] = digits[c >> 4];
            escape[5] = digits[c & 15];
            size = 6;
        }
        put(s, escape, size);
        run = at + 1;
    }
    PUT_LITERAL(s, "\"");
}

/* @p plain: the name's bytes if none of them needs an escape, else 0. */
static void put_item(sink *s, const safetensors_item *item, uint32_t plain,
                     uint64_t begin)
{
    const char *dtype = fanin_dtype_name(item->dtype);
    PUT_LITERAL(s, ",");
    if (plain > 0) {
        PUT_LITERAL(s, "\"");
        put(s, item->name, plain);
        PUT_LITERAL(s, "\"");
    } else {
        put_string(s, item->name);
    }
    PUT_LITERAL(s, ":{\"dtype\":\"");
    put(s, dtype, strlen(dtype));
    PUT_LITERAL(s, "\",\"shape\":[");
    for (uint32_t d = 0; d < item->n_dims; d++) {
        if (d > 0)
            PUT_LITERAL(s, ",");
        put_number(s, item->shape[d]);
    }
    PUT_LITERAL(s, "],\"data_offsets\":[");
    put_number(s, begin);
    PUT_LITERAL(s, ",");
    put_number(s, begin + item->bytes);
    PUT_LITERAL(s, "]}");
}

/* Indexes in the file's order: a stable counting sort by descending dtype. */
static uint32_t *file_order(const safetensors_item *items, size_t count)
{
    uint32_t *order = malloc((count ? count : 1) * sizeof order[0]);
    if (!order)
        return NULL;
    size_t first[N_DTYPES + 1] = {0};
    for (size_t i = 0; i < count; i++)
        first[N_DTYPES - items[i].dtype]++;
    size_t sum = 0;
    for (int d = 0; d <= N_DTYPES; d++) {
        size_t here = first[d];
        first[d] = sum;
        sum += here;
    }
    for (size_t i = 0; i < count; i++)
        order[first[N_DTYPES - items[i].dtype]++] = (uint32_t)i;
    return order;
}

/* Offsets are written from the data's start. Returns the size without padding. */
static uint64_t put_header(uint8_t *at, const safetensors_item *items,
                           const uint32_t *order, const uint32_t *plain, size_t count,
                           uint64_t *offsets_out, uint64_t *data_out)
{
    sink s = {.at = at};
    uint64_t begin = 0;
    PUT_LITERAL(&s, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < count; i++) {
        const safetensors_item *item = &items[order[i]];
        put_item(&s, item, plain[order[i]], begin);
        offsets_out[order[i]] = begin;
        begin += item->bytes;
    }
    PUT_LITERAL(&s, "}");
    *data_out = begin;
    return s.size;
}

/* The bytes of a name that is ASCII without anything to escape; 0: it is not, or empty. */
static uint32_t plain_size(const char *name)
{
    const char *at = name;
    while (*at >= 0x20 && *at < 0x7f && *at != '"' && *at != '\\')
        at++;
    return *at == '\0' ? (uint32_t)(at - name) : 0;
}

static fanin_status check_items(const safetensors_item *items, size_t count,
                                uint32_t *plain_out, fanin_error *error)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        const char *name = items[i].name;
        error_place place = {.phase = "plan", .key = name};
        plain_out[i] = plain_size(name);
        if (strcmp(name, "__metadata__") == 0)
            return error_set(error, FANIN_ERR_MISMATCH, &place,
                             "a safetensors file cannot hold a tensor of this name");
        if (plain_out[i] == 0 && !utf8_valid(name, strlen(name)))
            return error_set(error, FANIN_ERR_MISMATCH, &place,
                             "the tensor's name is not UTF-8");
        if (!fanin_dtype_name(items[i].dtype))
            return error_set(error, FANIN_ERR_MISMATCH, &place, "dtype %d is unknown",
                             (int)items[i].dtype);
        if (__builtin_add_overflow(sum, items[i].bytes, &sum) || sum > INT64_MAX / 2)
            return error_set(error, FANIN_ERR_MISMATCH, &place,
                             "the tensors together are larger than any file");
    }
    return FANIN_OK;
}

/* Items that were checked, in the file's order. */
static fanin_status lay_out_in_order(const safetensors_item *items,
                                     const uint32_t *order, const uint32_t *plain,
                                     size_t count, uint64_t *offsets_out,
                                     safetensors_layout *out, fanin_error *error)
{
    uint64_t data,
        text = put_header(NULL, items, order, plain, count, offsets_out, &data);
    uint64_t padded = (text + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (padded > SAFETENSORS_HEADER_MAX)
        return error_set(error, FANIN_ERR_MISMATCH, NULL,
                         "the safetensors header of %zu tensors would take %" PRIu64
                         " bytes; the format allows %" PRIu64,
                         count, padded, (uint64_t)SAFETENSORS_HEADER_MAX);
    uint8_t *header = malloc(SAFETENSORS_LENGTH + padded);
    if (!header)
        return error_set_memory(error);
    for (int i = 0; i < SAFETENSORS_LENGTH; i++)
        header[i] = (uint8_t)(padded >> (8 * i));
    put_header(header + SAFETENSORS_LENGTH, items, order, plain, count, offsets_out,
               &data);
    memset(header + SAFETENSORS_LENGTH + text, ' ', padded - text);
    for (size_t i = 0; i < count; i++)
        offsets_out[i] += SAFETENSORS_LENGTH + padded;
    *out = (safetensors_layout){.header = header,
                                .header_size = SAFETENSORS_LENGTH + padded,
                                .file_size = SAFETENSORS_LENGTH + padded + data};
    return FANIN_OK;
}

fanin_status safetensors_lay_out(const safetensors_item *items, size_t count,
                                 uint64_t *offsets_out, safetensors_layout *out,
                                 fanin_error *error)
{
    uint32_t *plain = calloc(count + 1, sizeof plain[0]), *order = NULL;
    if (!plain)
        return error_set_memory(error);
    fanin_status status = check_items(items, count, plain, error);
    if (status == FANIN_OK && !(order = file_order(items, count)))
        status = error_set_memory(error);
    if (status == FANIN_OK)
        status = lay_out_in_order(items, order, plain, count, offsets_out, out, error);
    free(order);
    free(plain);
    return status;
}
