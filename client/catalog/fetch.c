/* SPDX-License-Identifier: Apache-2.0 */
#include "catalog/tables.h"

#include "error_set.h"
#include <inttypes.h>
#include <stdio.h>

static void ask_page(fetch *f);

/* The rank has answered in full, or is not waited for any longer. */
static void page_asked_until_now(fetch *f, fanin_status outcome)
{
    span_of_rank(f->client, f->peer, TRACE_CATALOG, f->asked_ns, clock_ns(),
                 f->data.size, outcome);
    f->asked_ns = 0;
}

static void ended(fetch *f)
{
    page_asked_until_now(f, f->error.status);
    --*f->left;
}

static void fail_fetch(fetch *f, fanin_status status, const char *what)
{
    connection *c = f->client->peers[f->peer].control;
    error_place place = connection_place(c, "catalog");
    if (status == FANIN_ERR_LIMIT)
        place.remedy =
            "publish fewer tensors, or raise max_catalog of fanin_client_config";
    error_set(&f->error, status, &place, "rank %u at %s %s", c->peer.rank, c->text,
              what);
    ended(f);
}

/* A rank that gives no part of its boxes is asked for all of them. */
static bool refuses_parts(fetch *f, fanin_status status)
{
    if (f->request.keys.size == 0 || f->data.size > 0 ||
        (status != FANIN_ERR_UNSUPPORTED && status != FANIN_ERR_ARGUMENT))
        return false;
    f->request.keys = (bytes_view){0};
    f->error = (fanin_error)FANIN_ERROR_INIT;
    return true;
}

/* False: it is not what follows, and the fetch has failed. */
static bool take_page(fetch *f, body *b, msg_blob_page *page)
{
    char what[160];
    fanin_status status = decode_blob_page(b, page);
    /* Before its form: of a table that has become longer the last page is empty. */
    if (f->data.size > 0 && page->offset == f->data.size && page->total != f->total) {
        snprintf(what, sizeof what,
                 "sent a page of a table of %" PRIu64 " bytes that was one of %" PRIu64
                 " bytes before",
                 page->total, f->total);
        fail_fetch(f, FANIN_ERR_PROTOCOL, what);
    } else if (status != FANIN_OK) {
        snprintf(what, sizeof what, "sent a malformed page: %s", b->why ? b->why : "");
        fail_fetch(f, FANIN_ERR_PROTOCOL, what);
    } else if (page->offset != f->data.size) {
        fail_fetch(f, FANIN_ERR_PROTOCOL,
                   "sent a page that does not follow the one before");
    } else if (page->total > f->client->config.max_catalog) {
        fail_fetch(f, FANIN_ERR_LIMIT,
                   "announced a table larger than this client accepts");
    } else {
        return true;
    }
    return false;
}

static void on_page(void *cookie, connection *c, message_type type, body *b)
{
    fetch *f = cookie;
    msg_blob_page page;
    if (type != (message_type)(f->type + 1)) {
        fanin_status status = connection_reply_error(c, "catalog", type, b, &f->error);
        if (refuses_parts(f, status)) {
            ask_page(f);
            return;
        }
        ended(f);
        return;
    }
    if (!take_page(f, b, &page))
        return;
    f->total = page.total;
    buffer_append(&f->data, page.data.data, page.data.size);
    if (f->data.failed)
        error_set_memory(&f->error);
    if (!f->data.failed && f->data.size < page.total) {
        ask_page(f);
        return;
    }
    if (!f->data.failed && f->here)
        f->here(f->cookie, f);
    ended(f);
}

static void ask_page(fetch *f)
{
    connection *c = f->client->peers[f->peer].control;
    if (c->state != CONNECTION_READY) {
        connection_reply_error(c, "catalog", 0, NULL, &f->error);
        ended(f);
        return;
    }
    f->request.offset = f->data.size;
    encode_blob_request(connection_out(c), c->next_request, f->type, &f->request);
    connection_ask(c, on_page, f);
}

void fetch_ask(fanin_client *client, fetch *fetches, size_t n, size_t *left)
{
    *left = n;
    for (size_t i = 0; i < n; i++) {
        fetches[i].client = client;
        fetches[i].left = left;
        fetches[i].asked_ns = clock_ns();
        fetches[i].error = (fanin_error)FANIN_ERROR_INIT;
        ask_page(&fetches[i]);
    }
}

fanin_status fetch_settle(fanin_client *client, fetch *fetches, size_t n,
                          fanin_status status, fanin_error *error)
{
    for (size_t i = 0; i < n; i++) {
        connection_forget(client->peers[fetches[i].peer].control, &fetches[i]);
        if (fetches[i].asked_ns > 0)
            page_asked_until_now(&fetches[i], status);
        if (status == FANIN_OK && fetches[i].error.status != FANIN_OK)
            status = error_copy(error, &fetches[i].error);
    }
    return status;
}

fanin_status fetch_all(fanin_client *client, fetch *fetches, size_t n, deadline at,
                       fanin_error *error)
{
    size_t left;
    fetch_ask(client, fetches, n, &left);
    fanin_status status = client_run(client, &left, at, "catalog", error);
    return fetch_settle(client, fetches, n, status, error);
}

void fetch_free(fetch *fetches, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        key_set_free(&fetches[i].keys);
        buffer_free(&fetches[i].ranges);
        buffer_free(&fetches[i].data);
    }
}
