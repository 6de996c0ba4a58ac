/* SPDX-License-Identifier: Apache-2.0 */
#include "edits.h"

#include <string.h>

#define EDIT_HEAD 6

typedef struct edit {
    int to;
    unsigned frame, kind, length;
    size_t at;
    uint16_t number;
    const uint8_t *bytes;
} edit;

static void cut_in(buffer *body, size_t at, const uint8_t *bytes, size_t n)
{
    size_t size = body->size;
    buffer_append(body, bytes, n);
    if (body->failed)
        return;
    memmove(body->data + at + n, body->data + at, size - at);
    memcpy(body->data + at, bytes, n);
}

static void apply(const edit *e, altered *a)
{
    buffer *body = &a->body;
    size_t at = e->at % (body->size + 1), rest = body->size - at;
    size_t n = e->length < rest ? e->length : rest;
    switch ((edit_kind)e->kind) {
    case EDIT_OVERWRITE:
        if (n > 0)
            memcpy(body->data + at, e->bytes, n);
        break;
    case EDIT_INSERT:
        cut_in(body, at, e->bytes, e->length);
        break;
    case EDIT_REMOVE:
        if (n > 0)
            memmove(body->data + at, body->data + at + n, rest - n);
        body->size -= n;
        break;
    case EDIT_TYPE:
        a->head.type = (message_type)e->number;
        break;
    case EDIT_REQUEST:
        a->head.request ^= e->number;
        break;
    case EDIT_LENGTH:
        a->lie = e->number;
        break;
    case EDIT_TWICE:
        a->twice = true;
        break;
    case EDIT_CLOSE:
        a->last = true;
        break;
    case EDIT_LATER:
        a->later = true;
        break;
    case EDIT_ACT:
    case EDIT_CANCEL:
    case EDIT_STALL:
        break;
    }
}

/* The edit at @p *at, behind which it leaves that. False: there is none. */
static bool next_edit(edits all, size_t *at, edit *out)
{
    const uint8_t *e = all.data + *at;
    if (all.size - *at < EDIT_HEAD)
        return false;
    *out = (edit){.to = e[0] & 1,
                  .frame = e[0] >> 1,
                  .kind = e[1] & 15,
                  .length = e[1] >> 4,
                  .at = e[2] | (size_t)e[3] << 8,
                  .number = (uint16_t)(e[4] | e[5] << 8),
                  .bytes = e + EDIT_HEAD};
    *at += EDIT_HEAD;
    if (out->kind == EDIT_OVERWRITE || out->kind == EDIT_INSERT) {
        if (out->length > all.size - *at)
            out->length = (unsigned)(all.size - *at);
        *at += out->length;
    }
    return true;
}

static bool is_lie(const edit *e)
{
    return e->kind < EDIT_ACT || e->kind == EDIT_LATER;
}

void edits_apply(edits all, int to, unsigned number, altered *a,
                 void (*happens)(void *cookie, edit_kind kind, uint16_t number),
                 void *cookie)
{
    edit e;
    for (size_t at = 0; next_edit(all, &at, &e);) {
        if (e.to != to || e.frame != number)
            continue;
        if (is_lie(&e))
            apply(&e, a);
        else
            happens(cookie, (edit_kind)e.kind, e.number);
    }
}

bool edits_lie(edits all)
{
    edit e;
    for (size_t at = 0; next_edit(all, &at, &e);)
        if (is_lie(&e))
            return true;
    return false;
}
