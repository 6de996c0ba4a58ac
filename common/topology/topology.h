/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * RDMA devices and GPUs of this host and how far they are from each other, as sysfs tells:
 * the PCI tree and NUMA nodes. Loads no driver; the root of sysfs is a parameter.
 */
#ifndef TOPOLOGY_H
#define TOPOLOGY_H

#include <fanin/types.h>
#include <stdbool.h>

/* Access Control Services of PCIe bridges: whether traffic between devices is sent up. */

typedef enum acs_state {
    ACS_UNKNOWN, /**< configuration space cannot be read whole (needs root) */
    ACS_OFF,
    ACS_REDIRECTS, /**< requests or completions between devices go through the root */
} acs_state;

/** The bridge at @p pci below @p sysfs ("/sys"). PCI Express Base Specification, "ACS Extended
    Capability". */
acs_state acs_of_bridge(const char *sysfs, const char *pci);

/* The CPU time that a container or a service is given. */

/** How many CPUs' time this process may take by cpu.max of its control group (version 2) and of
    those around it, rounded up; UINT_MAX: no limit is known. @p proc, @p sys: "/proc", "/sys". */
unsigned cpu_quota(const char *proc, const char *sys);

#define TOPOLOGY_NAME 32
#define TOPOLOGY_PATH 320
#define TOPOLOGY_PORTS 4 /**< of one device */

/** Where a device hangs. */
typedef struct topology_place {
    char pci[16]; /**< "0000:1b:00.0"; "": no PCI device (soft-RoCE, say) */
    char path
        [TOPOLOGY_PATH]; /**< below the devices folder: "pci0000:15/0000:15:01.0/..." */
    int numa;            /**< -1: unknown */
} topology_place;

#define TOPOLOGY_ACTIVE 4 /**< a port's state */

typedef struct topology_port {
    unsigned number;
    int state; /**< InfiniBand Architecture, PortState: TOPOLOGY_ACTIVE, 1: down, ... */
    double gbps;                   /**< 0: unknown */
    bool is_ethernet;              /**< RoCE; else InfiniBand */
    char interface[TOPOLOGY_NAME]; /**< network interface of the first GID, "": none */
} topology_port;

typedef struct topology_nic {
    char name[TOPOLOGY_NAME]; /**< "mlx5_0" */
    topology_place place;
    topology_port ports[TOPOLOGY_PORTS];
    unsigned n_ports;
} topology_nic;

typedef struct topology_gpu {
    topology_place place;
} topology_gpu;

typedef struct topology {
    topology_nic *nics; /**< ascending by name, numbers in names as numbers */
    size_t n_nics;
    topology_gpu *gpus; /**< NVIDIA's, ascending by PCI address */
    size_t n_gpus;
    bool has_peer_memory; /**< nvidia_peermem or nv_peer_mem is loaded */
    unsigned iommus;      /**< DMA remapping units in use */
    unsigned numa_nodes;
} topology;

/** Reads below @p sysfs ("/sys"). What is absent is left out; nothing found is no error.
    FANIN_ERR_MEMORY. */
fanin_status topology_read(const char *sysfs, topology **out, fanin_error *error);
void topology_free(topology **t);

/** Whether a port of it is active. */
bool topology_is_active(const topology_nic *nic);

/** Nearest first; the words of `nvidia-smi topo -m` for them are in topology_distance_name(). */
typedef enum topology_distance {
    DISTANCE_SELF,   /**< the same device */
    DISTANCE_SWITCH, /**< PIX: at most one PCIe switch */
    DISTANCE_BRIDGE, /**< PXB: several switches, no host bridge */
    DISTANCE_HOST,   /**< PHB: one host bridge */
    DISTANCE_NODE,   /**< NODE: one NUMA node */
    DISTANCE_SYSTEM, /**< SYS: between NUMA nodes */
    DISTANCE_UNKNOWN,
} topology_distance;
topology_distance topology_between(const topology_place *a, const topology_place *b);
const char *topology_distance_name(topology_distance distance); /**< "PIX" */

/** The bridges of @p place, from the device to the root: writes at most @p most PCI addresses;
    how many there are. */
size_t topology_bridges(const topology_place *place, char (*pci)[16], size_t most);

/** The GPU with that PCI address in any writing ("00000000:1B:00.0" too); NULL: none. */
const topology_gpu *topology_gpu_at(const topology *t, const char *pci);

/**
 * The RDMA port to use for memory at @p near (NULL: anywhere): nearest, then fastest, then the
 * first by name, so that all processes of a host choose alike. "mlx5_0:1" into @p name. False:
 * no port is active.
 */
bool topology_choose_port(const topology *t, const topology_place *near,
                          char name[TOPOLOGY_NAME + 8]);

/* What libibverbs, loaded at run time, can do with a device: may it be opened, does it take GPU
   memory as dma-buf (verbs.c). */

typedef enum verbs_answer { VERBS_UNKNOWN, VERBS_NO, VERBS_YES } verbs_answer;

typedef struct verbs_facts {
    bool built_in;         /**< built with libibverbs' headers */
    bool loaded;           /**< libibverbs.so.1 is there */
    verbs_answer can_open; /**< NO: no device file, or no permission */
    verbs_answer dma_buf;  /**< the driver registers dma-bufs */
    int open_errno;
} verbs_facts;

/** Opens the device of that name for a moment. Thread: any. */
verbs_facts verbs_probe(const char *nic);

#endif
