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

static void admit(patient *p, void (*machine)(const char *root))
{
    memset(p, 0, sizeof *p);
    sysfs_tree_make(p->root);
    snprintf(p->sys, sizeof p->sys, "%s/sys", p->root);
    snprintf(p->proc, sizeof p->proc, "%s/proc", p->root);
    snprintf(p->dev, sizeof p->dev, "%s/dev", p->root);
    machine(p->sys);
    sysfs_tree_file(p->root, "0", "proc/sys/kernel/yama/ptrace_scope");
    sysfs_tree_file(p->root, "32768\t60999", "proc/sys/net/ipv4/ip_local_port_range");
    sysfs_tree_file(p->root, "", "dev/shm/x");
}

static void examine(patient *p)
{
    doctor_roots roots = {
        .sys = p->sys, .proc = p->proc, .dev = p->dev, .drivers = false};
    assert_int_equal(doctor_gather(&roots, &p->facts, NULL), FANIN_OK);
    /* Of this machine, not of that one. */
    p->facts.memlock = p->facts.memlock_most = DOCTOR_UNLIMITED;
    p->facts.descriptors = p->facts.descriptors_most = 1 << 20;
    p->facts.shm_size = p->facts.shm_free = (uint64_t)64 << 30;
    p->facts.is_container = false;
}

static void judge(patient *p)
{
    memset(&p->report, 0, sizeof p->report);
    doctor_judge(&p->facts, &p->report);
}

static void discharge(patient *p)
{
    doctor_facts_free(&p->facts);
    sysfs_tree_remove(p->root);
}

/* The finding of that level whose text or remedy holds @p words; fails without one. */
static const doctor_finding *finding(const patient *p, doctor_level level,
                                     const char *words)
{
    for (unsigned i = 0; i < p->report.n; i++) {
        const doctor_finding *f = &p->report.findings[i];
        if (f->level == level && (strstr(f->text, words) || strstr(f->remedy, words)))
            return f;
    }
    for (unsigned i = 0; i < p->report.n; i++)
        print_message("%s: %s: %s -> %s\n",
                      doctor_level_name(p->report.findings[i].level),
                      p->report.findings[i].subject, p->report.findings[i].text,
                      p->report.findings[i].remedy);
    fail_msg("no %s with \"%s\"", doctor_level_name(level), words);
    return NULL;
}

/* As a driver for CUDA 13 would have told. */
static void add_cuda(patient *p)
{
    p->facts.cuda_found = true;
    snprintf(p->facts.cuda_version, sizeof p->facts.cuda_version, "13.0");
    for (unsigned i = 0; i < p->facts.n_gpus; i++) {
        p->facts.gpus[i].visible = true;
        p->facts.gpus[i].device = (int)i;
        for (unsigned j = 0; j < p->facts.n_gpus; j++)
            p->facts.reaches[i][j] = true;
    }
}

static void add_ucx(patient *p, bool verbs, bool cuda)
{
    p->facts.ucx_found = true;
    snprintf(p->facts.ucx_version, sizeof p->facts.ucx_version, "1.22.0");
    p->facts.ucx_has_verbs = verbs;
    p->facts.ucx_has_cuda = cuda;
}

TEST(a_healthy_dgx_has_no_warnings)
{
    patient p;
    admit(&p, sysfs_tree_dgx);
    sysfs_tree_file(p.root, "", "dev/infiniband/uverbs0");
    examine(&p);
    assert_int_equal(p.facts.n_gpus, 8);
    assert_true(p.facts.has_uverbs);
    assert_int_equal(p.facts.ptrace_scope, 0);
    assert_int_equal(p.facts.ports_high, 60999);
    add_cuda(&p);
    add_ucx(&p, true, true);
    judge(&p);
    assert_true(doctor_worst(&p.report) <= DOCTOR_NOTE);
    finding(&p, DOCTOR_GOOD, "GPU 0000:1b:00.0: nearest is mlx5_0 (PIX)");
    finding(&p, DOCTOR_GOOD, "mlx5_11:1 InfiniBand, 400 Gb/s");
    finding(&p, DOCTOR_GOOD, "nvidia_peermem");
    finding(&p, DOCTOR_NOTE, "mlx5_2 has no active port");
    discharge(&p);
}

TEST(a_dgx_in_a_bare_container)
{
    patient p;
    admit(&p, sysfs_tree_dgx);
    examine(&p);
    p.facts.is_container = true;
    p.facts.memlock = 65536;
    p.facts.shm_size = (uint64_t)64 << 20;
    judge(&p);
    assert_int_equal(doctor_worst(&p.report), DOCTOR_PROBLEM);
    finding(&p, DOCTOR_PROBLEM, "--device=/dev/infiniband");
    finding(&p, DOCTOR_PROBLEM, "--ulimit memlock=-1");
    finding(&p, DOCTOR_PROBLEM, "--gpus all");
    finding(&p, DOCTOR_WARNING, "--shm-size");
    finding(&p, DOCTOR_WARNING, "libucx0");
    discharge(&p);
}

TEST(a_full_dev_shm_is_told)
{
    patient p;
    admit(&p, sysfs_tree_laptop);
    examine(&p);
    p.facts.shm_free = 0;
    judge(&p);
    finding(&p, DOCTOR_WARNING, "/dev/shm has only 0 B of 68.7 GB free");
    discharge(&p);
}

TEST(missing_modules_are_named)
{
    patient p;
    admit(&p, sysfs_tree_dgx);
    sysfs_tree_file(p.root, "", "dev/infiniband/uverbs0");
    examine(&p);
    add_cuda(&p);
    add_ucx(&p, false, true);
    judge(&p);
    finding(&p, DOCTOR_WARNING, "libuct_ib");
    add_ucx(&p, true, false);
    judge(&p);
    finding(&p, DOCTOR_WARNING, "libuct_cuda");
    discharge(&p);
}

TEST(a_cloud_machine)
{
    patient p;
    admit(&p, sysfs_tree_cloud);
    sysfs_tree_file(p.root, "", "dev/infiniband/uverbs0");
    examine(&p);
    add_cuda(&p);
    add_ucx(&p, true, true);
    p.facts.reaches[0][1] = false;
    p.facts.ports_low = 1024;
    judge(&p);
    finding(&p, DOCTOR_WARNING, "GPUs 0 and 1 cannot read each other's memory");
    finding(&p, DOCTOR_WARNING, "nvidia_peermem, or the open kernel modules");
    finding(&p, DOCTOR_NOTE, "iommu=pt");
    finding(&p, DOCTOR_NOTE, "ip_local_reserved_ports");
    p.facts.verbs[0].dma_buf = VERBS_YES;
    judge(&p);
    finding(&p, DOCTOR_GOOD, "dma-buf");
    snprintf(p.facts.acs_bridge, sizeof p.facts.acs_bridge, "0000:00:01.0");
    judge(&p);
    finding(&p, DOCTOR_WARNING, "0000:00:01.0");
    discharge(&p);
}

TEST(a_laptop_is_fine_for_trying_it)
{
    patient p;
    admit(&p, sysfs_tree_laptop);
    examine(&p);
    judge(&p);
    assert_true(doctor_worst(&p.report) <= DOCTOR_NOTE);
    finding(&p, DOCTOR_NOTE, "no RDMA device");
    p.facts.ptrace_scope = 2;
    judge(&p);
    finding(&p, DOCTOR_WARNING, "kernel.yama.ptrace_scope is 2");
    discharge(&p);
}

TEST(hidden_gpus_are_told)
{
    patient p;
    admit(&p, sysfs_tree_cloud);
    examine(&p);
    add_cuda(&p);
    p.facts.gpus[1].visible = false;
    judge(&p);
    finding(&p, DOCTOR_NOTE, "1 of the host's 2 GPUs are hidden");
    discharge(&p);
}

TEST(ranks_are_compared)
{
    patient p;
    admit(&p, sysfs_tree_laptop);
    examine(&p);
    add_ucx(&p, true, true);
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
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    finding(&p, DOCTOR_PROBLEM,
            "2 of 8 ranks do not answer (the first is 10.0.0.1:6003)");
    finding(&p, DOCTOR_PROBLEM, "firewall");
    finding(&p, DOCTOR_PROBLEM, "10.0.0.1:6007");
    finding(&p, DOCTOR_WARNING, "rank 4 has UCX 1.16.0, this host 1.22.0");
    finding(&p, DOCTOR_NOTE, "rank 1 runs fanin 9.9.9");
    p.report.n = 0;
    ranks = (doctor_ranks){.addresses = 2,
                           .answered = 1,
                           .others = 1,
                           .others_why = "speaks protocol versions 7 to 7",
                           .ucx_rank = -1,
                           .software_rank = -1};
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    finding(&p, DOCTOR_PROBLEM,
            "1 of 2 ranks are of another release: speaks protocol versions 7 to 7");
    discharge(&p);
}

/* That is how they are meant to be, whatever is installed there. */
TEST(open_ranks_are_not_told_to_install_ucx)
{
    patient p;
    admit(&p, sysfs_tree_laptop);
    examine(&p);
    add_ucx(&p, true, true);
    p.report.n = 0;
    doctor_ranks ranks = {
        .addresses = 8, .answered = 8, .ucx_rank = 0, .software_rank = -1};
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    finding(&p, DOCTOR_NOTE, "rank 0 offers no path through UCX, as open servers do");
    for (unsigned i = 0; i < p.report.n; i++) {
        assert_null(strstr(p.report.findings[i].remedy, "install the same"));
        assert_true(p.report.findings[i].level < DOCTOR_WARNING);
    }
    discharge(&p);
}

TEST(ranks_that_hang_or_hold_nothing_are_told)
{
    patient p;
    admit(&p, sysfs_tree_laptop);
    examine(&p);
    doctor_ranks ranks = {.addresses = 4,
                          .answered = 4,
                          .ucx_rank = -1,
                          .software_rank = -1,
                          .stuck = 1,
                          .stuck_rank = 2,
                          .stuck_ms = 64000,
                          .stuck_name = "lora:0",
                          .stuck_state = "writing",
                          .empty = 1,
                          .empty_rank = 3};
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    finding(&p, DOCTOR_PROBLEM, "rank 2 has been writing lora:0 for 64 s");
    finding(&p, DOCTOR_PROBLEM, "rank 3 publishes nothing, others do (1 of 4 ranks)");
    p.report.n = 0;
    ranks.stuck = 0;
    ranks.empty = 4;
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    finding(&p, DOCTOR_WARNING, "nothing is published: none of the 4 ranks");
    p.report.n = 0;
    ranks.empty = 0;
    snprintf(ranks.run, sizeof ranks.run, "lora:a");
    ranks.lacking = ranks.lacking_rank = 1;
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    finding(&p, DOCTOR_PROBLEM, "rank 1 does not publish lora:a, others do");
    p.report.n = 0;
    ranks.is_one_whole = true;
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    finding(&p, DOCTOR_WARNING, "rank 1 does not publish lora:a, others do");
    p.report.n = 0;
    ranks.lacking = 4;
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    finding(&p, DOCTOR_PROBLEM, "no rank publishes lora:a");
    p.report.n = 0;
    ranks.lacking = 0;
    doctor_judge_ranks(&p.facts, &ranks, &p.report);
    assert_int_equal(doctor_worst(&p.report), DOCTOR_GOOD);
    discharge(&p);
}

TEST(the_report_is_bounded)
{
    doctor_report report = {.n = 0};
    for (int i = 0; i < 2 * DOCTOR_FINDINGS; i++)
        doctor_add(&report, DOCTOR_NOTE, "many", NULL, "%d", i);
    assert_int_equal(report.n, DOCTOR_FINDINGS);
}

TEST(few_open_files_are_few_connections)
{
    patient p;
    admit(&p, sysfs_tree_dgx);
    examine(&p);
    p.facts.descriptors_most = 4096;
    judge(&p);
    finding(&p, DOCTOR_NOTE, "some 3968 connections");
    finding(&p, DOCTOR_NOTE, "a hard limit of 5248");
    p.facts.descriptors_most = 5248;
    judge(&p);
    for (unsigned i = 0; i < p.report.n; i++)
        assert_string_not_equal(p.report.findings[i].subject, "connections");
    discharge(&p);
}

TEST(few_descriptors_are_few_ranks)
{
    patient p;
    admit(&p, sysfs_tree_dgx);
    examine(&p);
    p.facts.descriptors = 64;
    judge(&p);
    finding(&p, DOCTOR_NOTE, "the limit is 64: enough for 8 ranks");
    p.facts.descriptors = 40;
    judge(&p);
    finding(&p, DOCTOR_NOTE, "the limit is 40: enough for 0 ranks");
    discharge(&p);
}
