/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A publication's epochs where clients of this host read them themselves, by the kernel, instead of
 * asking whether a lease still stands (PROTOCOL.md, "Words"). Each word belongs to one name for the
 * server's life and only grows.
 */
#ifndef WORDS_H
#define WORDS_H

#include <stdatomic.h>
#include <stdint.h>

/** Changed with the server's lock held; other processes read them at any moment. */
typedef struct epoch_words {
    atomic_uint_fast64_t at[2];
    unsigned current; /**< of what is published; the other is that of the copy before */
} epoch_words;

/** A copy of @p incarnation for clients that read this process: a forked child, which may get the
    rank's number when that has died, and has its words, lacks this page. NULL: there is none to be
    had. */
uint8_t *witness_make(const uint8_t incarnation[16]);
/** Also of a child, which does not have it. */
void witness_free(uint8_t **witness);

/** What is published stands under @p epoch, above all numbers so far. */
void words_stand(epoch_words *w, uint64_t epoch);
/** What was published until now goes on standing beside what follows. */
void words_keep(epoch_words *w);
/** The copy before does not stand any more: nobody has a lease of @p odd. What its readers must not
    see may be written after the return. */
void words_turn_previous(epoch_words *w, uint64_t odd);
/** The same of both. */
void words_turn(epoch_words *w, uint64_t odd);
/** Where the word of what is published lies in this process. */
uint64_t words_address(const epoch_words *w);

#endif
