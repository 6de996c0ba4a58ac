/* SPDX-License-Identifier: Apache-2.0 */
#include "list.h"

#include "array.h"
#include "error_set.h"
#include "host.h"
#include "net/client_state.h"
#include "place.h"
#include "socket.h"
#include "thread.h"
#include "wake.h"
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MS UINT64_C(1000000)
#define ASK_MS 5000     /* an offer is answered within */
#define PARKED_MS 10000 /* a request for changes waits so long at the rank */
#define AGAIN_MS 200    /* after a failure; then twice, up to ... */
#define AGAIN_MOST_MS 5000

/* What is to be offered, and to whom. */
typedef struct task {
    uint64_t serial; /* another offer has another one */
    bool wanted;
    uint8_t world_id[16];
    list_rank *ranks;
    size_t n_ranks;
    msg_offer offer;
    size_t n_lists;
    uint8_t whole[16]; /* the holding of the second list, if there are two */
} task;

/* Of an offer, or of a request for changes. */
typedef struct answer {
    size_t left; /* 1: it is awaited */
    deadline at;
    fanin_status status;
    fanin_error error;
    msg_holders_ok list;
    uint8_t members[LIMIT_HOLDERS / 8]; /* of the list */
} answer;

/* A list as far as the rank has told it: of those who hold the same, or all tensors whole. The
   roster is of all steps. */
typedef struct known_list {
    uint64_t version;     /* the thread's own; 0: none */
    msg_holders of;       /* likewise: whose roster it is, and its version */
    holder_entry *roster; /* by number */
    size_t n, capacity;
    uint8_t members[LIMIT_HOLDERS / 8]; /* bits of numbers */
} known_list;

#define LISTS 2

struct holders_list {
    const fanin_client_config *config;
    logger log;
    char host[HOST_ID_SIZE];
    int changed;
    loop_source wake; /* of the thread */
    pthread_t thread;
    bool started;
    /* the thread's own */
    fanin_client *client;
    uint8_t world_id[16]; /* that the client demands */
    pthread_mutex_t lock; /* guards what follows */
    char rank[72]; /* the client is connected to, "" none; the thread writes it */
    atomic_bool stop;
    task task;
    bool has_numbers, is_known;
    bool is_taken; /* a rank has the offer, as far as is known */
    bool refused;  /* a rank has said that relays are not allowed */
    int32_t
        stale_rank; /* that has said that the step is none of its own, or no more; -1 */
    known_list lists[LISTS];
    uint64_t changes;
};

/* -------------------------------------------------------------------- the others' side */

static void task_clear(task *t)
{
    free(t->ranks);
    *t = (task){.serial = t->serial};
}

static bool copy_ranks(task *t, const list_rank *ranks, size_t n)
{
    t->n_ranks = n;
    t->ranks = calloc(n + 1, sizeof *ranks);
    if (t->ranks && n > 0)
        memcpy(t->ranks, ranks, n * sizeof *ranks);
    return t->ranks != NULL;
}

/* Lock held. */
static void forget_lists(holders_list *list)
{
    for (size_t i = 0; i < LISTS; i++)
        memset(list->lists[i].members, 0, sizeof list->lists[i].members);
    list->changes++;
}

bool list_offer(holders_list *list, const uint8_t world_id[16], const list_rank *ranks,
                size_t n_ranks, const msg_offer *offer, const digest *whole)
{
    task next = {.wanted = true, .offer = *offer, .n_lists = whole ? LISTS : 1};
    memcpy(next.world_id, world_id, sizeof next.world_id);
    if (whole)
        memcpy(next.whole, whole->bytes, sizeof next.whole);
    if (!copy_ranks(&next, ranks, n_ranks))
        return false;
    pthread_mutex_lock(&list->lock);
    next.serial = list->task.serial + 1;
    task_clear(&list->task);
    list->task = next;
    list->is_known = list->is_taken = false;
    list->stale_rank = -1;
    forget_lists(list);
    pthread_mutex_unlock(&list->lock);
    wake_up(list->wake.fd);
    return true;
}

void list_tell(holders_list *list, const msg_offer *numbers)
{
    pthread_mutex_lock(&list->lock);
    msg_offer *o = &list->task.offer;
    o->units = numbers->units;
    o->landed = numbers->landed;
    o->bytes_origin = numbers->bytes_origin;
    o->bytes_relays = numbers->bytes_relays;
    o->bytes_handed_on = numbers->bytes_handed_on;
    o->late = numbers->late;
    o->taken_over = numbers->taken_over;
    list->has_numbers = list->task.wanted;
    pthread_mutex_unlock(&list->lock);
    wake_up(list->wake.fd);
}

void list_withdraw(holders_list *list)
{
    pthread_mutex_lock(&list->lock);
    list->task.serial += list->task.wanted;
    list->task.wanted = false;
    forget_lists(list);
    pthread_mutex_unlock(&list->lock);
    wake_up(list->wake.fd);
}

/* Where the entry is reached from here; false: nowhere. */
static bool find_address(const holders_list *list, const holder_entry *e, holder *to)
{
    char *out = to->address;
    bool here = to->is_here = list->host[0] && strcmp(list->host, e->host) == 0;
    const char *port = strrchr(e->address, ':'), *colon = strrchr(list->rank, ':');
    if (!port || (e->local && !here))
        return false;
    int host = colon ? (int)(colon - list->rank) : 0;
    size_t size = sizeof to->address;
    if (e->local)
        snprintf(out, size, "127.0.0.1%s", port);
    else if (port == e->address)
        snprintf(out, size, "%.*s%s", host, list->rank, port);
    else
        snprintf(out, size, "%s", e->address);
    return true;
}

static bool read_flag(holders_list *list, const bool *flag)
{
    pthread_mutex_lock(&list->lock);
    bool set = *flag;
    pthread_mutex_unlock(&list->lock);
    return set;
}

bool list_is_refused(holders_list *list)
{
    return read_flag(list, &list->refused);
}

int32_t list_stale_rank(holders_list *list)
{
    pthread_mutex_lock(&list->lock);
    int32_t rank = list->stale_rank;
    pthread_mutex_unlock(&list->lock);
    return rank;
}

bool list_is_taken(holders_list *list)
{
    return read_flag(list, &list->is_taken);
}

bool list_is_known(holders_list *list)
{
    return read_flag(list, &list->is_known);
}

static nearness near_of(const holders_list *list, const holder_entry *e, bool is_here)
{
    const char *own = list->task.offer.place;
    if (!strchr(own, '/') || strcmp(own, e->place) != 0)
        return NEAR_SITE;
    return is_here ? NEAR_HOST : NEAR_RACK;
}

/* Lock held. */
static size_t copy_list(const holders_list *list, size_t which, const member *self,
                        holder *out)
{
    const known_list *h = &list->lists[which];
    size_t n = 0;
    for (size_t i = 0; i < h->n; i++) {
        const holder_entry *e = &h->roster[i];
        holder one = {.is_whole = which > 0};
        memcpy(one.who.id, e->incarnation, sizeof one.who.id);
        if (h->members[i / 8] >> i % 8 & 1 && member_compare(&one.who, self) != 0 &&
            place_same_site(e->place, list->task.offer.place) &&
            find_address(list, e, &one)) {
            one.near = near_of(list, e, one.is_here);
            out[n++] = one;
        }
    }
    return n;
}

/* Whoever has connected anew is in it twice for a while. */
static size_t sort_holders(holder *all, size_t n)
{
    size_t kept = 0;
    qsort(all, n, sizeof *all, member_compare); /* they begin with it */
    for (size_t i = 0; i < n; i++) {
        if (kept == 0 || member_compare(&all[kept - 1].who, &all[i].who) != 0)
            all[kept++] = all[i];
    }
    return kept;
}

bool list_copy(holders_list *list, const member *self, uint64_t *seen, holder **out,
               size_t *n_out)
{
    pthread_mutex_lock(&list->lock);
    bool is_new = *seen != list->changes;
    size_t n = 0, most = list->lists[0].n + list->lists[1].n;
    holder *all = is_new ? calloc(most + 1, sizeof *all) : NULL;
    for (size_t i = 0; all && i < LISTS; i++)
        n += copy_list(list, i, self, all + n);
    if (all)
        *seen = list->changes;
    pthread_mutex_unlock(&list->lock);
    *out = all;
    *n_out = all ? sort_holders(all, n) : 0;
    return all != NULL;
}

/* --------------------------------------------------------------------------- answers */

static void on_answer(void *cookie, connection *c, message_type type, body *b)
{
    answer *a = cookie;
    a->left = 0;
    a->status = FANIN_OK;
    if (type == MSG_OFFER_OK && decode_empty(b) == FANIN_OK)
        return;
    if (type == MSG_HOLDERS_OK && decode_holders_ok(b, &a->list) == FANIN_OK) {
        bytes_view *members = &a->list.members;
        if (members->size > 0)
            members->data = memcpy(a->members, members->data, members->size);
        return;
    }
    holders_free(&a->list);
    a->status = connection_reply_error(c, "relays", type, b, &a->error);
}

/* Lock held. False: no memory. */
static bool apply_entry(known_list *h, const holder_entry *e)
{
    if (!array_reserve(&h->roster, &h->capacity, e->number + 1, sizeof *h->roster))
        return false;
    for (; h->n <= e->number; h->n++)
        h->roster[h->n] = (holder_entry){0};
    h->roster[e->number] = *e;
    return true;
}

/* Without memory for it the list is asked for as a whole. */
static void apply_answer(holders_list *list, const task *t, known_list *h,
                         const msg_holders_ok *m)
{
    bool good = true, news = m->members.size > 0;
    pthread_mutex_lock(&list->lock);
    h->version = m->version;
    if (t->serial == list->task.serial) {
        for (uint32_t i = 0; i < m->n_entries && good; i++)
            good = apply_entry(h, &m->entries[i]);
        h->of.roster = good ? m->roster : 0;
        if (good && news) {
            memset(h->members, 0, sizeof h->members);
            memcpy(h->members, m->members.data, m->members.size);
        }
        list->changes += news;
        list->is_known = list->is_taken = true;
        for (size_t i = 0; i < t->n_lists; i++)
            list->is_known = list->is_known && list->lists[i].version > 0;
    }
    pthread_mutex_unlock(&list->lock);
    if (news)
        wake_up(list->changed);
    if (!good)
        h->version = 0;
}

/* ------------------------------------------------------------------- the rank's side */

static void set_rank(holders_list *list, const char *address)
{
    pthread_mutex_lock(&list->lock);
    snprintf(list->rank, sizeof list->rank, "%s", address);
    pthread_mutex_unlock(&list->lock);
}

static void drop_client(holders_list *list)
{
    if (list->client)
        loop_remove(&list->client->loop, &list->wake);
    fanin_client_destroy(&list->client);
    set_rank(list, "");
}

static fanin_status make_client(holders_list *list, const task *t, fanin_error *error)
{
    fanin_client_config config = *list->config;
    if (list->client && memcmp(list->world_id, t->world_id, sizeof t->world_id) == 0)
        return FANIN_OK;
    drop_client(list);
    memcpy(config.world_id, t->world_id, sizeof config.world_id);
    config.partial = true;
    config.no_ucx = true;
    fanin_status status = fanin_client_create(&config, &list->client, error);
    if (status == FANIN_OK)
        status = loop_add(&list->client->loop, &list->wake, error);
    memcpy(list->world_id, t->world_id, sizeof list->world_id);
    return status;
}

static bool is_connected_to_rank(const holders_list *list)
{
    return list->rank[0] && list->client->n_peers == 1 &&
           peer_ready(&list->client->peers[0]);
}

static fanin_status connect_rank(holders_list *list, const list_rank *rank,
                                 fanin_error *error)
{
    const char *address = rank->address;
    fanin_status status = fanin_client_connect(list->client, &address, 1,
                                               list->config->connect_timeout_ms, error);
    if (status != FANIN_OK)
        return status;
    const msg_hello_ok *hello = &list->client->peers[0].control->peer;
    if (memcmp(hello->incarnation, rank->incarnation, sizeof rank->incarnation) == 0)
        return FANIN_OK;
    fanin_client_disconnect(list->client);
    return error_set(error, FANIN_ERR_WORLD, NULL,
                     "the rank at %s has restarted since it was pulled from", address);
}

/* The first rank that answers. */
static fanin_status find_rank(holders_list *list, const task *t, fanin_error *error)
{
    fanin_status status = make_client(list, t, error);
    if (status == FANIN_OK && is_connected_to_rank(list))
        return FANIN_OK;
    set_rank(list, "");
    for (size_t i = 0; i < LISTS; i++)
        list->lists[i].of.roster = 0; /* it is that rank's */
    for (size_t i = 0; status == FANIN_OK && i < t->n_ranks; i++) {
        fanin_status tried = connect_rank(list, &t->ranks[i], error);
        if (tried == FANIN_OK) {
            set_rank(list, t->ranks[i].address);
            return FANIN_OK;
        }
        if (i + 1 == t->n_ranks || atomic_load(&list->stop))
            return tried;
    }
    return status;
}

static connection *rank_connection(const holders_list *list)
{
    return list->client->peers[0].control;
}

/* Whether the thread has something else to do. */
static bool is_task_over(holders_list *list, uint64_t serial)
{
    pthread_mutex_lock(&list->lock);
    bool over = serial != list->task.serial;
    pthread_mutex_unlock(&list->lock);
    return over || atomic_load(&list->stop);
}

static void send_numbers(holders_list *list, const msg_offer *m)
{
    connection *c = rank_connection(list);
    encode_offer(connection_out(c), c->next_request, m);
    connection_ask(c, NULL, NULL);
}

static bool are_awaited(const answer *a, size_t n)
{
    bool all = true;
    for (size_t i = 0; i < n; i++)
        all = all && a[i].left > 0;
    return all;
}

/* Until one of them is there, or the task is over. */
static fanin_status await_answer(holders_list *list, uint64_t serial, const answer *a,
                                 size_t n, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    while (are_awaited(a, n) && status == FANIN_OK && !is_task_over(list, serial)) {
        pthread_mutex_lock(&list->lock);
        bool has_numbers = list->has_numbers;
        msg_offer numbers = list->task.offer;
        list->has_numbers = false;
        pthread_mutex_unlock(&list->lock);
        if (has_numbers && is_connected_to_rank(list))
            send_numbers(list, &numbers);
        deadline at = deadline_sooner(a[0].at, a[n - 1].at);
        if (are_awaited(a, n))
            status = client_step(list->client, at, at, "relays", error);
    }
    return status;
}

/* It is not waited for any longer. */
static fanin_status finish_answer(holders_list *list, answer *a, fanin_status status,
                                  fanin_error *error)
{
    if (a->left > 0)
        connection_forget(rank_connection(list), a);
    else if (status == FANIN_OK && a->status != FANIN_OK)
        return error_copy(error, &a->error);
    return status;
}

static fanin_status check_relays(holders_list *list, fanin_error *error)
{
    const connection *c = rank_connection(list);
    error_place place = connection_place(c, "relays");
    place.remedy = "use the same fanin release on both ends";
    if (c->peer.features & FEATURE_RELAYS)
        return FANIN_OK;
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "rank %u at %s knows no relays", c->peer.rank, c->text);
}

/* To be sent as request number @p request. */
static void put_ask(holders_list *list, const task *t, size_t which, uint64_t request,
                    answer *a)
{
    known_list *h = &list->lists[which];
    msg_holders m = {
        .step = t->offer.step, .version = h->version, .timeout_ms = PARKED_MS};
    snprintf(m.publication, sizeof m.publication, "%s", t->offer.publication);
    memcpy(m.holding, which > 0 ? t->whole : t->offer.holding, sizeof m.holding);
    if (memcmp(m.holding, h->of.holding, sizeof m.holding) == 0 &&
        strcmp(m.publication, h->of.publication) == 0)
        m.roster = h->of.roster;
    h->of = m;
    *a = (answer){
        .left = 1, .at = deadline_in_ms(PARKED_MS + ASK_MS), .error = FANIN_ERROR_INIT};
    encode_holders(connection_out(rank_connection(list)), request, &m);
}

/* Takes what is there, and asks for what comes then. */
static fanin_status take_changes(holders_list *list, const task *t, answer *answers,
                                 fanin_error *error)
{
    for (size_t i = 0; i < t->n_lists; i++) {
        answer *a = &answers[i];
        if (a->left > 0)
            continue;
        if (a->status != FANIN_OK)
            return error_copy(error, &a->error);
        apply_answer(list, t, &list->lists[i], &a->list);
        holders_free(&a->list);
        if (is_task_over(list, t->serial))
            continue;
        connection *c = rank_connection(list);
        put_ask(list, t, i, c->next_request, a);
        connection_ask(c, on_answer, a);
    }
    return FANIN_OK;
}

/* Offers, and hears of others until the task is another one, or something fails. All is asked at
   once: the rank is woken by one packet. Where it refuses the offer nothing stays parked, since the
   lists are asked for without a version. */
static fanin_status offer_and_hear(holders_list *list, const task *t,
                                   fanin_error *error)
{
    answer answers[LISTS] = {0};
    answer offered = {
        .left = 1, .at = deadline_in_ms(ASK_MS), .error = FANIN_ERROR_INIT};
    connection *c = rank_connection(list);
    encode_offer(connection_out(c), c->next_request, &t->offer);
    for (size_t i = 0; i < t->n_lists; i++) {
        list->lists[i].version = 0;
        put_ask(list, t, i, c->next_request + 1 + i, &answers[i]);
    }
    connection_ask(c, on_answer, &offered); /* sends them all */
    for (size_t i = 0; i < t->n_lists; i++)
        connection_ask(c, on_answer, &answers[i]);
    fanin_status status = await_answer(list, t->serial, &offered, 1, error);
    status = finish_answer(list, &offered, status, error);
    while (status == FANIN_OK && !is_task_over(list, t->serial)) {
        status = await_answer(list, t->serial, answers, t->n_lists, error);
        if (status == FANIN_OK)
            status = take_changes(list, t, answers, error);
    }
    for (size_t i = 0; i < t->n_lists; i++) {
        status = finish_answer(list, &answers[i], status, error);
        holders_free(&answers[i].list);
    }
    return status;
}

/* ------------------------------------------------------------------------- the thread */

static void rest_for(holders_list *list, int ms)
{
    struct pollfd fd = {list->wake.fd, POLLIN, 0};
    poll(&fd, 1, ms);
    wake_heard(list->wake.fd);
}

static void tell_failure(holders_list *list, fanin_status status,
                         const fanin_error *why)
{
    bool refused = status == FANIN_ERR_UNSUPPORTED;
    pthread_mutex_lock(&list->lock);
    bool again = refused && list->refused;
    list->refused = refused;
    list->stale_rank = status == FANIN_ERR_STALE ? why->rank : -1;
    list->is_known = true;
    list->is_taken = false;
    pthread_mutex_unlock(&list->lock);
    wake_up(list->changed);
    if (again)
        return;
    log_write(&list->log, refused ? FANIN_LOG_WARNING : FANIN_LOG_INFO, "relay-list",
              "this reader hears of no other relays: %s; %s", why->message,
              why->remedy);
}

static fanin_status serve_task(holders_list *list, const task *t, fanin_error *error)
{
    fanin_status status = find_rank(list, t, error);
    if (status == FANIN_OK)
        status = check_relays(list, error);
    return status == FANIN_OK ? offer_and_hear(list, t, error) : status;
}

static bool take_task(holders_list *list, task *t)
{
    pthread_mutex_lock(&list->lock);
    *t = list->task;
    t->ranks = NULL;
    if (t->wanted)
        (void)!copy_ranks(t, list->task.ranks, list->task.n_ranks);
    pthread_mutex_unlock(&list->lock);
    return t->ranks != NULL;
}

static void *list_run(void *cookie)
{
    holders_list *list = cookie;
    int again = AGAIN_MS;
    while (!atomic_load(&list->stop)) {
        task t;
        fanin_error error = FANIN_ERROR_INIT;
        if (!take_task(list, &t)) {
            drop_client(list); /* and with it the offer */
            rest_for(list, -1);
            continue;
        }
        fanin_status status = serve_task(list, &t, &error);
        bool over = is_task_over(list, t.serial);
        task_clear(&t);
        if (over || status == FANIN_OK) {
            again = AGAIN_MS;
            continue;
        }
        tell_failure(list, status, &error);
        rest_for(list, status == FANIN_ERR_UNSUPPORTED ? -1 : again);
        again = again < AGAIN_MOST_MS ? again * 2 : AGAIN_MOST_MS;
    }
    drop_client(list);
    return NULL;
}

fanin_status list_create(const fanin_client_config *config, const logger *log,
                         int changed, holders_list **out, fanin_error *error)
{
    holders_list *list = calloc(1, sizeof *list);
    if (!list)
        return error_set_memory(error);
    *list = (holders_list){
        .config = config, .log = *log, .changed = changed, .stale_rank = -1};
    pthread_mutex_init(&list->lock, NULL);
    host_id(NULL, list->host);
    fanin_status status = loop_source_wake(&list->wake, error);
    if (status == FANIN_OK)
        status = thread_start(&list->thread, "fanin-list", list_run, list, error);
    list->started = status == FANIN_OK;
    *out = list;
    if (status != FANIN_OK)
        list_destroy(out);
    return status;
}

void list_destroy(holders_list **list)
{
    holders_list *l = *list;
    if (!l)
        return;
    *list = NULL;
    atomic_store(&l->stop, true);
    if (l->wake.fd >= 0)
        wake_up(l->wake.fd);
    if (l->started)
        pthread_join(l->thread, NULL);
    if (l->wake.fd >= 0)
        close(l->wake.fd);
    task_clear(&l->task);
    for (size_t i = 0; i < LISTS; i++)
        free(l->lists[i].roster);
    pthread_mutex_destroy(&l->lock);
    free(l);
}
