/* SPDX-License-Identifier: Apache-2.0 */
/* OpenSSL's AES-128-GCM, loaded as the library loads it. */
#include "bench/bench.h"
#include "fetch/output.h"
#include "fetch/progress.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { RECORD = 16 << 10, NONCE = 12, KEY = 16, ROUNDS = 5, MAX_THREADS = 64 };

typedef struct cipher_context cipher_context; /* EVP_CIPHER_CTX */

static struct {
    const void *(*cipher)(void);
    cipher_context *(*make)(void);
    void (*drop)(cipher_context *);
    int (*init)(cipher_context *, const void *cipher, void *engine, const uint8_t *key,
                const uint8_t *nonce);
    int (*update)(cipher_context *, uint8_t *to, int *size_out, const uint8_t *from,
                  int size);
} evp;

/* NULL, or why there is none. */
static const char *load(void)
{
    const char *named = getenv("FANIN_OPENSSL_LIBRARY");
    void *handle = dlopen(named != NULL ? named : "libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        return "OpenSSL 3 cannot be loaded";
    }
    const struct {
        const char *name;
        void *to;
    } functions[] = {
        {"EVP_aes_128_gcm", &evp.cipher},   {"EVP_CIPHER_CTX_new", &evp.make},
        {"EVP_CIPHER_CTX_free", &evp.drop}, {"EVP_EncryptInit_ex", &evp.init},
        {"EVP_EncryptUpdate", &evp.update},
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *function = dlsym(handle, functions[i].name);
        if (function == NULL) {
            return "OpenSSL has no AES-128-GCM";
        }
        memcpy(functions[i].to, &function, sizeof function);
    }
    return NULL;
}

typedef struct worker {
    uint64_t bytes;
    bool failed;
} worker;

/* Records of 16 KiB each, as TLS has them, of what the CPU's caches hold. */
static void *encrypt(void *cookie)
{
    static const uint8_t key[KEY], nonce[NONCE];
    worker *w = cookie;
    int made = 0;
    uint8_t *from = output_require(calloc(2, RECORD));
    uint8_t *to = from + RECORD;
    cipher_context *c = evp.make();
    w->failed = c == NULL || evp.init(c, evp.cipher(), NULL, key, nonce) != 1;
    for (uint64_t left = w->bytes; left > 0 && !w->failed;) {
        uint64_t step = left < RECORD ? left : RECORD;
        w->failed = evp.init(c, NULL, NULL, NULL, nonce) != 1 ||
                    evp.update(c, to, &made, from, (int)step) != 1;
        left -= step;
    }
    evp.drop(c);
    free(from);
    return NULL;
}

/* False: there is no thread to be had, or OpenSSL fails. */
static bool encrypt_once(uint64_t bytes, uint32_t threads)
{
    worker workers[MAX_THREADS] = {0};
    pthread_t handles[MAX_THREADS];
    bool good = true;
    uint32_t started = 1;
    for (uint32_t t = 0; t < threads; t++) {
        workers[t].bytes = bytes * (t + 1) / threads - bytes * t / threads;
    }
    for (; started < threads && good; started += good) {
        good = pthread_create(&handles[started], NULL, encrypt, &workers[started]) == 0;
    }
    encrypt(&workers[0]);
    for (uint32_t t = 1; t < started; t++) {
        pthread_join(handles[t], NULL);
    }
    for (uint32_t t = 0; t < started; t++) {
        good = good && !workers[t].failed;
    }
    return good;
}

void bench_cipher(bench_limits *limits, uint64_t bytes, uint32_t threads)
{
    uint64_t times[ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "AES-128-GCM of one end");
    const char *problem = load();
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    limit->threads = threads;
    limit->bytes = bytes;
    for (uint32_t round = 0; round < ROUNDS && problem == NULL; round++) {
        uint64_t start = progress_now_ns();
        problem = encrypt_once(bytes, threads) ? NULL : "OpenSSL's cipher fails";
        times[round] = progress_now_ns() - start;
    }
    bench_limit_end(limit, times, ROUNDS, problem);
}
