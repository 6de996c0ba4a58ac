/* SPDX-License-Identifier: Apache-2.0 */
/* What the doctor says of machines that are not there. */
#include "doctor/doctor.h"
#include "sysfs_tree.h"
#include "testing.h"

typedef struct patient {
    char root[256], sys[300], proc[300], dev[300];
    doctor_facts facts;
    doctor_report report;
} patient;

static patient p; /* of the test that runs */

static void admit(void (*machine)(const char *root))
{
    p = (patient){.report.n = 0};
    sysfs_tree_make(p.root);
    snprintf(p.sys, sizeof p.sys, "%s/sys", p.root);
    snprintf(p.proc, sizeof p.proc, "%s/proc", p.root);
    snprintf(p.dev, sizeof p.dev, "%s/dev", p.root);
    machine(p.sys);
    sysfs_tree_file(p.root, "0", "proc/sys/kernel/yama/ptrace_scope");
    sysfs_tree_file(p.root, "32768\t60999", "proc/sys/net/ipv4/ip_local_port_range");
    sysfs_tree_file(p.root, "", "dev/shm/x");
}

static void examine(void)
{
    doctor_roots roots = {.sys = p.sys, .proc = p.proc, .dev = p.dev, .drivers = false};
    assert_int_equal(doctor_gather(&roots, &p.facts, NULL), FANIN_OK);
    /* Of this machine, not of that one. */
    p.facts.memlock = p.facts.memlock_most = DOCTOR_UNLIMITED;
    p.facts.descriptors = p.facts.descriptors_most = 1 << 20;
    p.facts.shm_size = p.facts.shm_free = (uint64_t)64 << 30;
    p.facts.is_container = false;
}

static void meet(void (*machine)(const char *root))
{
    admit(machine);
    examine();
}

static void judge(void)
{
    p.report.n = 0;
    doctor_judge(&p.facts, &p.report);
}

static void judge_ranks(const doctor_ranks *ranks)
{
    p.report.n = 0;
    doctor_judge_ranks(&p.facts, ranks, &p.report);
}

static int discharge(void **state)
{
    doctor_facts_free(&p.facts);
    sysfs_tree_remove(p.root);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, discharge)

/* The finding of that level whose text or remedy holds @p words; fails without one. */
static const doctor_finding *finding(doctor_level level, const char *words)
{
    for (unsigned i = 0; i < p.report.n; i++) {
        const doctor_finding *f = &p.report.findings[i];
        if (f->level == level && (strstr(f->text, words) || strstr(f->remedy, words)))
            return f;
    }
    for (unsigned i = 0; i < p.report.n; i++)
        print_message("%s: %s: %s -> %s\n",
                      doctor_level_name(p.report.findings[i].level),
                      p.report.findings[i].subject, p.report.findings[i].text,
                      p.report.findings[i].remedy);
    fail_msg("no %s with \"%s\"", doctor_level_name(level), words);
    return NULL;
}

/* As a driver for CUDA 13 would have told. */
static void add_cuda(void)
{
    p.facts.cuda_found = true;
    snprintf(p.facts.cuda_version, sizeof p.facts.cuda_version, "13.0");
    for (unsigned i = 0; i < p.facts.n_gpus; i++) {
        p.facts.gpus[i].visible = true;
        p.facts.gpus[i].device = (int)i;
        for (unsigned j = 0; j < p.facts.n_gpus; j++)
            p.facts.reaches[i][j] = true;
    }
}

static void add_ucx(bool verbs, bool cuda)
{
    p.facts.ucx_found = true;
    snprintf(p.facts.ucx_version, sizeof p.facts.ucx_version, "1.22.0");
    p.facts.ucx_has_verbs = verbs;
    p.facts.ucx_has_cuda = cuda;
}

CASE(a_healthy_dgx_has_no_warnings)
{
    admit(sysfs_tree_dgx);
    sysfs_tree_file(p.root, "", "dev/infiniband/uverbs0");
    examine();
    assert_int_equal(p.facts.n_gpus, 8);
    assert_true(p.facts.has_uverbs);
    assert_int_equal(p.facts.ptrace_scope, 0);
    assert_int_equal(p.facts.ports_high, 60999);
    add_cuda();
    add_ucx(true, true);
    judge();
    assert_true(doctor_worst(&p.report) <= DOCTOR_NOTE);
    finding(DOCTOR_GOOD, "GPU 0000:1b:00.0: nearest is mlx5_0 (PIX)");
    finding(DOCTOR_GOOD, "mlx5_11:1 InfiniBand, 400 Gb/s");
    finding(DOCTOR_GOOD, "nvidia_peermem");
    finding(DOCTOR_NOTE, "mlx5_2 has no active port");
}

CASE(a_dgx_in_a_bare_container)
{
    meet(sysfs_tree_dgx);
    p.facts.is_container = true;
    p.facts.memlock = 65536;
    p.facts.shm_size = (uint64_t)64 << 20;
    judge();
    assert_int_equal(doctor_worst(&p.report), DOCTOR_PROBLEM);
    finding(DOCTOR_PROBLEM, "--device=/dev/infiniband");
    finding(DOCTOR_PROBLEM, "--ulimit memlock=-1");
    finding(DOCTOR_PROBLEM, "--gpus all");
    finding(DOCTOR_WARNING, "--shm-size");
    finding(DOCTOR_WARNING, "libucx0");
}

CASE(a_full_dev_shm_is_told)
{
    meet(sysfs_tree_laptop);
    p.facts.shm_free = 0;
    judge();
    finding(DOCTOR_WARNING, "/dev/shm has only 0 B of 68.7 GB free");
}

CASE(missing_modules_are_named)
{
    admit(sysfs_tree_dgx);
    sysfs_tree_file(p.root, "", "dev/infiniband/uverbs0");
    examine();
    add_cuda();
    add_ucx(false, true);
    judge();
    finding(DOCTOR_WARNING, "libuct_ib");
    add_ucx(true, false);
    judge();
    finding(DOCTOR_WARNING, "libuct_cuda");
}

CASE(a_cloud_machine)
{
    admit(sysfs_tree_cloud);
    sysfs_tree_file(p.root, "", "dev/infiniband/uverbs0");
    examine();
    add_cuda();
    add_ucx(true, true);
    p.facts.reaches[0][1] = false;
    p.facts.ports_low = 1024;
    judge();
    finding(DOCTOR_WARNING, "GPUs 0 and 1 cannot read each other's memory");
    finding(DOCTOR_WARNING, "nvidia_peermem, or the open kernel modules");
    finding(DOCTOR_NOTE, "iommu=pt");
    finding(DOCTOR_NOTE, "ip_local_reserved_ports");
    p.facts.verbs[0].dma_buf = VERBS_YES;
    judge();
    finding(DOCTOR_GOOD, "dma-buf");
    snprintf(p.facts.acs_bridge, sizeof p.facts.acs_bridge, "0000:00:01.0");
    judge();
    finding(DOCTOR_WARNING, "0000:00:01.0");
}

CASE(a_laptop_is_fine_for_trying_it)
{
    meet(sysfs_tree_laptop);
    judge();
    assert_true(doctor_worst(&p.report) <= DOCTOR_NOTE);
    finding(DOCTOR_NOTE, "no RDMA device");
    p.facts.ptrace_scope = 2;
    judge();
    finding(DOCTOR_WARNING, "kernel.yama.ptrace_scope is 2");
}

CASE(hidden_gpus_are_told)
{
    meet(sysfs_tree_cloud);
    add_cuda();
    p.facts.gpus[1].visible = false;
    judge();
    finding(DOCTOR_NOTE, "1 of the host's 2 GPUs are hidden");
}

CASE(ranks_are_compared)
{
    meet(sysfs_tree_laptop);
    add_ucx(true, true);
    doctor_ranks ranks = {.addresses = 8,
                          .answered = 5,
                          .silent = 2,
                          .refused = 1,
                          .silent_address = "10.0.0.1:6003",
                          .refused_address = "10.0.0.1:6007",
                          .ucx_rank = 4,
                          .other_ucx = "1.16.0",
                          .software_rank = 1,
                          .other_software = "fanin 9.9.9"};
    judge_ranks(&ranks);
    finding(DOCTOR_PROBLEM, "2 of 8 ranks do not answer (the first is 10.0.0.1:6003)");
    finding(DOCTOR_PROBLEM, "firewall");
    finding(DOCTOR_PROBLEM, "10.0.0.1:6007");
    finding(DOCTOR_WARNING, "rank 4 has UCX 1.16.0, this host 1.22.0");
    finding(DOCTOR_NOTE, "rank 1 runs fanin 9.9.9");
    ranks = (doctor_ranks){.addresses = 2,
                           .answered = 1,
                           .others = 1,
                           .others_why = "speaks protocol versions 7 to 7",
                           .ucx_rank = -1,
                           .software_rank = -1};
    judge_ranks(&ranks);
    finding(DOCTOR_PROBLEM,
            "1 of 2 ranks are of another release: speaks protocol versions 7 to 7");
}

/* That is how they are meant to be, whatever is installed there. */
CASE(open_ranks_are_not_told_to_install_ucx)
{
    meet(sysfs_tree_laptop);
    add_ucx(true, true);
    doctor_ranks ranks = {
        .addresses = 8, .answered = 8, .ucx_rank = 0, .software_rank = -1};
    judge_ranks(&ranks);
    finding(DOCTOR_NOTE, "rank 0 offers no path through UCX, as open servers do");
    for (unsigned i = 0; i < p.report.n; i++) {
        assert_null(strstr(p.report.findings[i].remedy, "install the same"));
        assert_true(p.report.findings[i].level < DOCTOR_WARNING);
    }
}

TEST(the_report_is_bounded)
{
    doctor_report report = {.n = 0};
    for (int i = 0; i < 2 * DOCTOR_FINDINGS; i++)
        doctor_add(&report, DOCTOR_NOTE, "many", NULL, "%d", i);
    assert_int_equal(report.n, DOCTOR_FINDINGS);
}

CASE(few_open_files_are_few_connections)
{
    meet(sysfs_tree_dgx);
    p.facts.descriptors_most = 4096;
    judge();
    finding(DOCTOR_NOTE, "some 3968 connections");
    finding(DOCTOR_NOTE, "a hard limit of 5248");
    p.facts.descriptors_most = 5248;
    judge();
    for (unsigned i = 0; i < p.report.n; i++)
        assert_string_not_equal(p.report.findings[i].subject, "connections");
}

CASE(few_descriptors_are_few_ranks)
{
    meet(sysfs_tree_dgx);
    p.facts.descriptors = 64;
    judge();
    finding(DOCTOR_NOTE, "the limit is 64: enough for 8 ranks");
    p.facts.descriptors = 40;
    judge();
    finding(DOCTOR_NOTE, "the limit is 40: enough for 0 ranks");
}
