/* SPDX-License-Identifier: Apache-2.0 */
#include "pem.h"
#include "error_set.h"
#include "own_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------- identity */

#define SCHEME "fanin://"
#define RANKS "rank/"
#define RELAYS "relay/"

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

static bool is_job_char(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           c == '.' || c == '_' || c == '-';
}

static bool identity_take_job(text *t, char out[JOB_MOST + 1])
{
    size_t size = 0;
    while (size < t->size && size < JOB_MOST && is_job_char(t->at[size]))
        size++;
    memcpy(out, t->at, size);
    out[size] = '\0';
    t->at += size;
    t->size -= size;
    return size > 0 && identity_take(t, "/");
}

static bool is_word(const text *t)
{
    size_t size = 0;
    while (size < t->size && is_job_char(t->at[size]))
        size++;
    return size == t->size && size >= 1 && size <= JOB_MOST;
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
    if (identity_take(&t, RELAYS)) {
        id.role = AS_RELAY;
        if (!is_word(&t))
            return false;
    } else if (!identity_is(&t, "reader")) {
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
                 id->role == AS_READER  ? "reader"
                 : id->role == AS_RELAY ? RELAYS "NAME"
                                        : RANKS "*");
}

bool identity_suffices(const identity *has, const identity *wanted)
{
    if (strcmp(has->job, wanted->job) != 0 ||
        (has->role == AS_READER) != (wanted->role == AS_READER) ||
        (has->role == AS_RELAY) != (wanted->role == AS_RELAY))
        return false;
    return has->role != AS_RANK || wanted->role != AS_RANK || has->rank == wanted->rank;
}

/* ---------------------------------------------------------------------------- pem */

#define NAMES_MOST 200
#define FILE_MOST ((size_t)1 << 20)
#define NOT_TAKEN "is not strong enough, or not of a kind that TLS 1.3 takes"
#define MAKE "make them: docs/how-to/certificates.md"

static const own_file_rules cert_rules = {
    .what = "certificate file", .phase = "certificate", .make = MAKE};
static const own_file_rules key_rules = {.what = "key file",
                                         .phase = "certificate",
                                         .is_private = true,
                                         .make = MAKE,
                                         .leaked = "key and certificate"};
static const own_file_rules ca_rules = {
    .what = "file of authorities", .phase = "certificate", .make = MAKE};

/* ---------------------------------------------------------------------- names */

typedef bool (*name_fn)(void *cookie, const char *uri, size_t size);

/* Every URI among the subject's alternative names, until one is enough. */
static bool each_uri(const openssl *o, const X509 *cert, name_fn fn, void *cookie)
{
    enum { ALTERNATIVE_NAMES = 85, URI = 6 };
    bool enough = false;
    OPENSSL_STACK *names = o->X509_get_ext_d2i(cert, ALTERNATIVE_NAMES, NULL, NULL);
    for (int i = 0; names && !enough && i < o->OPENSSL_sk_num(names); i++) {
        int type;
        const void *name =
            o->GENERAL_NAME_get0_value(o->OPENSSL_sk_value(names, i), &type);
        if (type == URI && o->ASN1_STRING_length(name) > 0)
            enough = fn(cookie, (const char *)o->ASN1_STRING_get0_data(name),
                        (size_t)o->ASN1_STRING_length(name));
    }
    o->GENERAL_NAMES_free(names);
    return enough;
}

static bool suffices(void *cookie, const char *uri, size_t size)
{
    identity id;
    return identity_parse(uri, size, &id) && identity_suffices(&id, cookie);
}

bool pem_is_for(const openssl *o, const X509 *cert, const identity *wanted)
{
    identity sought = *wanted;
    return each_uri(o, cert, suffices, &sought);
}

typedef struct listing {
    char *out;
    size_t room, used;
} listing;

static bool pem_list(void *cookie, const char *uri, size_t size)
{
    listing *l = cookie;
    size_t most = size < IDENTITY_URI_MOST ? size : IDENTITY_URI_MOST;
    if (l->room - l->used < most + sizeof ", \"\"")
        return true;
    if (l->used > 0)
        l->used += (size_t)snprintf(l->out + l->used, l->room - l->used, ", ");
    l->out[l->used++] = '"';
    for (size_t i = 0; i < most; i++)
        l->out[l->used++] =
            uri[i] > ' ' && uri[i] < 127 && uri[i] != '"' ? uri[i] : '?';
    l->out[l->used++] = '"';
    l->out[l->used] = '\0';
    return false;
}

void pem_names(const openssl *o, const X509 *cert, char *out, size_t room)
{
    listing l = {.out = out, .room = room};
    snprintf(out, room, "nobody: it has no URI among its alternative names");
    each_uri(o, cert, pem_list, &l);
}

/* Of one's own certificate: the job of all names that have the role. */
typedef struct search {
    identity *is;
    bool found;
} search;

/* True: another job than before. */
static bool pem_take_job(void *cookie, const char *uri, size_t size)
{
    search *s = cookie;
    identity id, wanted = *s->is;
    if (!identity_parse(uri, size, &id))
        return false;
    if (!wanted.job[0])
        memcpy(wanted.job, id.job, sizeof wanted.job);
    bool other_job = strcmp(wanted.job, id.job) != 0;
    memcpy(id.job, wanted.job, sizeof id.job);
    if (!identity_suffices(&id, &wanted))
        return false;
    s->found |= !other_job;
    *s->is = wanted;
    return other_job;
}

static fanin_status settle_identity(const openssl *o, const X509 *cert,
                                    const char *path, identity *is, fanin_error *error)
{
    char names[NAMES_MOST], wanted[IDENTITY_URI_MOST], why[512];
    search s = {.is = is};
    identity shown = *is;
    bool is_two = each_uri(o, cert, pem_take_job, &s);
    if (s.found && !is_two)
        return FANIN_OK;
    if (!shown.job[0])
        memcpy(shown.job, "JOB", sizeof "JOB");
    identity_text(&shown, wanted);
    pem_names(o, cert, names, sizeof names);
    if (openssl_fault(o) == OPENSSL_NO_MEMORY) /* names cannot be read either */
        return error_set_memory(error);
    snprintf(why, sizeof why, "is for %s, and this process needs \"%s\"%s", names,
             wanted, is_two ? " of one job alone" : "");
    return own_file_refuse(&cert_rules, path, FANIN_ERR_AUTH, why,
                           "give it a certificate with that URI as alternative name",
                           error);
}

/* ---------------------------------------------------------------------- files */

static int no_password(char *to, int room, int writing, void *cookie)
{
    (void)to;
    (void)room;
    (void)writing;
    (void)cookie;
    return -1;
}

typedef struct pem_text {
    char *data;
    size_t size;
    BIO *bio; /* reads it */
} pem_text;

static void text_free(const openssl *o, pem_text *t)
{
    if (t->bio)
        o->BIO_free(t->bio);
    if (t->data)
        explicit_bzero(t->data, t->size);
    free(t->data);
}

/* Within OpenSSL, as all that follows. */
static fanin_status text_read(const openssl *o, const own_file_rules *rules,
                              const char *path, pem_text *out, fanin_error *error)
{
    *out = (pem_text){0};
    if (!(out->data = malloc(FILE_MOST)))
        return error_set_memory(error);
    openssl_leave(); /* a file system may not answer for long */
    fanin_status status =
        own_file_read(rules, path, out->data, FILE_MOST, &out->size, error);
    openssl_enter(o);
    if (status == FANIN_OK && out->size == FILE_MOST)
        status = own_file_refuse(rules, path, FANIN_ERR_ARGUMENT, "is too large",
                                 rules->make, error);
    if (status == FANIN_OK &&
        !(out->bio = o->BIO_new_mem_buf(out->data, (int)out->size)))
        status = error_set_memory(error);
    if (status != FANIN_OK)
        text_free(o, out);
    return status;
}

static fanin_status pem_refuse(const openssl *o, const own_file_rules *rules,
                               const char *path, const char *why, fanin_error *error)
{
    if (openssl_fault(o) == OPENSSL_NO_MEMORY)
        return error_set_memory(error);
    return own_file_refuse(rules, path, FANIN_ERR_ARGUMENT, why, rules->make, error);
}

/* Why there is no certificate number @p n, from 1 on. A file that ends before the first holds none;
   one that ends in the midst of another was torn, and what follows is not known. */
static fanin_status settle_end(const openssl *o, const own_file_rules *rules,
                               const char *path, unsigned n, fanin_error *error)
{
    const unsigned long no_start_line = 9ul << 23 | 108; /* PEM_R_NO_START_LINE */
    char why[128];
    if (o->ERR_peek_last_error() == no_start_line)
        return n > 1 ? FANIN_OK
                     : pem_refuse(o, rules, path, "holds no certificate in PEM", error);
    snprintf(why, sizeof why,
             "is damaged, or not whole: certificate number %u in it cannot be read", n);
    return pem_refuse(o, rules, path, why, error);
}

static fanin_status check_dates(const openssl *o, const X509 *cert, const char *path,
                                fanin_error *error)
{
    bool early = o->X509_cmp_current_time(o->X509_get0_notBefore(cert)) > 0;
    bool late = o->X509_cmp_current_time(o->X509_get0_notAfter(cert)) <= 0;
    if (!early && !late)
        return FANIN_OK;
    return own_file_refuse(&cert_rules, path, FANIN_ERR_AUTH,
                           early ? "is not good yet" : "has expired",
                           early ? "is this host's clock right?" : "renew it", error);
}

/* What follows one's own certificate: the authorities between. */
static fanin_status use_chain(const openssl *o, SSL_CTX *context, BIO *from,
                              const char *path, fanin_error *error)
{
    enum { CHAIN_CERT = 89 };
    X509 *next;
    unsigned n = 2;
    for (; (next = o->PEM_read_bio_X509(from, NULL, no_password, NULL)); n++)
        if (o->SSL_CTX_ctrl(context, CHAIN_CERT, 0, next) != 1) {
            o->X509_free(next);
            return pem_refuse(o, &cert_rules, path, NOT_TAKEN, error);
        }
    return settle_end(o, &cert_rules, path, n, error);
}

fanin_status pem_use_certificate(const openssl *o, SSL_CTX *context, const char *path,
                                 identity *is, fanin_error *error)
{
    pem_text text;
    fanin_status status = text_read(o, &cert_rules, path, &text, error);
    if (status != FANIN_OK)
        return status;
    X509 *cert = o->PEM_read_bio_X509(text.bio, NULL, no_password, NULL);
    if (!cert)
        status = settle_end(o, &cert_rules, path, 1, error);
    else
        status = check_dates(o, cert, path, error);
    if (status == FANIN_OK)
        status = settle_identity(o, cert, path, is, error);
    if (status == FANIN_OK && o->SSL_CTX_use_certificate(context, cert) != 1)
        status = pem_refuse(o, &cert_rules, path, NOT_TAKEN, error);
    if (status == FANIN_OK)
        status = use_chain(o, context, text.bio, path, error);
    o->X509_free(cert);
    text_free(o, &text);
    return status;
}

fanin_status pem_use_key(const openssl *o, SSL_CTX *context, const char *path,
                         const char *cert, fanin_error *error)
{
    pem_text text;
    char why[512];
    fanin_status status = text_read(o, &key_rules, path, &text, error);
    if (status != FANIN_OK)
        return status;
    EVP_PKEY *key = o->PEM_read_bio_PrivateKey(text.bio, NULL, no_password, NULL);
    if (!key) {
        status = pem_refuse(o, &key_rules, path,
                            "holds no private key in PEM without password", error);
    } else if (o->SSL_CTX_use_PrivateKey(context, key) != 1) {
        snprintf(why, sizeof why, "is not that of the certificate %.300s", cert);
        status = pem_refuse(o, &key_rules, path, why, error);
    }
    o->EVP_PKEY_free(key);
    text_free(o, &text);
    return status;
}

fanin_status pem_use_authorities(const openssl *o, SSL_CTX *context, const char *path,
                                 fanin_error *error)
{
    pem_text text;
    fanin_status status = text_read(o, &ca_rules, path, &text, error);
    if (status != FANIN_OK)
        return status;
    X509_STORE *store = o->SSL_CTX_get_cert_store(context);
    unsigned n = 1;
    X509 *ca;
    while (status == FANIN_OK &&
           (ca = o->PEM_read_bio_X509(text.bio, NULL, no_password, NULL))) {
        if (o->X509_STORE_add_cert(store, ca) != 1)
            status = error_set_memory(error);
        o->X509_free(ca); /* the store has its own hold of it */
        n++;
    }
    if (status == FANIN_OK)
        status = settle_end(o, &ca_rules, path, n, error);
    text_free(o, &text);
    return status;
}
