/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/step_contents.h"

#include <string.h>

/* Names and shapes are the key table's; of the world, for another launch begins anew. */
static digest what_of(const adapter_identity *identity)
{
    struct {
        uint8_t world_id[16];
        digest publication, key_table;
        uint64_t dtype;
    } what = {.publication =
                  digest_of(identity->publication, strlen(identity->publication)),
              .key_table = identity->key_table,
              .dtype = (uint64_t)identity->dtype};
    memcpy(what.world_id, identity->world_id, sizeof what.world_id);
    return digest_of(&what, sizeof what);
}

/* Files' digests, one after the other. */
static digest content_of(const identity_file *files, size_t count)
{
    digest both[2] = {{{0}}};
    for (size_t i = 0; i < count; i++) {
        if (files[i].in_pieces) {
            both[1] = files[i].content;
            both[0] = digest_of(both, sizeof both);
        }
    }
    return both[0];
}

/* Its place, or that of the oldest, emptied. */
static size_t place_of(step_contents *c, const digest *what)
{
    for (size_t i = 0; i < STEPS_KEPT; i++) {
        if (c->list[i].steps > 0 && digest_equal(&c->list[i].what, what))
            return i;
    }
    size_t i = c->next;
    c->next = (c->next + 1) % STEPS_KEPT;
    memset(&c->list[i], 0, sizeof c->list[i]);
    c->list[i].what = *what;
    return i;
}

unsigned step_contents_note(step_contents *c, const adapter_identity *identity,
                            const identity_file *files, size_t count,
                            uint64_t *first_out)
{
    digest what = what_of(identity), content = content_of(files, count);
    size_t i = place_of(c, &what);
    bool same = c->list[i].steps > 0 && digest_equal(&c->list[i].content, &content);
    if (!same) {
        c->list[i].content = content;
        c->list[i].first = identity->step;
        c->list[i].steps = 1;
    } else if (c->list[i].last != identity->step) {
        c->list[i].steps++;
    }
    bool again = same && c->list[i].last == identity->step;
    c->list[i].last = identity->step;
    *first_out = c->list[i].first;
    return again ? 1 : c->list[i].steps;
}
