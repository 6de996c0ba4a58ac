/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * One end's certificate, its key, and the authorities that it believes: read from three PEM files,
 * and read anew when those change. Both ends show a certificate; who the other may be is settled
 * while hands are shaken: a reader takes ranks of its own certificate's job, a rank readers of that
 * job.
 */
#ifndef CERTIFICATES_H
#define CERTIFICATES_H

#include "pem.h"
#include "openssl.h"

typedef struct certificate_files {
    const char *cert; /**< this end's, and what leads from it to an authority */
    const char *key;  /**< this end's */
    const char *ca;   /**< the authorities */
} certificate_files;

typedef struct certificates certificates;

/**
 * The files' texts are copied. @p wanted: who this end has to be; its job is filled in by what the
 * certificate says. @p log: lives as long. Blocks as reading files does. From then on a thread of
 * its own looks at the files once a second and reads those that have changed; those that cannot be
 * used are told in the log (event "certificates"), and what was read before stays.
 * own_file_read()'s errors; FANIN_ERR_ARGUMENT: a file holds something else, or a key of another
 * certificate; FANIN_ERR_AUTH: the certificate is somebody else's, or of another time;
 * FANIN_ERR_LIMIT: no thread; FANIN_ERR_UNSUPPORTED, OpenSSL does no TLS 1.3; FANIN_ERR_MEMORY. All
 * name the file.
 */
fanin_status certificates_new(const openssl *o, const certificate_files *files,
                              const identity *wanted, const logger *log,
                              certificates **out, fanin_error *error);
/** Waits half a second at most for a look at the files that is under way: the rest is left to the
    thread, which tells nobody; and for the log, if the thread is in it. */
void certificates_free(certificates **c);

/** A connection's, by what was read last; if the files have not answered for a second, the log says
    so. NULL: no memory. Thread: any. Does not block. */
SSL *certificates_ssl(certificates *c);
/** Who this end is, and who the other has to be. */
const identity *certificates_identity(const certificates *c);

/** Whether the other end's certificate, which was believed, is good for @p wanted. */
bool certificates_peer_is(const openssl *o, const SSL *ssl, const identity *wanted);

#endif
