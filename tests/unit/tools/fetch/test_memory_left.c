/* SPDX-License-Identifier: Apache-2.0 */
/* The least of what a host and its cgroups have left, on machines that are not there. */
#include "fetch/memory_left.h"
#include "sysfs_tree.h"
#include "testing.h"

static void has_left(const char *root, uint64_t bytes, const char *who)
{
    memory_left left = memory_left_find(root, root);
    assert_string_equal(left.who, who);
    assert_int_equal(left.bytes, bytes);
}

static const char *make_host(char room[256], const char *groups)
{
    const char *root = sysfs_tree_make(room);
    sysfs_tree_file(root, "MemTotal: 9000 kB\nMemAvailable:    4000 kB", "meminfo");
    sysfs_tree_file(root, groups, "self/cgroup");
    return root;
}

TEST(the_host_without_limits)
{
    char room[256];
    const char *root = make_host(room, "0::/a");
    has_left(root, 4000 * 1024, "this host");
    sysfs_tree_file(root, "max", "fs/cgroup/a/memory.max");
    sysfs_tree_file(root, "77", "fs/cgroup/a/memory.current");
    has_left(root, 4000 * 1024, "this host");
    sysfs_tree_remove(root);
}

TEST(version_2_counts_groups_above_and_gives_the_cache_back)
{
    char room[256];
    const char *root = make_host(room, "1:cpu:/x\n0::/a/b");
    sysfs_tree_file(root, "900000", "fs/cgroup/a/memory.max");
    sysfs_tree_file(root, "500000", "fs/cgroup/a/memory.current");
    sysfs_tree_file(root, "anon 1\nactive_file 30000\ninactive_file 70000",
                    "fs/cgroup/a/memory.stat");
    sysfs_tree_file(root, "max", "fs/cgroup/a/b/memory.max");
    has_left(root, 500000, "the cgroup /a");
    sysfs_tree_file(root, "200000", "fs/cgroup/a/b/memory.high");
    sysfs_tree_file(root, "150000", "fs/cgroup/a/b/memory.current");
    has_left(root, 50000, "the cgroup /a/b");
    sysfs_tree_file(root, "250000", "fs/cgroup/a/b/memory.current");
    has_left(root, 0, "the cgroup /a/b");
    sysfs_tree_remove(root);
}

TEST(a_container_that_sees_its_group_at_the_top)
{
    char room[256];
    const char *root = make_host(room, "0::/");
    sysfs_tree_file(root, "900000", "fs/cgroup/memory.max");
    has_left(root, 900000, "the cgroup /");
    sysfs_tree_file(root, "7:pids:/p\n4:cpuset,memory:/kubepods/x", "self/cgroup");
    has_left(root, 4000 * 1024, "this host");
    sysfs_tree_file(root, "800000", "fs/cgroup/memory/memory.limit_in_bytes");
    sysfs_tree_file(root, "300000", "fs/cgroup/memory/memory.usage_in_bytes");
    sysfs_tree_file(root, "total_inactive_file 100000", "fs/cgroup/memory/memory.stat");
    has_left(root, 600000, "the cgroup /");
    sysfs_tree_remove(root);
}

TEST(what_is_no_number_limits_nothing)
{
    char room[256];
    const char *root = make_host(room, "\n0:\nmemory\n4:memory:a\n0::/a");
    sysfs_tree_file(root, "-", "fs/cgroup/a/memory.max");
    has_left(root, 4000 * 1024, "this host");
    sysfs_tree_file(root, "", "meminfo");
    assert_true(memory_left_find(root, root).bytes > INT64_MAX);
    sysfs_tree_remove(root);
}
