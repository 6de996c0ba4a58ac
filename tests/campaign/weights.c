/* SPDX-License-Identifier: Apache-2.0 */
#include "weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANK 8
#define WIDTH 2048
#define SCRIBBLE 0xa5
#define STEPS_BACK 64 /* that are looked through for whose bytes they are */
#define PERIOD 128    /* steps between two changes of a word, where few words change */

tensor_shape weights_shape(size_t tensor)
{
    bool a = tensor % 2 == 0;
    tensor_shape t = {.rows = a ? RANK : WIDTH, .columns = a ? WIDTH : RANK};
    snprintf(t.name, sizeof t.name,
             "base_model.model.model.layers.%zu.self_attn.q_proj.lora_%c.weight",
             tensor / 2, a ? 'A' : 'B');
    return t;
}

uint64_t weights_bytes(size_t tensor)
{
    tensor_shape t = weights_shape(tensor);
    return t.rows * t.columns * sizeof(float);
}

uint64_t weights_life(const uint8_t world_id[FANIN_WORLD_ID_SIZE])
{
    uint64_t life;
    memcpy(&life, world_id, sizeof life);
    return life;
}

/* The finaliser of splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
   generators",
   2014. */
static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

bool weights_change_little(void)
{
    const char *deltas = getenv("CAMPAIGN_DELTAS");
    return deltas && *deltas;
}

/* Which words change with a step, and what seeds them. */
typedef struct changes {
    uint64_t life, step;
    size_t tensor;
    bool few;
    uint64_t changed, seed; /* of the last word that was asked for */
} changes;

static changes changes_of(uint64_t life, uint64_t step, size_t tensor)
{
    return (changes){life, step, tensor, weights_change_little(), UINT64_MAX, 0};
}

static uint64_t word_at(changes *c, uint64_t at)
{
    uint64_t since = c->few ? (c->step + mix(at + c->tensor)) % PERIOD : 0;
    uint64_t changed = since < c->step ? c->step - since : 0;
    if (changed != c->changed)
        c->seed = mix(mix(c->life) + mix(changed * N_TENSORS + c->tensor));
    c->changed = changed;
    return mix(c->seed + at);
}

void weights_fill(uint64_t life, uint64_t step, size_t tensor, uint64_t first,
                  uint64_t end, uint64_t *words)
{
    uint64_t width = weights_shape(tensor).columns / 2;
    changes now = changes_of(life, step, tensor);
    for (uint64_t i = first * width; i < end * width; i++)
        *words++ = word_at(&now, i);
}

static void say_what(uint64_t life, uint64_t step, size_t tensor, uint64_t at,
                     uint64_t word, char why[160])
{
    uint64_t scribble, from = step > STEPS_BACK ? step - STEPS_BACK : 0;
    char what[40] = "of nothing known";
    memset(&scribble, SCRIBBLE, sizeof scribble);
    for (uint64_t s = from; s < step + STEPS_BACK; s++) {
        changes then = changes_of(life, s, tensor);
        if (word == word_at(&then, at))
            snprintf(what, sizeof what, "of step %" PRIu64, s);
    }
    if (word == 0)
        snprintf(what, sizeof what, "zero");
    if (word == scribble)
        snprintf(what, sizeof what, "what nobody wrote over");
    snprintf(why, 160, "tensor %zu, word %" PRIu64 ": %s, not of step %" PRIu64, tensor,
             at, what, step);
}

bool weights_check(uint64_t life, uint64_t step, size_t tensor, const void *bytes,
                   char why[160])
{
    uint64_t count = weights_bytes(tensor) / 8;
    changes now = changes_of(life, step, tensor);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word;
        memcpy(&word, (const char *)bytes + 8 * i, sizeof word);
        if (word != word_at(&now, i)) {
            say_what(life, step, tensor, i, word, why);
            return false;
        }
    }
    return true;
}

void weights_scribble(void *bytes, size_t size)
{
    memset(bytes, SCRIBBLE, size);
}

bool weights_scribbled(const void *bytes, size_t size)
{
    const uint8_t *b = bytes;
    for (size_t i = 0; i < size; i++)
        if (b[i] != SCRIBBLE)
            return false;
    return true;
}
