/* SPDX-License-Identifier: Apache-2.0 */
#include "identity.h"

#include <stdio.h>
#include <string.h>

#define SCHEME "fanin://"
#define RANKS "rank/"

typedef struct text {
    const char *at;
    size_t size;
} text;

static bool identity_take(text *t, const char *word)
{
    size_t size = strlen(word);
    if (t->size < size || memcmp(t->at, word, size) != 0)
        return false;
    t->at += size;
    t->size -= size;
    return true;
}

static bool is_of_job(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           c == '.' || c == '_' || c == '-';
}

static bool identity_take_job(text *t, char out[JOB_MOST + 1])
{
    size_t size = 0;
    while (size < t->size && size < JOB_MOST && is_of_job(t->at[size]))
        size++;
    memcpy(out, t->at, size);
    out[size] = '\0';
    t->at += size;
    t->size -= size;
    return size > 0 && identity_take(t, "/");
}

/* A number as it is written, without zeros before it. */
static bool identity_take_rank(text *t, uint32_t *out)
{
    uint64_t rank = 0;
    if (t->size == 0 || (t->at[0] == '0' && t->size > 1))
        return false;
    for (size_t i = 0; i < t->size; i++) {
        if (t->at[i] < '0' || t->at[i] > '9')
            return false;
        rank = rank * 10 + (uint64_t)(t->at[i] - '0');
        if (rank > UINT32_MAX)
            return false;
    }
    *out = (uint32_t)rank;
    return true;
}

static bool identity_is(const text *t, const char *word)
{
    return t->size == strlen(word) && memcmp(t->at, word, t->size) == 0;
}

bool identity_parse(const char *uri, size_t size, identity *out)
{
    text t = {uri, size};
    identity id = {.role = AS_READER};
    if (!identity_take(&t, SCHEME) || !identity_take_job(&t, id.job))
        return false;
    if (!identity_is(&t, "reader")) {
        if (!identity_take(&t, RANKS))
            return false;
        id.role = identity_is(&t, "*") ? AS_ANY_RANK : AS_RANK;
        if (id.role == AS_RANK && !identity_take_rank(&t, &id.rank))
            return false;
    }
    *out = id;
    return true;
}

void identity_text(const identity *id, char out[IDENTITY_URI_MOST])
{
    if (id->role == AS_RANK)
        snprintf(out, IDENTITY_URI_MOST, SCHEME "%s/" RANKS "%u", id->job,
                 (unsigned)id->rank);
    else
        snprintf(out, IDENTITY_URI_MOST, SCHEME "%s/%s", id->job,
                 id->role == AS_READER ? "reader" : RANKS "*");
}

bool identity_suffices(const identity *has, const identity *wanted)
{
    if (strcmp(has->job, wanted->job) != 0 ||
        (has->role == AS_READER) != (wanted->role == AS_READER))
        return false;
    return has->role != AS_RANK || wanted->role != AS_RANK || has->rank == wanted->rank;
}
