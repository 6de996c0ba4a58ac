/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/doctor.h"

#include "fetch/output.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
/* What a rank of a large adapter registers, and what many ranks need in descriptors. */
#define MEMLOCK_ENOUGH (8 * GIB)
#define DESCRIPTORS_ENOUGH 4096
/* As fanin_client_connect() counts: a rank's connections unless told, and what else is open. */
#define DESCRIPTORS_OF_RANK 2
#define DESCRIPTORS_BESIDES 48
/* A rank's connections by default, and what else its process has open. */
#define CONNECTIONS_MOST 5120
#define CONNECTIONS_BESIDES 128
#define SHM_ENOUGH GIB

const char *doctor_level_name(doctor_level level)
{
    static const char *const names[] = {"ok", "note", "warning", "problem"};
    return names[level];
}

void doctor_add(doctor_report *report, doctor_level level, const char *subject,
                const char *remedy, const char *format, ...)
{
    if (report->n == DOCTOR_FINDINGS)
        return;
    doctor_finding *f = &report->findings[report->n++];
    *f = (doctor_finding){.level = level, .subject = subject};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->text, sizeof f->text, format, arguments);
    va_end(arguments);
    snprintf(f->remedy, sizeof f->remedy, "%s", remedy != NULL ? remedy : "");
}

doctor_level doctor_worst(const doctor_report *report)
{
    doctor_level worst = DOCTOR_GOOD;
    for (unsigned i = 0; i < report->n; i++)
        if (report->findings[i].level > worst)
            worst = report->findings[i].level;
    return worst;
}

/* -------------------------------------------------------------- limits, settings */

static bool has_active_port(const doctor_facts *f)
{
    for (size_t i = 0; i < f->topology->n_nics; i++)
        if (topology_is_active(&f->topology->nics[i]))
            return true;
    return false;
}

static void judge_memlock(const doctor_facts *f, doctor_report *r)
{
    if (f->memlock >= MEMLOCK_ENOUGH) {
        doctor_add(r, DOCTOR_GOOD, "locked memory", NULL, "%s",
                   f->memlock == DOCTOR_UNLIMITED ? "unlimited"
                                                  : output_bytes(f->memlock).s);
        return;
    }
    doctor_add(
        r, has_active_port(f) ? DOCTOR_PROBLEM : DOCTOR_NOTE, "locked memory",
        "ulimit -l unlimited; in a container --ulimit memlock=-1, in a systemd unit "
        "LimitMEMLOCK=infinity",
        "the limit is %s: registering shards for RDMA needs as much as they are large",
        output_bytes(f->memlock).s);
}

static void judge_descriptors(const doctor_facts *f, doctor_report *r)
{
    if (f->descriptors >= DESCRIPTORS_ENOUGH) {
        doctor_add(r, DOCTOR_GOOD, "descriptors", NULL, "%" PRIu64, f->descriptors);
        return;
    }
    uint64_t left =
        f->descriptors > DESCRIPTORS_BESIDES ? f->descriptors - DESCRIPTORS_BESIDES : 0;
    char remedy[160];
    snprintf(remedy, sizeof remedy, "ulimit -n %d%s", DESCRIPTORS_ENOUGH,
             f->descriptors_most < DESCRIPTORS_ENOUGH
                 ? ", after raising the hard limit (LimitNOFILE, --ulimit nofile)"
                 : "");
    doctor_add(r, DOCTOR_NOTE, "descriptors", remedy,
               "the limit is %" PRIu64 ": enough for %" PRIu64
               " ranks, each costs two or more",
               f->descriptors, left / DESCRIPTORS_OF_RANK);
}

/* Of a trainer's rank, which takes what the hard limit leaves it. */
static void judge_connections(const doctor_facts *f, doctor_report *r)
{
    uint64_t most = f->descriptors_most,
             wanted = CONNECTIONS_MOST + CONNECTIONS_BESIDES;
    char remedy[160];
    if (most >= wanted)
        return;
    snprintf(remedy, sizeof remedy,
             "a hard limit of %" PRIu64 ": ulimit -Hn, LimitNOFILE, --ulimit nofile",
             wanted);
    doctor_add(r, DOCTOR_NOTE, "connections", remedy,
               "the hard limit of open files is %" PRIu64
               ": a trainer's rank takes some %" PRIu64
               " connections, half of them from one address; a worker needs up to 5",
               most, most > CONNECTIONS_BESIDES ? most - CONNECTIONS_BESIDES : 0);
}

static void judge_shm(const doctor_facts *f, doctor_report *r)
{
    const char *remedy =
        "give the container more: --shm-size=16g, or an emptyDir of medium "
        "Memory at /dev/shm";
    if (!f->has_shm)
        doctor_add(r, DOCTOR_WARNING, "shared memory", remedy,
                   "there is no /dev/shm: adapters are fastest written there");
    else if (f->shm_size < SHM_ENOUGH)
        doctor_add(r, DOCTOR_WARNING, "shared memory", remedy,
                   "/dev/shm holds only %s: an adapter written there will not fit",
                   output_bytes(f->shm_size).s);
    else if (f->shm_free < SHM_ENOUGH)
        doctor_add(
            r, DOCTOR_WARNING, "shared memory",
            "see what fills it (ls -l /dev/shm), remove what nobody uses",
            "/dev/shm has only %s of %s free: an adapter written there may not fit",
            output_bytes(f->shm_free).s, output_bytes(f->shm_size).s);
    else
        doctor_add(r, DOCTOR_GOOD, "shared memory", NULL, "/dev/shm: %s, %s free",
                   output_bytes(f->shm_size).s, output_bytes(f->shm_free).s);
}

static void judge_ptrace(const doctor_facts *f, doctor_report *r)
{
    if (f->ptrace_scope >= 2)
        doctor_add(
            r, DOCTOR_WARNING, "ptrace scope",
            "sysctl kernel.yama.ptrace_scope=1, or run as root, or use stream",
            "kernel.yama.ptrace_scope is %d: the path cma is closed for ordinary users",
            f->ptrace_scope);
    else
        doctor_add(r, DOCTOR_GOOD, "ptrace scope", NULL, "%s",
                   f->ptrace_scope < 0 ? "no yama: cma needs the same user only"
                   : f->ptrace_scope == 0
                       ? "0: cma works for the same user"
                       : "1: cma works, a trainer opens itself for it");
}

static void judge_ports(const doctor_facts *f, doctor_report *r)
{
    const unsigned usual = 6000;
    if (f->ports_low != 0 && f->ports_low <= usual && usual <= f->ports_high)
        doctor_add(
            r, DOCTOR_NOTE, "ports",
            "sysctl net.ipv4.ip_local_reserved_ports=6000-6511, or another base port",
            "ephemeral ports are %u to %u: a connection of another program may hold a "
            "rank's port",
            f->ports_low, f->ports_high);
}

/* -------------------------------------------------------------------------- UCX */

static void judge_ucx(const doctor_facts *f, doctor_report *r)
{
    if (!f->ucx_found) {
        doctor_add(
            r, has_active_port(f) ? DOCTOR_WARNING : DOCTOR_NOTE, "UCX",
            "install the system's libucx0 (1.16 or later) for RDMA; FANIN_UCX_LIBRARY "
            "names another one",
            "none is used (%s): the paths are stream, cma and cuda_ipc", f->ucx_why);
        return;
    }
    doctor_add(r, DOCTOR_GOOD, "UCX", NULL, "%s at %s", f->ucx_version, f->ucx_path);
    if (has_active_port(f) && !f->ucx_has_verbs)
        doctor_add(r, DOCTOR_WARNING, "UCX",
                   "use one with verbs: the system's libucx0 (1.16 or later), or one "
                   "of HPC-X, by "
                   "FANIN_UCX_LIBRARY",
                   "this host has RDMA ports and this UCX no module for them "
                   "(libuct_ib): no rdma");
    if (has_active_port(f) && f->ucx_has_verbs && f->n_gpus > 0 && !f->ucx_has_cuda)
        doctor_add(r, DOCTOR_WARNING, "UCX", "use a UCX that was built with CUDA",
                   "this UCX has no CUDA module (libuct_cuda): GPU memory goes by "
                   "stream to other "
                   "hosts");
}

/* ------------------------------------------------------------------------- RDMA */

static void judge_nic(const doctor_facts *f, size_t index, doctor_report *r)
{
    const topology_nic *nic = &f->topology->nics[index];
    const verbs_facts *v = &f->verbs[index];
    for (unsigned i = 0; i < nic->n_ports; i++) {
        const topology_port *port = &nic->ports[i];
        if (port->state != TOPOLOGY_ACTIVE)
            continue;
        doctor_add(r, DOCTOR_GOOD, "RDMA", NULL,
                   "%s:%u %s, %.0f Gb/s%s%s, NUMA node %d", nic->name, port->number,
                   port->is_ethernet ? "RoCE" : "InfiniBand", port->gbps,
                   port->interface[0] ? ", " : "", port->interface, nic->place.numa);
    }
    if (!topology_is_active(nic))
        doctor_add(r, DOCTOR_NOTE, "RDMA",
                   "check cable, switch port and subnet manager",
                   "%s has no active port", nic->name);
    else if (v->loaded && v->can_open == VERBS_NO && f->has_uverbs)
        doctor_add(r, DOCTOR_PROBLEM, "RDMA",
                   "let the user open /dev/infiniband/uverbs* (group, udev rule)",
                   "%s cannot be opened: %s", nic->name, strerror(v->open_errno));
}

static void judge_rdma(const doctor_facts *f, doctor_report *r)
{
    const topology *t = f->topology;
    if (t->n_nics == 0) {
        doctor_add(r, DOCTOR_NOTE, "RDMA", NULL,
                   "no RDMA device: other hosts are reached by stream over TCP");
        return;
    }
    for (size_t i = 0; i < t->n_nics; i++)
        judge_nic(f, i, r);
    if (!f->has_uverbs)
        doctor_add(
            r, DOCTOR_PROBLEM, "RDMA",
            f->is_container ? "start the container with --device=/dev/infiniband "
                              "(Kubernetes: an RDMA "
                              "device plugin)"
                            : "modprobe ib_uverbs",
            "the kernel has RDMA devices, but there is no /dev/infiniband/uverbs*");
}

/* ------------------------------------------------------------------------- GPUs */

static void judge_visibility(const doctor_facts *f, doctor_report *r)
{
    unsigned visible = 0;
    for (unsigned i = 0; i < f->n_gpus; i++)
        visible += f->gpus[i].visible;
    if (f->cuda_found)
        doctor_add(r, DOCTOR_GOOD, "CUDA", NULL, "driver for CUDA %s, %u GPU%s",
                   f->cuda_version, visible, visible == 1 ? "" : "s");
    else
        doctor_add(r, f->n_gpus > 0 ? DOCTOR_PROBLEM : DOCTOR_NOTE, "CUDA",
                   f->n_gpus == 0 ? NULL
                   : f->is_container
                       ? "start the container with --gpus all (NVIDIA Container "
                         "Toolkit)"
                       : "install NVIDIA's driver",
                   "GPU memory is not usable: %s", f->cuda_why);
    if (f->cuda_found && visible < f->n_gpus)
        doctor_add(r, DOCTOR_NOTE, "CUDA",
                   "give trainers and workers that share a host the same "
                   "CUDA_VISIBLE_DEVICES, or "
                   "none",
                   "%u of the host's %u GPUs are hidden from this process: it cannot "
                   "map their "
                   "memory (cuda_ipc)",
                   f->n_gpus - visible, f->n_gpus);
}

static void judge_peers(const doctor_facts *f, doctor_report *r)
{
    for (unsigned i = 0; i < f->n_gpus; i++) {
        for (unsigned j = i + 1; j < f->n_gpus; j++) {
            if (f->gpus[i].visible && f->gpus[j].visible &&
                (!f->reaches[i][j] || !f->reaches[j][i])) {
                doctor_add(
                    r, DOCTOR_WARNING, "GPU to GPU",
                    "check `nvidia-smi topo -p2p r`; ACS and an IOMMU also forbid it",
                    "GPUs %d and %d cannot read each other's memory: stream between "
                    "them",
                    f->gpus[i].device, f->gpus[j].device);
                return;
            }
        }
    }
}

/* The nearest NIC with an active port; NULL: none. */
static const topology_nic *nearest_nic(const topology *t, const topology_place *gpu,
                                       topology_distance *distance)
{
    const topology_nic *best = NULL;
    *distance = DISTANCE_UNKNOWN;
    for (size_t i = 0; i < t->n_nics; i++) {
        topology_distance d = topology_between(&t->nics[i].place, gpu);
        if (topology_is_active(&t->nics[i]) && (best == NULL || d < *distance)) {
            best = &t->nics[i];
            *distance = d;
        }
    }
    return best;
}

static void judge_distances(const doctor_facts *f, doctor_report *r)
{
    for (unsigned i = 0; i < f->n_gpus; i++) {
        const doctor_gpu *gpu = &f->gpus[i];
        topology_distance distance;
        const topology_nic *nic =
            gpu->place ? nearest_nic(f->topology, &gpu->place->place, &distance) : NULL;
        if (nic == NULL)
            continue;
        doctor_add(r, distance >= DISTANCE_SYSTEM ? DOCTOR_NOTE : DOCTOR_GOOD,
                   "GPU and NIC",
                   distance == DISTANCE_SYSTEM
                       ? "put trainers on GPUs that share a NUMA node with a NIC"
                       : NULL,
                   "GPU %s: nearest is %s (%s)", gpu->pci, nic->name,
                   topology_distance_name(distance));
    }
}

static void judge_direct(const doctor_facts *f, doctor_report *r)
{
    bool dma_buf = false;
    for (size_t i = 0; i < f->topology->n_nics; i++)
        dma_buf = dma_buf || f->verbs[i].dma_buf == VERBS_YES;
    if (f->topology->has_peer_memory || dma_buf)
        doctor_add(r, DOCTOR_GOOD, "GPUDirect RDMA", NULL, "by %s",
                   f->topology->has_peer_memory ? "nvidia_peermem" : "dma-buf");
    else
        doctor_add(r, DOCTOR_WARNING, "GPUDirect RDMA",
                   "modprobe nvidia_peermem, or the open kernel modules of the driver "
                   "on Linux "
                   "5.12 or later (dma-buf)",
                   "NICs cannot read GPU memory: it goes by stream to other hosts");
    if (f->acs_bridge[0] != '\0')
        doctor_add(r, DOCTOR_WARNING, "ACS",
                   "turn ACS off in the firmware (or with setpci) if no virtual "
                   "machines need it",
                   "the bridge %s sends traffic between devices through the root: "
                   "GPUDirect is "
                   "slow or impossible",
                   f->acs_bridge);
    if (f->topology->iommus > 0)
        doctor_add(
            r, DOCTOR_NOTE, "IOMMU", "boot with iommu=pt unless it is needed",
            "%u IOMMUs are in use: without pass-through they slow GPUDirect down",
            f->topology->iommus);
}

void doctor_judge(const doctor_facts *facts, doctor_report *report)
{
    judge_memlock(facts, report);
    judge_descriptors(facts, report);
    judge_connections(facts, report);
    judge_shm(facts, report);
    judge_ptrace(facts, report);
    judge_ports(facts, report);
    judge_ucx(facts, report);
    judge_rdma(facts, report);
    judge_visibility(facts, report);
    judge_peers(facts, report);
    if (has_active_port(facts) && facts->n_gpus > 0) {
        judge_distances(facts, report);
        judge_direct(facts, report);
    }
}
