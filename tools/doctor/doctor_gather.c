/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/doctor.h"

#include "topology.h"
#include "fetch/output.h"
#include "gpu.h"
#include "ucx.h"
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

static bool exists(const char *root, const char *name)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", root, name);
    return length > 0 && length < PATH_MAX && access(path, F_OK) == 0;
}

/* ------------------------------------------------------------ limits, settings */

static void gather_limit(int which, uint64_t *now, uint64_t *most)
{
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    (void)getrlimit(which, &limit);
    *now = limit.rlim_cur == RLIM_INFINITY ? DOCTOR_UNLIMITED : limit.rlim_cur;
    *most = limit.rlim_max == RLIM_INFINITY ? DOCTOR_UNLIMITED : limit.rlim_max;
}

/* The numbers that a file of one line begins with; how many there are. */
static int read_numbers(const char *root, const char *name, int *a, int *b)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", root, name);
    FILE *file = length > 0 && length < PATH_MAX ? fopen(path, "re") : NULL;
    if (file == NULL)
        return 0;
    int found = fscanf(file, "%d %d", a, b);
    fclose(file);
    return found < 0 ? 0 : found;
}

/* Whether a name in the folder begins with @p prefix. */
static bool has_entry(const char *folder, const char *prefix)
{
    DIR *directory = opendir(folder);
    bool found = false;
    for (struct dirent *entry;
         directory != NULL && (entry = readdir(directory)) != NULL;)
        found = found || strncmp(entry->d_name, prefix, strlen(prefix)) == 0;
    if (directory != NULL)
        closedir(directory);
    return found;
}

static void gather_settings(const doctor_roots *roots, doctor_facts *f)
{
    struct statvfs shm;
    char path[PATH_MAX];
    int low = 0, high = 0;
    gather_limit(RLIMIT_MEMLOCK, &f->memlock, &f->memlock_most);
    gather_limit(RLIMIT_NOFILE, &f->descriptors, &f->descriptors_most);
    snprintf(path, sizeof path, "%.4000s/shm", roots->dev);
    if (statvfs(path, &shm) == 0) {
        f->has_shm = true;
        f->shm_size = (uint64_t)shm.f_blocks * shm.f_frsize;
        f->shm_free = (uint64_t)shm.f_bavail * shm.f_frsize;
    }
    f->ptrace_scope = -1;
    (void)read_numbers(roots->proc, "sys/kernel/yama/ptrace_scope", &f->ptrace_scope,
                       &low);
    if (read_numbers(roots->proc, "sys/net/ipv4/ip_local_port_range", &low, &high) ==
        2) {
        f->ports_low = (unsigned)low;
        f->ports_high = (unsigned)high;
    }
    f->is_container = exists(roots->proc, "1/root/.dockerenv") ||
                      exists(roots->proc, "1/root/run/.containerenv") ||
                      getenv("KUBERNETES_SERVICE_HOST") != NULL;
    snprintf(path, sizeof path, "%.4000s/infiniband", roots->dev);
    f->has_uverbs = has_entry(path, "uverbs");
}

/* ------------------------------------------------------------------------- UCX */

static void gather_ucx(doctor_facts *f)
{
    ucx *u = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    char path[PATH_MAX];
    if (ucx_load(NULL, &u, &why) != FANIN_OK) {
        snprintf(f->ucx_why, sizeof f->ucx_why, "%s", why.message);
        return;
    }
    f->ucx_found = true;
    snprintf(f->ucx_version, sizeof f->ucx_version, "%s", ucx_version(u));
    snprintf(f->ucx_path, sizeof f->ucx_path, "%s", ucx_library_path(u));
    /* Modules lie in the folder "ucx" beside the library, with a hash in their names in wheels. */
    char *slash = realpath(f->ucx_path, path) != NULL ? strrchr(path, '/') : NULL;
    if (slash != NULL && slash + sizeof "/ucx" <= path + sizeof path) {
        memcpy(slash, "/ucx", sizeof "/ucx");
        f->ucx_has_verbs = has_entry(path, "libuct_ib");
        f->ucx_has_cuda = has_entry(path, "libuct_cuda");
    }
    ucx_unload(&u);
}

/* ------------------------------------------------------------------------ GPUs */

/* @p out is empty before. */
static void format_uuid(const uint8_t *uuid, char out[40])
{
    for (int i = 0; i < 16; i++) {
        bool dash = i == 4 || i == 6 || i == 8 || i == 10;
        output_append(out, 40, "%s%02x", dash ? "-" : "", uuid[i]);
    }
}

static void gather_visible(const gpu *g, doctor_facts *f)
{
    int count = gpu_count(g);
    for (int i = 0; i < count && f->n_gpus < DOCTOR_GPUS; i++) {
        gpu_device device;
        doctor_gpu *one = &f->gpus[f->n_gpus];
        if (gpu_device_get(g, i, &device, NULL) != FANIN_OK)
            continue;
        *one = (doctor_gpu){.visible = true, .device = i};
        snprintf(one->name, sizeof one->name, "%s", device.name);
        snprintf(one->pci, sizeof one->pci, "%s", device.pci);
        format_uuid(device.uuid, one->uuid);
        one->place = topology_gpu_at(f->topology, device.pci);
        f->n_gpus++;
    }
    for (unsigned i = 0; i < f->n_gpus; i++)
        for (unsigned j = 0; j < f->n_gpus; j++)
            f->reaches[i][j] = gpu_can_access(g, f->gpus[i].device, f->gpus[j].device);
}

/* Those that sysfs shows and CUDA does not. */
static void gather_hidden(doctor_facts *f)
{
    for (size_t i = 0; i < f->topology->n_gpus; i++) {
        const topology_gpu *place = &f->topology->gpus[i];
        bool known = false;
        for (unsigned j = 0; j < f->n_gpus; j++)
            known = known || f->gpus[j].place == place;
        if (known || f->n_gpus == DOCTOR_GPUS)
            continue;
        doctor_gpu *one = &f->gpus[f->n_gpus++];
        *one = (doctor_gpu){.device = -1, .place = place};
        snprintf(one->pci, sizeof one->pci, "%s", place->place.pci);
    }
}

static void gather_gpus(const doctor_roots *roots, doctor_facts *f)
{
    gpu *g = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    if (!roots->drivers) {
        snprintf(f->cuda_why, sizeof f->cuda_why, "not asked for");
    } else if (gpu_load(NULL, &g, &why) != FANIN_OK) {
        snprintf(f->cuda_why, sizeof f->cuda_why, "%s", why.message);
    } else {
        f->cuda_found = true;
        snprintf(f->cuda_version, sizeof f->cuda_version, "%s", gpu_driver_version(g));
        gather_visible(g, f);
    }
    gather_hidden(f);
}

/* --------------------------------------------------------------------- bridges */

static void look_at_bridges(const doctor_roots *roots, const topology_place *place,
                            doctor_facts *f)
{
    char bridges[16][16];
    size_t count = topology_bridges(place, bridges, 16);
    for (size_t i = 0; i < count && i < 16; i++) {
        acs_state state = acs_of_bridge(roots->sys, bridges[i]);
        f->acs_unknown = f->acs_unknown || state == ACS_UNKNOWN;
        if (state == ACS_REDIRECTS && f->acs_bridge[0] == '\0')
            memcpy(f->acs_bridge, bridges[i], sizeof f->acs_bridge);
    }
}

static fanin_status gather_devices(const doctor_roots *roots, doctor_facts *f,
                                   fanin_error *error)
{
    fanin_status status = topology_read(roots->sys, &f->topology, error);
    if (status != FANIN_OK)
        return status;
    const topology *t = f->topology;
    f->verbs = output_require(calloc(t->n_nics + 1, sizeof *f->verbs));
    for (size_t i = 0; i < t->n_nics; i++) {
        if (roots->drivers)
            f->verbs[i] = verbs_probe(t->nics[i].name);
        look_at_bridges(roots, &t->nics[i].place, f);
    }
    for (size_t i = 0; i < t->n_gpus; i++)
        look_at_bridges(roots, &t->gpus[i].place, f);
    return FANIN_OK;
}

fanin_status doctor_gather(const doctor_roots *roots, doctor_facts *out,
                           fanin_error *error)
{
    memset(out, 0, sizeof *out);
    gather_settings(roots, out);
    fanin_status status = gather_devices(roots, out, error);
    if (status != FANIN_OK) {
        doctor_facts_free(out);
        return status;
    }
    gather_gpus(roots, out);
    if (roots->drivers)
        gather_ucx(out);
    else
        snprintf(out->ucx_why, sizeof out->ucx_why, "not asked for");
    return FANIN_OK;
}

void doctor_facts_free(doctor_facts *facts)
{
    topology_free(&facts->topology);
    free(facts->verbs);
    facts->verbs = NULL;
}
