/* SPDX-License-Identifier: Apache-2.0 */
#include "link_pair.h"

#include "digest.h"
#include "fuzz.h"
#include "messages.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PIECE 65536
/* RFC 8446, 5.1: the type, a version, and the length of what follows. */
#define RECORD_HEAD 5

typedef enum taking { TAKEN, NOT_ALL, NOT_ONE } taking;

/* ------------------------------------------------------------------- frames */

/* Of a hello or its answer, which is whole: whether both ends want checksums. */
static void greet(link_pair *p, int to, const frame *f, const uint8_t *whole)
{
    msg_hello hello;
    msg_hello_ok answer;
    body b = {.data = whole + FRAME_SIZE, .size = f->length};
    if (to == TO_RANK) {
        buffer_append(&p->hello, whole, FRAME_SIZE + f->length);
        p->sealed =
            decode_hello(&b, &hello) == FANIN_OK && (hello.features & FEATURE_SEALS);
    } else {
        p->sealed = p->sealed && f->type == MSG_HELLO_OK &&
                    decode_hello_ok(&b, &answer) == FANIN_OK &&
                    (answer.features & FEATURE_SEALS);
    }
}

/* Says of the link what the rank says of itself: its address, where that counts, and that it has
   its key, which is for one connection alone. */
static void play_rank(const link_pair *p, const frame *f, buffer *answer)
{
    msg_hello_ok m;
    uint8_t proof[TLS_PROOF_SIZE];
    buffer anew = {0};
    body b = {.data = answer->data, .size = answer->size};
    if (f->type != MSG_HELLO_OK || decode_hello_ok(&b, &m) != FANIN_OK)
        return;
    if (p->address)
        snprintf(m.address, sizeof m.address, "%s", p->address);
    if (tls_prove_rank(p->secured[TO_READER], proof))
        m.proof = (bytes_view){proof, sizeof proof};
    encode_hello_ok(&anew, f->request, &m);
    buffer_clear(answer);
    buffer_append(answer, anew.data + FRAME_SIZE, anew.size - FRAME_SIZE);
    buffer_free(&anew);
}

/* *@p size: of the whole frame, with its checksum. */
static taking take_frame(link_pair *p, int to, altered *a, size_t *size)
{
    const buffer *come = &p->come[to];
    const char *why;
    if (come->size < FRAME_SIZE)
        return NOT_ALL;
    /* Who was lied to about checksums speaks otherwise than the other. */
    if (seal_decode(come->data, p->begun[to] && p->sealed, &a->head, &why) != FANIN_OK)
        return NOT_ONE;
    *size = FRAME_SIZE + (size_t)a->head.length;
    if (come->size < *size)
        return NOT_ALL;
    if (!p->begun[to])
        greet(p, to, &a->head, come->data);
    if (to == TO_READER || p->begun[TO_RANK])
        *size += seal_size(p->sealed);
    if (come->size < *size)
        return NOT_ALL;
    buffer_append(&a->body, come->data + FRAME_SIZE, a->head.length);
    if (to == TO_READER && !p->begun[to] && (p->secured[to] || p->address))
        play_rank(p, &a->head, &a->body);
    return TAKEN;
}

/* What its header is on the way to this end. */
static void encode_head(const link_pair *p, int to, const altered *a,
                        uint8_t head[FRAME_SIZE])
{
    frame f = a->head;
    f.length = (uint32_t)a->body.size ^ a->lie;
    frame_encode(&f, head);
    if (p->begun[to] && p->sealed)
        seal_header(head);
}

/* The checksum behind it; that of hello's answer is of the hello, too. */
static void encode_seal(const link_pair *p, int to, const altered *a,
                        uint8_t seal[SEAL_SIZE])
{
    uint8_t head[FRAME_SIZE];
    buffer summed = {0};
    if (!p->begun[to])
        buffer_append(&summed, p->hello.data, p->hello.size);
    encode_head(p, to, a, head);
    buffer_append(&summed, head, sizeof head);
    buffer_append(&summed, a->body.data, a->body.size);
    seal_encode(checksum_of(summed.data, summed.size), seal);
    buffer_free(&summed);
}

/* With the checksums of @p of. */
static void put_frame(const link_pair *p, int to, const altered *a, const altered *of,
                      buffer *out)
{
    uint8_t head[FRAME_SIZE], theirs[FRAME_SIZE], seal[SEAL_SIZE];
    encode_head(p, to, a, head);
    encode_head(p, to, of, theirs);
    memcpy(head + FRAME_CHECKED, theirs + FRAME_CHECKED, FRAME_SIZE - FRAME_CHECKED);
    buffer_append(out, head, sizeof head);
    buffer_append(out, a->body.data, a->body.size);
    if (!p->sealed || (to == TO_RANK && !p->begun[to]))
        return;
    encode_seal(p, to, of, seal);
    buffer_append(out, seal, sizeof seal);
}

/* ------------------------------------------------------------------ records */

static taking take_record(const link_pair *p, int to, altered *a, size_t *size)
{
    const buffer *come = &p->come[to];
    const uint8_t *head = come->data;
    if (come->size < RECORD_HEAD)
        return NOT_ALL;
    *size = RECORD_HEAD + (head[3] << 8 | head[4]);
    if (come->size < *size)
        return NOT_ALL;
    a->head.type = head[0];
    a->head.request = head[1] << 8 | head[2]; /* stands for the version */
    buffer_append(&a->body, head + RECORD_HEAD, *size - RECORD_HEAD);
    return TAKEN;
}

static void put_record(const altered *a, buffer *out)
{
    size_t length = a->body.size ^ a->lie;
    const uint8_t head[RECORD_HEAD] = {
        (uint8_t)a->head.type, (uint8_t)(a->head.request >> 8),
        (uint8_t)a->head.request, (uint8_t)(length >> 8), (uint8_t)length};
    buffer_append(out, head, sizeof head);
    buffer_append(out, a->body.data, a->body.size);
}

/* ------------------------------------------------------------------ passing */

/* All of it at once: an end that does not take it is lost. */
static bool say(link_pair *p, int to, const buffer *out)
{
    for (size_t said = 0; said < out->size;) {
        struct iovec rest = {out->data + said, out->size - said};
        ssize_t n = tls_send(p->secured[to], p->fds[to], &rest, 1);
        if (n <= 0 || tls_unsent(p->secured[to]) > 0)
            return false;
        said += (size_t)n;
    }
    return true;
}

/* False: the connection ends. */
static bool pass_altered(link_pair *p, int to, link_talk *talk, altered *a)
{
    buffer out = {0};
    altered was = {.head = a->head};
    buffer_append(&was.body, a->body.data, a->body.size);
    edits_apply(talk->edits, to, talk->passed[to]++, a, talk->happens, talk->cookie);
    for (int i = 0; i <= a->twice; i++) {
        if (talk->unit == UNIT_RECORD)
            put_record(a, &out);
        else
            put_frame(p, to, a, talk->unit == UNIT_SEALED ? &was : a, &out);
    }
    p->begun[to] = true;
    buffer *later = &p->later[to];
    buffer *from = a->later ? &out : later, *behind = a->later ? later : &out;
    buffer_append(behind, from->data, from->size);
    bool good = !was.body.failed && !a->body.failed && !out.failed && !later->failed;
    buffer_free(&was.body);
    buffer_clear(from);
    good = good && say(p, to, &out) && !a->last;
    buffer_free(&out);
    return good;
}

static bool pass_whole(link_pair *p, int to, link_talk *talk)
{
    buffer *come = &p->come[to];
    for (;;) {
        altered a = {0};
        size_t size = 0;
        taking taken = talk->unit == UNIT_RECORD ? take_record(p, to, &a, &size)
                                                 : take_frame(p, to, &a, &size);
        bool good = taken == TAKEN && pass_altered(p, to, talk, &a);
        buffer_free(&a.body);
        if (!good)
            return taken == NOT_ALL;
        memmove(come->data, come->data + size, come->size - size);
        come->size -= size;
    }
}

static bool is_up(const tls *t)
{
    return !t || tls_is_up(t);
}

/* All that has come, until the socket has no more: it does not tell of what the TLS holds. */
static bool hear(link_pair *p, int from)
{
    buffer *come = &p->come[1 - from];
    while (buffer_reserve(come, PIECE)) {
        ssize_t n =
            tls_receive(p->secured[from], p->fds[from], come->data + come->size, PIECE);
        if (n <= 0)
            return n < 0 && errno == EAGAIN;
        come->size += (size_t)n;
    }
    return false;
}

bool link_pair_pass(link_pair *p, int from, link_talk *talk)
{
    int to = 1 - from;
    if (!is_up(p->secured[from])) {
        tls_step step = tls_handshake(p->secured[from]);
        if (step != TLS_UP)
            return step == TLS_WAIT;
        if (!pass_whole(p, from, talk)) /* what came for it so far */
            return false;
    }
    return hear(p, from) && (!is_up(p->secured[to]) || pass_whole(p, to, talk));
}

/* -------------------------------------------------------- beginning and end */

void link_pair_clear(link_pair *p)
{
    *p = (link_pair){.fds = {-1, -1}};
}

void link_pair_open(link_pair *p, const int fds[2], const tls_end *const ends[2],
                    const char *address)
{
    p->address = address;
    for (int i = 0; i < 2; i++) {
        p->fds[i] = fds[i];
        if (ends)
            check((p->secured[i] = tls_new(ends[i], fds[i])) != NULL);
    }
    if (ends)
        (void)tls_handshake(p->secured[TO_RANK]); /* which this end begins */
}

void link_pair_close(link_pair *p, bool at_once)
{
    struct linger none = {.l_onoff = at_once};
    for (int i = 0; i < 2; i++) {
        tls_free(&p->secured[i]);
        if (p->fds[i] >= 0) {
            (void)setsockopt(p->fds[i], SOL_SOCKET, SO_LINGER, &none, sizeof none);
            close(p->fds[i]);
        }
        buffer_free(&p->come[i]);
        buffer_free(&p->later[i]);
    }
    buffer_free(&p->hello);
    link_pair_clear(p);
}
