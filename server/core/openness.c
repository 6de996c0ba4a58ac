/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that anybody may read or alter are published by intent only. */
#include "core/openness.h"
#include "error_set.h"

#define INSECURE                                                                       \
    "say that it may be so: FANIN_SERVER_INSECURE, insecure=True, --insecure, "        \
    "FANIN_INSECURE=1"

#define READ_BY_ALL                                                                    \
    "everybody in the networks allowed can read the weights, and anyone on the way "   \
    "can alter them"

/* The widest private networks are 10.0.0.0/8 and fc00::/7. */
static bool is_wider_than_private(const network *n)
{
    return n->prefix < (n->family == AF_INET ? 8 : 7);
}

/* The first of those allowed; NULL: none is. */
static const network *too_wide(const fanin_server *s)
{
    const network *n = s->allow, *end = s->allow + s->n_allow;
    while (n < end && !is_wider_than_private(n))
        n++;
    return n < end ? n : NULL;
}

static bool is_open(const fanin_server *s)
{
    return (s->flags & FANIN_SERVER_OPEN) && !socket_is_loopback(&s->address);
}

fanin_status openness_check(const fanin_server *s, fanin_error *error)
{
    error_place place = {.phase = "create"};
    if (!is_open(s) || (s->flags & FANIN_SERVER_INSECURE))
        return FANIN_OK;
    if (!s->tls) {
        place.remedy =
            "give all ranks and workers one secret (nixl-fetch secret; "
            "secret_file, --secret-file, FANIN_SECRET_FILE) or "
            "certificates (tls_cert, --tls-cert, FANIN_TLS_CERT), or " INSECURE;
        return error_set(
            error, FANIN_ERR_ARGUMENT, &place,
            "an open server without the launch's secret or certificates: " READ_BY_ALL);
    }
    const network *wide = too_wide(s);
    place.remedy = "allow the networks that the workers are in, or " INSECURE;
    return wide
               ? error_set(error, FANIN_ERR_ARGUMENT, &place,
                           "the allow-list has a network of prefix /%u, which is wider "
                           "than any private one",
                           wide->prefix)
               : FANIN_OK;
}

void openness_tell(const fanin_server *s)
{
    const network *wide = too_wide(s);
    if (!is_open(s))
        return;
    if (!s->tls)
        log_write(&s->log, FANIN_LOG_WARNING, "insecure",
                  "rank %u is open on %s without the launch's secret or "
                  "certificates: " READ_BY_ALL,
                  (unsigned)s->rank, s->address.text);
    if (wide)
        log_write(&s->log, FANIN_LOG_WARNING, "insecure",
                  "rank %u is open on %s to a network of prefix /%u, which is wider "
                  "than any private one",
                  (unsigned)s->rank, s->address.text, wide->prefix);
}
