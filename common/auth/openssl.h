/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * OpenSSL 3, loaded at run time. What is used of it is declared here, by its stable ABI: none of
 * its headers is needed to build, and no package depends on it that has no secret.
 */
#ifndef OPENSSL_H
#define OPENSSL_H

#include "log.h"
#include <fanin/error.h>

typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_session_st SSL_SESSION;
typedef struct ssl_method_st SSL_METHOD;
typedef struct ssl_cipher_st SSL_CIPHER;
typedef struct bio_st BIO;
typedef struct bio_method_st BIO_METHOD;
typedef struct evp_md_st EVP_MD;
typedef struct evp_pkey_st EVP_PKEY;
typedef struct x509_st X509;
typedef struct x509_store_st X509_STORE;
typedef struct x509_store_ctx_st X509_STORE_CTX;
typedef struct asn1_string_st ASN1_STRING;
typedef struct general_name_st GENERAL_NAME;
typedef struct stack_st OPENSSL_STACK; /* GENERAL_NAMES too */

typedef int (*psk_find_fn)(SSL *ssl, const unsigned char *identity, size_t size,
                           SSL_SESSION **out);
typedef int (*psk_use_fn)(SSL *ssl, const EVP_MD *md, const unsigned char **identity,
                          size_t *size, SSL_SESSION **out);
typedef int (*bio_write_fn)(BIO *bio, const char *data, int size);
typedef int (*bio_read_fn)(BIO *bio, char *data, int size);
typedef long (*bio_ctrl_fn)(BIO *bio, int command, long number, void *pointer);
typedef int (*verify_fn)(int good, X509_STORE_CTX *);
typedef int (*password_fn)(char *to, int room, int writing, void *cookie);

typedef void (*message_fn)(int is_sent, int version, int type, const void *data,
                           size_t size, SSL *ssl, void *cookie);

/** All functions of OpenSSL that are called: members of the table, and names for dlsym(). */
#define OPENSSL_FUNCTIONS(X)                                                           \
    X(unsigned long, OpenSSL_version_num, (void))                                      \
    X(const char *, OpenSSL_version, (int what))                                       \
    X(int, OPENSSL_init_ssl, (uint64_t options, const void *settings))                 \
    X(const SSL_METHOD *, TLS_method, (void))                                          \
    X(SSL_CTX *, SSL_CTX_new, (const SSL_METHOD *))                                    \
    X(void, SSL_CTX_free, (SSL_CTX *))                                                 \
    X(long, SSL_CTX_ctrl, (SSL_CTX *, int command, long number, void *pointer))        \
    X(uint64_t, SSL_CTX_set_options, (SSL_CTX *, uint64_t))                            \
    X(int, SSL_CTX_set_ciphersuites, (SSL_CTX *, const char *))                        \
    X(int, SSL_CTX_set_num_tickets, (SSL_CTX *, size_t))                               \
    X(void, SSL_CTX_set_msg_callback, (SSL_CTX *, message_fn))                         \
    X(void, SSL_CTX_set_verify, (SSL_CTX *, int mode, verify_fn))                      \
    X(void, SSL_CTX_set_verify_depth, (SSL_CTX *, int depth))                          \
    X(void, SSL_CTX_set_security_level, (SSL_CTX *, int level))                        \
    X(int, SSL_CTX_use_certificate, (SSL_CTX *, X509 *))                               \
    X(int, SSL_CTX_use_PrivateKey, (SSL_CTX *, EVP_PKEY *))                            \
    X(X509_STORE *, SSL_CTX_get_cert_store, (const SSL_CTX *))                         \
    X(void, SSL_CTX_set_psk_find_session_callback, (SSL_CTX *, psk_find_fn))           \
    X(void, SSL_CTX_set_psk_use_session_callback, (SSL_CTX *, psk_use_fn))             \
    X(SSL *, SSL_new, (SSL_CTX *))                                                     \
    X(X509 *, SSL_get1_peer_certificate, (const SSL *))                                \
    X(int, SSL_get_ex_data_X509_STORE_CTX_idx, (void))                                 \
    X(void, SSL_free, (SSL *))                                                         \
    X(int, SSL_set_ex_data, (SSL *, int index, void *data))                            \
    X(void *, SSL_get_ex_data, (const SSL *, int index))                               \
    X(void, SSL_set_accept_state, (SSL *))                                             \
    X(void, SSL_set_connect_state, (SSL *))                                            \
    X(void, SSL_set_bio, (SSL *, BIO * read, BIO * write))                             \
    X(int, SSL_do_handshake, (SSL *))                                                  \
    X(int, SSL_read_ex, (SSL *, void *to, size_t room, size_t *size_out))              \
    X(int, SSL_write_ex, (SSL *, const void *data, size_t size, size_t *size_out))     \
    X(int, SSL_key_update, (SSL *, int kind))                                          \
    X(int, SSL_get_error, (const SSL *, int result))                                   \
    X(int, SSL_has_pending, (const SSL *))                                             \
    X(int, SSL_session_reused, (const SSL *))                                          \
    X(int, SSL_export_keying_material,                                                 \
      (SSL *, unsigned char *out, size_t size, const char *label, size_t label_size,   \
       const unsigned char *context, size_t context_size, int use_context))            \
    X(const SSL_CIPHER *, SSL_CIPHER_find, (SSL *, const unsigned char *number))       \
    X(SSL_SESSION *, SSL_SESSION_new, (void))                                          \
    X(void, SSL_SESSION_free, (SSL_SESSION *))                                         \
    X(int, SSL_SESSION_set1_master_key,                                                \
      (SSL_SESSION *, const unsigned char *key, size_t size))                          \
    X(int, SSL_SESSION_set_cipher, (SSL_SESSION *, const SSL_CIPHER *))                \
    X(int, SSL_SESSION_set_protocol_version, (SSL_SESSION *, int version))             \
    X(void *, X509_STORE_CTX_get_ex_data, (const X509_STORE_CTX *, int index))         \
    X(int, X509_STORE_CTX_get_error, (const X509_STORE_CTX *))                         \
    X(int, X509_STORE_CTX_get_error_depth, (const X509_STORE_CTX *))                   \
    X(void, X509_STORE_CTX_set_error, (X509_STORE_CTX *, int code))                    \
    X(X509 *, X509_STORE_CTX_get0_cert, (const X509_STORE_CTX *))                      \
    X(const char *, X509_verify_cert_error_string, (long code))                        \
    X(int, X509_STORE_add_cert, (X509_STORE *, X509 *))                                \
    X(void *, X509_get_ext_d2i, (const X509 *, int which, int *critical, int *index))  \
    X(const ASN1_STRING *, X509_get0_notBefore, (const X509 *))                        \
    X(const ASN1_STRING *, X509_get0_notAfter, (const X509 *))                         \
    X(int, X509_cmp_current_time, (const ASN1_STRING *))                               \
    X(void, X509_free, (X509 *))                                                       \
    X(void, EVP_PKEY_free, (EVP_PKEY *))                                               \
    X(int, OPENSSL_sk_num, (const OPENSSL_STACK *))                                    \
    X(void *, OPENSSL_sk_value, (const OPENSSL_STACK *, int index))                    \
    X(void, GENERAL_NAMES_free, (OPENSSL_STACK *))                                     \
    X(void *, GENERAL_NAME_get0_value, (const GENERAL_NAME *, int *type))              \
    X(const unsigned char *, ASN1_STRING_get0_data, (const ASN1_STRING *))             \
    X(int, ASN1_STRING_length, (const ASN1_STRING *))                                  \
    X(X509 *, PEM_read_bio_X509, (BIO *, X509 **, password_fn, void *cookie))          \
    X(EVP_PKEY *, PEM_read_bio_PrivateKey,                                             \
      (BIO *, EVP_PKEY **, password_fn, void *cookie))                                 \
    X(BIO *, BIO_new_socket, (int fd, int closes))                                     \
    X(long, BIO_ctrl, (BIO *, int command, long number, void *pointer))                \
    X(BIO *, BIO_new_mem_buf, (const void *data, int size))                            \
    X(int, BIO_free, (BIO *))                                                          \
    X(BIO_METHOD *, BIO_meth_new, (int type, const char *name))                        \
    X(int, BIO_meth_set_write, (BIO_METHOD *, bio_write_fn))                           \
    X(int, BIO_meth_set_read, (BIO_METHOD *, bio_read_fn))                             \
    X(int, BIO_meth_set_ctrl, (BIO_METHOD *, bio_ctrl_fn))                             \
    X(void, BIO_meth_free, (BIO_METHOD *))                                             \
    X(int, BIO_get_new_index, (void))                                                  \
    X(BIO *, BIO_new, (const BIO_METHOD *))                                            \
    X(void, BIO_set_data, (BIO *, void *data))                                         \
    X(void *, BIO_get_data, (BIO *))                                                   \
    X(void, BIO_set_init, (BIO *, int init))                                           \
    X(void, BIO_set_flags, (BIO *, int flags))                                         \
    X(void, BIO_clear_flags, (BIO *, int flags))                                       \
    X(void, ERR_clear_error, (void))                                                   \
    X(unsigned long, ERR_get_error, (void))                                            \
    X(unsigned long, ERR_peek_last_error, (void))                                      \
    X(const char *, ERR_reason_error_string, (unsigned long))                          \
    X(const EVP_MD *, EVP_sha256, (void))                                              \
    X(unsigned char *, HMAC,                                                           \
      (const EVP_MD *, const void *key, int key_size, const unsigned char *data,       \
       size_t size, unsigned char *out, unsigned int *out_size))

typedef struct openssl {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration */
#define X(type, name, parameters) type(*name) parameters;
    OPENSSL_FUNCTIONS(X)
#undef X
} openssl;

/**
 * The process's one OpenSSL: libssl.so.3, or what FANIN_OPENSSL_LIBRARY names. Loaded by the first
 * call, and never unloaded. *@p out is the process's. Thread: any.
 * FANIN_ERR_UNSUPPORTED: there is none that can be used; says why and what to install.
 * FANIN_ERR_FORKED: the parent was loading it, or a thread of its was between openssl_enter() and
 * openssl_leave(). FANIN_ERR_MEMORY.
 */
fanin_status openssl_load(const openssl **out, fanin_error *error);
/** The same for OpenSSL's callbacks: it has been loaded. */
const openssl *openssl_of_callback(void);

/** Around all that may take locks of OpenSSL's, which is all but data that goes by a connection: a
    child that is forked meanwhile has those for ever. Forgets what openssl_fault() is to tell of.
    Thread: any. */
void openssl_enter(const openssl *o);
void openssl_leave(void);

#define OPENSSL_REASON(code) ((code)&0x7fffff)
/** ERR_R_MALLOC_FAILURE */
#define OPENSSL_NO_MEMORY 0xc0100ul
/** OpenSSL's number of why what this thread did in it has failed: the first one, for what comes
    then follows from it; OPENSSL_NO_MEMORY if memory was lacking anywhere, whatever else OpenSSL
    makes of that, or it fails and does not say why. 0: it says nothing. Asked once: it is
    forgotten. */
unsigned long openssl_fault(const openssl *o);
/** Whether OpenSSL or malloc() says that memory was lacking: of a failure that has a reason of its
    own. Asked once. */
bool openssl_lacks_memory(const openssl *o);

#endif
