/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What `nixl-fetch doctor` knows about a host, and what it makes of it. Gathering and judging are
 * apart, so that the judgement is tested with facts of machines that are not there.
 */
#ifndef DOCTOR_H
#define DOCTOR_H

#include "topology.h"

#include <fanin/client.h>

#define DOCTOR_GPUS 16
#define DOCTOR_UNLIMITED UINT64_MAX

typedef struct doctor_gpu {
    char name[64], pci[16], uuid[40];
    bool visible;              /**< to CUDA in this process */
    int device;                /**< its number there */
    const topology_gpu *place; /**< NULL: sysfs does not show it */
} doctor_gpu;

typedef struct doctor_facts {
    /* limits and settings; DOCTOR_UNLIMITED */
    uint64_t memlock, memlock_most, descriptors, descriptors_most;
    bool has_shm;
    uint64_t shm_size, shm_free;
    int ptrace_scope; /**< of yama, -1: none */
    bool is_container, has_uverbs;
    unsigned ports_low, ports_high; /**< ephemeral ports; 0: unknown */

    bool ucx_found;
    char ucx_version[32], ucx_path[512], ucx_why[512];
    bool ucx_has_verbs, ucx_has_cuda;

    bool cuda_found;
    char cuda_version[32], cuda_why[512];
    doctor_gpu gpus[DOCTOR_GPUS];
    unsigned n_gpus;
    bool reaches[DOCTOR_GPUS]
                [DOCTOR_GPUS]; /**< kernels of one may read the other's memory */

    topology *topology;
    verbs_facts *verbs; /**< one a NIC */
    /** PCI address of a bridge above a GPU or a NIC that sends peer traffic up; "": none seen */
    char acs_bridge[16];
    bool acs_unknown;
} doctor_facts;

/** Where the kernel's files are; for tests they may be somewhere else. */
typedef struct doctor_roots {
    const char *sys, *proc, *dev;
    bool drivers; /**< false: load neither CUDA, UCX nor verbs */
} doctor_roots;

fanin_status doctor_gather(const doctor_roots *roots, doctor_facts *out,
                           fanin_error *error);
void doctor_facts_free(doctor_facts *facts);

typedef enum doctor_level {
    DOCTOR_GOOD,    /**< works */
    DOCTOR_NOTE,    /**< worth knowing */
    DOCTOR_WARNING, /**< a path is missing or slower than it could be */
    DOCTOR_PROBLEM, /**< what is plainly wanted here does not work */
} doctor_level;
const char *doctor_level_name(doctor_level level);

typedef struct doctor_finding {
    doctor_level level;
    const char *subject; /**< "locked memory"; static */
    char text[384], remedy[384];
} doctor_finding;

#define DOCTOR_FINDINGS 64
typedef struct doctor_report {
    doctor_finding findings[DOCTOR_FINDINGS];
    unsigned n;
} doctor_report;

/** Adds a finding; @p remedy may be NULL. */
void doctor_add(doctor_report *report, doctor_level level, const char *subject,
                const char *remedy, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
doctor_level doctor_worst(const doctor_report *report);

/** Appends what the facts mean. */
void doctor_judge(const doctor_facts *facts, doctor_report *report);

/** What was heard of the ranks of a trainer, to be compared with this host. */
typedef struct doctor_ranks {
    unsigned addresses, answered, silent, refused, barred;
    unsigned foreign, others; /**< other programs listen there; other releases */
    char silent_address[272], refused_address[272];
    /** Of the first that does not admit this reader, or is not believed; that is another program;
        that is of another release */
    char barred_why[512], foreign_why[512], others_why[512];
    char software[64], ucx_version[32]; /**< of the first rank that answered */
    int ucx_rank; /**< the first whose UCX does not fit, -1: none */
    char other_ucx[32];
    int software_rank; /**< the first with another version of the library, -1: none */
    char other_software[64];
    bool is_local; /**< all addresses are loopback */
} doctor_ranks;

/** Asks the ranks behind @p client, which has addresses, for at most @p timeout_ms. */
fanin_status doctor_ask(fanin_client *client, const doctor_facts *facts,
                        uint32_t timeout_ms, doctor_ranks *out, fanin_error *error);
void doctor_judge_ranks(const doctor_facts *facts, const doctor_ranks *ranks,
                        doctor_report *report);

#endif
