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

/* Declared, and never linked to: each is a member of the table of the same type. */
unsigned long OpenSSL_version_num(void);
const char *OpenSSL_version(int what);
int OPENSSL_init_ssl(uint64_t options, const void *settings);
const SSL_METHOD *TLS_method(void);
SSL_CTX *SSL_CTX_new(const SSL_METHOD *);
void SSL_CTX_free(SSL_CTX *);
long SSL_CTX_ctrl(SSL_CTX *, int command, long number, void *pointer);
uint64_t SSL_CTX_set_options(SSL_CTX *, uint64_t);
int SSL_CTX_set_ciphersuites(SSL_CTX *, const char *);
int SSL_CTX_set_num_tickets(SSL_CTX *, size_t);
void SSL_CTX_set_msg_callback(SSL_CTX *, void (*)(int is_sent, int version, int type,
                                                  const void *, size_t, SSL *, void *));
void SSL_CTX_set_verify(SSL_CTX *, int mode, verify_fn);
void SSL_CTX_set_verify_depth(SSL_CTX *, int depth);
void SSL_CTX_set_security_level(SSL_CTX *, int level);
int SSL_CTX_use_certificate(SSL_CTX *, X509 *);
int SSL_CTX_use_PrivateKey(SSL_CTX *, EVP_PKEY *);
X509_STORE *SSL_CTX_get_cert_store(const SSL_CTX *);
void SSL_CTX_set_psk_find_session_callback(SSL_CTX *, psk_find_fn);
void SSL_CTX_set_psk_use_session_callback(SSL_CTX *, psk_use_fn);
SSL *SSL_new(SSL_CTX *);
X509 *SSL_get1_peer_certificate(const SSL *);
int SSL_get_ex_data_X509_STORE_CTX_idx(void);
void SSL_free(SSL *);
int SSL_set_ex_data(SSL *, int index, void *data);
void *SSL_get_ex_data(const SSL *, int index);
void SSL_set_accept_state(SSL *);
void SSL_set_connect_state(SSL *);
void SSL_set_bio(SSL *, BIO *read, BIO *write);
int SSL_do_handshake(SSL *);
int SSL_read_ex(SSL *, void *to, size_t room, size_t *size_out);
int SSL_write_ex(SSL *, const void *data, size_t size, size_t *size_out);
int SSL_key_update(SSL *, int kind);
int SSL_get_error(const SSL *, int result);
int SSL_has_pending(const SSL *);
int SSL_session_reused(const SSL *);
int SSL_export_keying_material(SSL *, unsigned char *out, size_t size,
                               const char *label, size_t label_size,
                               const unsigned char *context, size_t context_size,
                               int use_context);
const SSL_CIPHER *SSL_CIPHER_find(SSL *, const unsigned char *number);
SSL_SESSION *SSL_SESSION_new(void);
void SSL_SESSION_free(SSL_SESSION *);
int SSL_SESSION_set1_master_key(SSL_SESSION *, const unsigned char *key, size_t size);
int SSL_SESSION_set_cipher(SSL_SESSION *, const SSL_CIPHER *);
int SSL_SESSION_set_protocol_version(SSL_SESSION *, int version);
void *X509_STORE_CTX_get_ex_data(const X509_STORE_CTX *, int index);
int X509_STORE_CTX_get_error(const X509_STORE_CTX *);
int X509_STORE_CTX_get_error_depth(const X509_STORE_CTX *);
void X509_STORE_CTX_set_error(X509_STORE_CTX *, int code);
X509 *X509_STORE_CTX_get0_cert(const X509_STORE_CTX *);
const char *X509_verify_cert_error_string(long code);
int X509_STORE_add_cert(X509_STORE *, X509 *);
void *X509_get_ext_d2i(const X509 *, int which, int *critical, int *index);
const ASN1_STRING *X509_get0_notBefore(const X509 *);
const ASN1_STRING *X509_get0_notAfter(const X509 *);
int X509_cmp_current_time(const ASN1_STRING *);
void X509_free(X509 *);
void EVP_PKEY_free(EVP_PKEY *);
int OPENSSL_sk_num(const OPENSSL_STACK *);
void *OPENSSL_sk_value(const OPENSSL_STACK *, int index);
void GENERAL_NAMES_free(OPENSSL_STACK *);
void *GENERAL_NAME_get0_value(const GENERAL_NAME *, int *type);
const unsigned char *ASN1_STRING_get0_data(const ASN1_STRING *);
int ASN1_STRING_length(const ASN1_STRING *);
X509 *PEM_read_bio_X509(BIO *, X509 **, password_fn, void *cookie);
EVP_PKEY *PEM_read_bio_PrivateKey(BIO *, EVP_PKEY **, password_fn, void *cookie);
BIO *BIO_new_socket(int fd, int closes);
long BIO_ctrl(BIO *, int command, long number, void *pointer);
BIO *BIO_new_mem_buf(const void *data, int size);
int BIO_free(BIO *);
BIO_METHOD *BIO_meth_new(int type, const char *name);
int BIO_meth_set_write(BIO_METHOD *, bio_write_fn);
int BIO_meth_set_read(BIO_METHOD *, bio_read_fn);
int BIO_meth_set_ctrl(BIO_METHOD *, bio_ctrl_fn);
void BIO_meth_free(BIO_METHOD *);
int BIO_get_new_index(void);
BIO *BIO_new(const BIO_METHOD *);
void BIO_set_data(BIO *, void *data);
void *BIO_get_data(BIO *);
void BIO_set_init(BIO *, int init);
void BIO_set_flags(BIO *, int flags);
void BIO_clear_flags(BIO *, int flags);
void ERR_clear_error(void);
unsigned long ERR_get_error(void);
unsigned long ERR_peek_last_error(void);
const char *ERR_reason_error_string(unsigned long);
const EVP_MD *EVP_sha256(void);
unsigned char *HMAC(const EVP_MD *, const void *key, int key_size,
                    const unsigned char *data, size_t size, unsigned char *out,
                    unsigned int *out_size);

#define OPENSSL_FUNCTIONS(X)                                                           \
    X(OpenSSL_version_num)                                                             \
    X(OpenSSL_version)                                                                 \
    X(OPENSSL_init_ssl)                                                                \
    X(TLS_method)                                                                      \
    X(SSL_CTX_new)                                                                     \
    X(SSL_CTX_free)                                                                    \
    X(SSL_CTX_ctrl)                                                                    \
    X(SSL_CTX_set_options)                                                             \
    X(SSL_CTX_set_ciphersuites)                                                        \
    X(SSL_CTX_set_num_tickets)                                                         \
    X(SSL_CTX_set_msg_callback)                                                        \
    X(SSL_CTX_set_verify)                                                              \
    X(SSL_CTX_set_verify_depth)                                                        \
    X(SSL_CTX_set_security_level)                                                      \
    X(SSL_CTX_use_certificate)                                                         \
    X(SSL_CTX_use_PrivateKey)                                                          \
    X(SSL_CTX_get_cert_store)                                                          \
    X(SSL_CTX_set_psk_find_session_callback)                                           \
    X(SSL_CTX_set_psk_use_session_callback)                                            \
    X(SSL_new)                                                                         \
    X(SSL_get1_peer_certificate)                                                       \
    X(SSL_get_ex_data_X509_STORE_CTX_idx)                                              \
    X(SSL_free)                                                                        \
    X(SSL_set_ex_data)                                                                 \
    X(SSL_get_ex_data)                                                                 \
    X(SSL_set_accept_state)                                                            \
    X(SSL_set_connect_state)                                                           \
    X(SSL_set_bio)                                                                     \
    X(SSL_do_handshake)                                                                \
    X(SSL_read_ex)                                                                     \
    X(SSL_write_ex)                                                                    \
    X(SSL_key_update)                                                                  \
    X(SSL_get_error)                                                                   \
    X(SSL_has_pending)                                                                 \
    X(SSL_session_reused)                                                              \
    X(SSL_export_keying_material)                                                      \
    X(SSL_CIPHER_find)                                                                 \
    X(SSL_SESSION_new)                                                                 \
    X(SSL_SESSION_free)                                                                \
    X(SSL_SESSION_set1_master_key)                                                     \
    X(SSL_SESSION_set_cipher)                                                          \
    X(SSL_SESSION_set_protocol_version)                                                \
    X(X509_STORE_CTX_get_ex_data)                                                      \
    X(X509_STORE_CTX_get_error)                                                        \
    X(X509_STORE_CTX_get_error_depth)                                                  \
    X(X509_STORE_CTX_set_error)                                                        \
    X(X509_STORE_CTX_get0_cert)                                                        \
    X(X509_verify_cert_error_string)                                                   \
    X(X509_STORE_add_cert)                                                             \
    X(X509_get_ext_d2i)                                                                \
    X(X509_get0_notBefore)                                                             \
    X(X509_get0_notAfter)                                                              \
    X(X509_cmp_current_time)                                                           \
    X(X509_free)                                                                       \
    X(EVP_PKEY_free)                                                                   \
    X(OPENSSL_sk_num)                                                                  \
    X(OPENSSL_sk_value)                                                                \
    X(GENERAL_NAMES_free)                                                              \
    X(GENERAL_NAME_get0_value)                                                         \
    X(ASN1_STRING_get0_data)                                                           \
    X(ASN1_STRING_length)                                                              \
    X(PEM_read_bio_X509)                                                               \
    X(PEM_read_bio_PrivateKey)                                                         \
    X(BIO_new_socket)                                                                  \
    X(BIO_ctrl)                                                                        \
    X(BIO_new_mem_buf)                                                                 \
    X(BIO_free)                                                                        \
    X(BIO_meth_new)                                                                    \
    X(BIO_meth_set_write)                                                              \
    X(BIO_meth_set_read)                                                               \
    X(BIO_meth_set_ctrl)                                                               \
    X(BIO_meth_free)                                                                   \
    X(BIO_get_new_index)                                                               \
    X(BIO_new)                                                                         \
    X(BIO_set_data)                                                                    \
    X(BIO_get_data)                                                                    \
    X(BIO_set_init)                                                                    \
    X(BIO_set_flags)                                                                   \
    X(BIO_clear_flags)                                                                 \
    X(ERR_clear_error)                                                                 \
    X(ERR_get_error)                                                                   \
    X(ERR_peek_last_error)                                                             \
    X(ERR_reason_error_string)                                                         \
    X(EVP_sha256)                                                                      \
    X(HMAC)

typedef struct openssl {
#define X(name) __typeof__(&(name)) name; /* NOLINT(bugprone-macro-parentheses) */
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
