/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and distances of machines that are not there. */
#include "sysfs_tree.h"
#include "testing.h"
#include "topology.h"

#include <limits.h>

typedef struct machine {
    char root[256];
    topology *t;
} machine;

static machine read_machine(void (*make)(const char *root))
{
    machine m;
    make(sysfs_tree_make(m.root));
    assert_int_equal(topology_read(m.root, &m.t, NULL), FANIN_OK);
    return m;
}

static void drop(machine *m)
{
    topology_free(&m->t);
    assert_null(m->t);
    sysfs_tree_remove(m->root);
}

static const topology_nic *nic_named(const machine *m, const char *name)
{
    for (size_t i = 0; i < m->t->n_nics; i++)
        if (strcmp(m->t->nics[i].name, name) == 0)
            return &m->t->nics[i];
    fail_msg("no NIC %s", name);
    return NULL;
}

TEST(a_dgx_is_read_whole)
{
    machine m = read_machine(sysfs_tree_dgx);
    assert_int_equal(m.t->n_gpus, 8);
    assert_int_equal(m.t->n_nics, 12);
    assert_int_equal(m.t->numa_nodes, 2);
    assert_true(m.t->has_peer_memory);
    assert_int_equal(m.t->iommus, 0);
    assert_string_equal(m.t->nics[0].name, "mlx5_0");
    assert_string_equal(m.t->nics[2].name, "mlx5_2"); /* not mlx5_10 */
    assert_string_equal(m.t->nics[11].name, "mlx5_11");
    const topology_nic *nic = nic_named(&m, "mlx5_10");
    assert_string_equal(nic->place.pci, "0000:ce:00.0");
    assert_int_equal(nic->place.numa, 1);
    assert_int_equal(nic->n_ports, 1);
    assert_int_equal(nic->ports[0].state, 4);
    assert_int_equal((int)nic->ports[0].gbps, 400);
    assert_false(nic->ports[0].is_ethernet);
    assert_true(nic_named(&m, "mlx5_7")->ports[0].is_ethernet);
    drop(&m);
}

TEST(distances_are_those_of_the_tree)
{
    machine m = read_machine(sysfs_tree_dgx);
    const topology_gpu *first = topology_gpu_at(m.t, "00000000:1B:00.0");
    const topology_gpu *last = topology_gpu_at(m.t, "0000:df:00.0");
    assert_non_null(first);
    assert_non_null(last);
    assert_null(topology_gpu_at(m.t, "0000:18:00.0"));
    assert_null(topology_gpu_at(m.t, "nonsense"));
    const topology_place *near = &nic_named(&m, "mlx5_0")->place;
    assert_int_equal(topology_between(&first->place, &first->place), DISTANCE_SELF);
    assert_int_equal(topology_between(&first->place, near), DISTANCE_SWITCH);
    assert_int_equal(topology_between(near, &first->place), DISTANCE_SWITCH);
    assert_int_equal(topology_between(&first->place, &nic_named(&m, "mlx5_3")->place),
                     DISTANCE_NODE);
    assert_int_equal(topology_between(&last->place, near), DISTANCE_SYSTEM);
    assert_string_equal(topology_distance_name(DISTANCE_SWITCH), "PIX");
    assert_string_equal(topology_distance_name(DISTANCE_SYSTEM), "SYS");
    char bridges[8][16];
    assert_int_equal(topology_bridges(near, bridges, 8), 3);
    assert_string_equal(bridges[2], "0000:15:01.0");
    assert_string_equal(bridges[1], "0000:16:00.0");
    drop(&m);
}

static topology_distance between(const char *a, const char *b)
{
    topology_place x = {.numa = 0}, y = {.numa = 0};
    snprintf(x.path, sizeof x.path, "%s", a);
    snprintf(y.path, sizeof y.path, "%s", b);
    return topology_between(&x, &y);
}

TEST(a_common_prefix_ends_at_a_slash)
{
    assert_int_equal(between("pci0000:00/0000:00:05.0", "pci0000:00/0000:00:06.0"),
                     DISTANCE_HOST);
    assert_int_equal(between("pci0000:0/0000:00:05.0", "pci0000:00/0000:00:05.0"),
                     DISTANCE_NODE);
    assert_int_equal(between("pci0000:00/0000:00:01.0/0000:01:00.0",
                             "pci0000:00/0000:00:01.0/0000:01:00.1"),
                     DISTANCE_SWITCH);
    assert_int_equal(
        between("pci0000:00/0000:00:01.0/a/b/c/d/e", "pci0000:00/0000:00:01.0/a/x/y"),
        DISTANCE_BRIDGE);
    assert_int_equal(between("", "pci0000:00/0000:00:01.0"), DISTANCE_NODE);
}

TEST(ports_are_chosen_near_then_fast_then_first)
{
    char name[TOPOLOGY_NAME + 8];
    machine m = read_machine(sysfs_tree_dgx);
    const topology_gpu *gpu = topology_gpu_at(m.t, "0000:c3:00.0");
    assert_true(topology_choose_port(m.t, &gpu->place, name));
    assert_string_equal(name, "mlx5_9:1");
    assert_true(topology_choose_port(m.t, NULL, name));
    assert_string_equal(name, "mlx5_0:1");
    const topology_place *storage =
        &nic_named(&m, "mlx5_1")->place; /* its sibling is down */
    assert_true(topology_choose_port(m.t, storage, name));
    assert_string_equal(name, "mlx5_1:1");
    drop(&m);
}

TEST(a_cloud_machine_is_flat)
{
    char name[TOPOLOGY_NAME + 8];
    machine m = read_machine(sysfs_tree_cloud);
    assert_int_equal(m.t->n_gpus, 2);
    assert_int_equal(m.t->n_nics, 1);
    assert_int_equal(m.t->iommus, 1);
    assert_false(m.t->has_peer_memory);
    assert_int_equal(topology_between(&m.t->gpus[0].place, &m.t->nics[0].place),
                     DISTANCE_HOST);
    assert_int_equal(m.t->gpus[0].place.numa, -1);
    assert_true(topology_choose_port(m.t, &m.t->gpus[1].place, name));
    assert_string_equal(name, "mlx5_0:1");
    drop(&m);
}

TEST(a_laptop_has_nothing)
{
    char name[TOPOLOGY_NAME + 8];
    machine m = read_machine(sysfs_tree_laptop);
    assert_int_equal(m.t->n_gpus, 0);
    assert_int_equal(m.t->n_nics, 0);
    assert_false(topology_choose_port(m.t, NULL, name));
    drop(&m);
}

TEST(soft_roce_hangs_nowhere)
{
    char root[256], name[TOPOLOGY_NAME + 8];
    topology *t;
    sysfs_tree_nic(sysfs_tree_make(root), "rxe0", NULL, 2.5, 4, "Ethernet");
    assert_int_equal(topology_read(root, &t, NULL), FANIN_OK);
    assert_string_equal(t->nics[0].place.pci, "");
    assert_int_equal(t->nics[0].place.numa, -1);
    assert_int_equal(topology_between(&t->nics[0].place, &t->nics[0].place),
                     DISTANCE_UNKNOWN);
    assert_true(topology_choose_port(t, NULL, name));
    assert_string_equal(name, "rxe0:1");
    topology_free(&t);
    sysfs_tree_remove(root);
}

TEST(an_empty_tree_is_an_empty_machine)
{
    char root[256];
    topology *t;
    sysfs_tree_make(root);
    sysfs_tree_remove(root); /* not even there */
    assert_int_equal(topology_read(root, &t, NULL), FANIN_OK);
    assert_int_equal(t->n_gpus + t->n_nics, 0);
    topology_free(&t);
}

/* A bridge's configuration space with an ACS capability behind another one. */
static void write_config(const char *root, size_t size, unsigned control)
{
    char path[512];
    uint8_t config[4096] = {0};
    sysfs_tree_file(root, "", "bus/pci/devices/0000:16:00.0/vendor");
    snprintf(path, sizeof path, "%s/bus/pci/devices/0000:16:00.0/config", root);
    config[0x100] = 0x01; /* advanced error reporting, next at 0x148 */
    config[0x102] = 0x01;
    config[0x103] = 0x14;
    config[0x102] |= 0x80;
    config[0x148] = 0x0d;
    config[0x14a] = 0x01;
    config[0x148 + 6] = (uint8_t)control;
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(config, 1, size, file), size);
    fclose(file);
}

TEST(acs_is_read_from_configuration_space)
{
    char root[256];
    sysfs_tree_make(root);
    assert_int_equal(acs_of_bridge(root, "0000:16:00.0"), ACS_UNKNOWN);
    write_config(root, 4096, 0x1d);
    assert_int_equal(acs_of_bridge(root, "0000:16:00.0"), ACS_REDIRECTS);
    write_config(root, 4096, 0x01);
    assert_int_equal(acs_of_bridge(root, "0000:16:00.0"), ACS_OFF);
    write_config(root, 64, 0x1d); /* what others than root may read */
    assert_int_equal(acs_of_bridge(root, "0000:16:00.0"), ACS_UNKNOWN);
    sysfs_tree_remove(root);
}

/* The least of the group's and of those around it. */
TEST(a_quota_of_cpus_is_found)
{
    char root[256];
    sysfs_tree_make(root);
    assert_int_equal(cpu_quota(root, root), UINT_MAX);
    sysfs_tree_file(root, "max 100000\n", "fs/cgroup/cpu.max");
    assert_int_equal(cpu_quota(root, root), UINT_MAX);
    sysfs_tree_file(root, "9:cpu:/old\n0::/a/b\n", "self/cgroup");
    sysfs_tree_file(root, "800000 100000\n", "fs/cgroup/a/cpu.max");
    assert_int_equal(cpu_quota(root, root), 8);
    sysfs_tree_file(root, "250000 100000\n", "fs/cgroup/a/b/cpu.max");
    assert_int_equal(cpu_quota(root, root), 3);
    sysfs_tree_file(root, "100 100000\n", "fs/cgroup/a/cpu.max");
    assert_int_equal(cpu_quota(root, root), 1);
    sysfs_tree_remove(root);
    sysfs_tree_make(root); /* a container whose group has its own root */
    sysfs_tree_file(root, "0::/\n", "self/cgroup");
    sysfs_tree_file(root, "400000 100000\n", "fs/cgroup/cpu.max");
    assert_int_equal(cpu_quota(root, root), 4);
    sysfs_tree_remove(root);
}
