/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "doctor/doctor.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/interrupt.h"
#include "fetch/session.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Exit statuses; 2 is wrong usage everywhere. */
#define EXIT_WARNING 3
#define EXIT_PROBLEM 4

/* ------------------------------------------------------------------------ tables */

/* Numbers of the devices whose memory GPU @p i reads. */
static void list_reads(const doctor_facts *f, unsigned i, char *out, size_t size)
{
    out[0] = '\0';
    for (unsigned j = 0; j < f->n_gpus; j++)
        if (j != i && f->reaches[i][j])
            output_append(out, size, "%s%d", out[0] ? "," : "", f->gpus[j].device);
}

static void print_gpus(const doctor_facts *f)
{
    if (f->n_gpus == 0)
        return;
    struct libscols_table *table = output_table("GPU> NAME PCI NUMA> READS UUID");
    for (unsigned i = 0; i < f->n_gpus; i++) {
        const doctor_gpu *gpu = &f->gpus[i];
        char number[16] = "-", numa[16] = "-", reads[128];
        if (gpu->visible)
            snprintf(number, sizeof number, "%d", gpu->device);
        if (gpu->place != NULL && gpu->place->place.numa >= 0)
            snprintf(numa, sizeof numa, "%d", gpu->place->place.numa);
        list_reads(f, i, reads, sizeof reads);
        output_row(table, NULL, number, gpu->visible ? gpu->name : "hidden", gpu->pci,
                   numa, reads[0] ? reads : "-", gpu->uuid);
    }
    output_print(table);
    printf("\n");
}

static const char *distance_of(const topology_nic *nic, const doctor_gpu *gpu)
{
    return topology_distance_name(topology_between(&nic->place, &gpu->place->place));
}

static const char *link_of(const topology_port *port)
{
    return port->is_ethernet ? "RoCE" : "InfiniBand";
}

static void print_nics(const doctor_facts *f)
{
    if (f->topology->n_nics == 0)
        return;
    struct libscols_table *table = output_table("PORT LINK Gb/s> STATE NUMA> GPUS");
    for (size_t i = 0; i < f->topology->n_nics; i++) {
        const topology_nic *nic = &f->topology->nics[i];
        char numa[16], gpus[256] = "";
        snprintf(numa, sizeof numa, "%d", nic->place.numa);
        for (unsigned j = 0; j < f->n_gpus; j++) {
            if (f->gpus[j].place != NULL)
                output_append(gpus, sizeof gpus, "%s%s", gpus[0] ? " " : "",
                              distance_of(nic, &f->gpus[j]));
        }
        for (unsigned j = 0; j < nic->n_ports; j++) {
            const topology_port *p = &nic->ports[j];
            char port[48], rate[16];
            snprintf(port, sizeof port, "%s:%u", nic->name, p->number);
            snprintf(rate, sizeof rate, "%.0f", p->gbps);
            output_row(table, NULL, port, link_of(p), rate,
                       p->state == TOPOLOGY_ACTIVE ? "active" : "down",
                       nic->place.numa >= 0 ? numa : "-", gpus[0] ? gpus : "-");
        }
    }
    output_print(table);
    printf("\n");
}

static void print_findings(const doctor_report *report, bool quiet)
{
    for (unsigned i = 0; i < report->n; i++) {
        const doctor_finding *f = &report->findings[i];
        if (quiet && f->level < DOCTOR_WARNING)
            continue;
        terminal_print("%-8s %s: %s", doctor_level_name(f->level), f->subject, f->text);
        if (f->remedy[0] != '\0' && f->level > DOCTOR_GOOD)
            terminal_print("         -> %s", f->remedy);
    }
}

/* -------------------------------------------------------------------------- JSON */

static json_t *json_of_gpus(const doctor_facts *f)
{
    json_t *list = json_array();
    for (unsigned i = 0; i < f->n_gpus; i++) {
        const doctor_gpu *gpu = &f->gpus[i];
        json_t *reads = json_array();
        for (unsigned j = 0; j < f->n_gpus; j++)
            if (j != i && f->reaches[i][j])
                json_array_append_new(reads, json_integer(f->gpus[j].device));
        json_array_append_new(
            list, output_object("device", output_rank(gpu->visible ? gpu->device : -1),
                                "name", output_string(gpu->name), "pci",
                                output_string(gpu->pci), "uuid",
                                output_string(gpu->uuid), "numa",
                                json_integer(gpu->place ? gpu->place->place.numa : -1),
                                "reads", reads, NULL));
    }
    return list;
}

static json_t *json_of_nics(const doctor_facts *f)
{
    json_t *list = json_array();
    for (size_t i = 0; i < f->topology->n_nics; i++) {
        const topology_nic *nic = &f->topology->nics[i];
        json_t *ports = json_array(), *distances = json_object();
        for (unsigned j = 0; j < nic->n_ports; j++) {
            const topology_port *p = &nic->ports[j];
            json_array_append_new(ports, json_pack("{s:i, s:b, s:f, s:s}", "port",
                                                   (int)p->number, "active",
                                                   p->state == TOPOLOGY_ACTIVE, "gbps",
                                                   p->gbps, "link", link_of(p)));
        }
        for (unsigned j = 0; j < f->n_gpus; j++) {
            if (f->gpus[j].place != NULL)
                output_set(distances, f->gpus[j].pci,
                           output_string(distance_of(nic, &f->gpus[j])), NULL);
        }
        json_array_append_new(list,
                              output_object("name", output_string(nic->name), "pci",
                                            output_string(nic->place.pci), "numa",
                                            json_integer(nic->place.numa), "ports",
                                            ports, "gpus", distances, NULL));
    }
    return list;
}

static void doctor_print_json(const doctor_facts *f, const doctor_report *report)
{
    json_t *findings = json_array();
    for (unsigned i = 0; i < report->n; i++) {
        const doctor_finding *one = &report->findings[i];
        json_array_append_new(
            findings,
            output_object("level", output_string(doctor_level_name(one->level)),
                          "subject", output_string(one->subject), "text",
                          output_string(one->text), "remedy",
                          output_string(one->remedy), NULL));
    }
    output_json(output_object(
        "worst", output_string(doctor_level_name(doctor_worst(report))), "ucx_version",
        output_string(f->ucx_version), "cuda_version", output_string(f->cuda_version),
        "gpus", json_of_gpus(f), "nics", json_of_nics(f), "findings", findings, NULL));
}

/* ----------------------------------------------------------------------- command */

typedef struct doctor_line {
    invocation line;
    char *sysfs, *procfs, *dev;
} doctor_line;

/* Connects as far as that goes: what does not answer is a finding. */
static int ask_trainer(const command *self, doctor_line *d, const char *where,
                       const doctor_facts *facts, doctor_report *report)
{
    session s = {0};
    fanin_error error = FANIN_ERROR_INIT;
    doctor_ranks ranks;
    int code = session_start(&s, self, &d->line, where, NULL);
    if (code == 0) {
        fanin_status status = session_try(&s, &error);
        fanin_error asked = FANIN_ERROR_INIT;
        fanin_status answer =
            doctor_ask(s.client, facts, session_left_ms(&s), &ranks, &asked);
        if (ranks.addresses > 0)
            doctor_judge_ranks(facts, &ranks, report);
        if (status == FANIN_OK) {
            status = answer;
            error = asked;
        }
        if (status != FANIN_OK && (ranks.answered > 0 || ranks.addresses == 0))
            doctor_add(report, DOCTOR_PROBLEM, "trainer", error.remedy, "%s",
                       error.message);
    }
    session_end(&s);
    if (code == 0 && interrupt_requested()) {
        failure_warn("interrupted");
        code = interrupt_exit_code();
    }
    return code;
}

/* A tree that an option names must be there: else nothing would be found, in silence. */
static int check_tree(const char *option, const char *path)
{
    struct stat st;
    errno = 0;
    if (path == NULL || (stat(path, &st) == 0 && S_ISDIR(st.st_mode)))
        return 0;
    return failure_local("cannot look at this host", FANIN_ERR_NOT_FOUND,
                         "give a directory", "%s %s: %s", option, path,
                         strerror(errno != 0 ? errno : ENOTDIR));
}

/* Without a TARGET nobody is asked, whatever an option says of it. */
static int doctor_check_idle(const command *self, const arguments *parsed)
{
    static const char asking[] = "world-size path no-unix no-ucx timeout "
                                 "no-checksums threads streams server-name "
                                 "expect-world-id trust-containers "
                                 "trust-other-users secret-file tls-cert tls-key "
                                 "tls-ca trace";
    if (options_given(parsed, "run") != NULL)
        return failure_usage(self->name,
                             "--run: 'nixl-fetch status' tells what a run is at");
    const char *given = parsed->count == 0 ? options_given(parsed, asking) : NULL;
    return given != NULL ? failure_usage(self->name, "--%s needs a TARGET", given) : 0;
}

static int doctor_examine(const command *self, doctor_line *d)
{
    doctor_facts facts;
    doctor_report *report = output_require(calloc(1, sizeof *report));
    fanin_error error = FANIN_ERROR_INIT;
    const common_options *common = &d->line.common;
    doctor_roots roots = {.sys = d->sysfs ? d->sysfs : "/sys",
                          .proc = d->procfs ? d->procfs : "/proc",
                          .dev = d->dev ? d->dev : "/dev",
                          .drivers = d->sysfs == NULL};
    if (doctor_gather(&roots, &facts, &error) != FANIN_OK) {
        free(report);
        return failure_local("cannot look at this host", FANIN_ERR_MEMORY,
                             "free memory", "out of memory");
    }
    doctor_judge(&facts, report);
    int code = 0;
    if (d->line.parsed.count > 0) {
        const char *trace = d->line.connect.trace;
        code = session_trace_start(trace);
        if (code == 0) {
            code = ask_trainer(self, d, d->line.parsed.positional[0], &facts, report);
            code = session_trace_stop(trace, code);
        }
    }
    if (code == 0) {
        if (common->json) {
            doctor_print_json(&facts, report);
        } else {
            if (!common->quiet) {
                print_gpus(&facts);
                print_nics(&facts);
            }
            print_findings(report, common->quiet);
        }
        doctor_level worst = doctor_worst(report);
        code = worst == DOCTOR_PROBLEM   ? EXIT_PROBLEM
               : worst == DOCTOR_WARNING ? EXIT_WARNING
                                         : 0;
    }
    doctor_facts_free(&facts);
    free(report);
    return code;
}

static int doctor_run(const command *self, int argc, const char **argv)
{
    doctor_line d = {.line.common.timeout_ms = 3000};
    struct poptOption table[] = {
        {"sysfs", '\0', POPT_ARG_STRING, &d.sysfs, 0,
         "look at this tree instead of /sys, and load no drivers", "DIR"},
        {"procfs", '\0', POPT_ARG_STRING, &d.procfs, 0, "this instead of /proc", "DIR"},
        {"dev", '\0', POPT_ARG_STRING, &d.dev, 0, "this instead of /dev", "DIR"},
        SESSION_TABLE(&d.line),
        POPT_TABLEEND,
    };
    int code;
    if (session_parse(self, &d.line, argc, argv, table, &code)) {
        if (d.line.parsed.count > 1) {
            code = failure_usage(self->name, "one TARGET at most");
        } else {
            code = doctor_check_idle(self, &d.line.parsed);
            code = code != 0 ? code : check_tree("--sysfs", d.sysfs);
            code = code != 0 ? code : check_tree("--procfs", d.procfs);
            code = code != 0 ? code : check_tree("--dev", d.dev);
            code = code != 0 ? code : doctor_examine(self, &d);
        }
    }
    options_free(&d.line.parsed);
    return code;
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch doctor\n"
    "  nixl-fetch doctor nixl_info.json\n"
    "  nixl-fetch doctor HOST:PORT,HOST:PORT --secret-file launch.secret\n"
    "  nixl-fetch doctor --json\n"
    "\n"
    "Tells in plain words which paths this host can use and what stands in the way.\n"
    "Exit status 0: nothing worse than a note, 3: warnings, 4: problems.";

const command cmd_doctor = {
    .name = "doctor",
    .arguments = "[TARGET] [OPTION...]",
    .summary = "look at this host: GPUs, RDMA, limits, and a trainer",
    .help = help,
    .run = doctor_run,
};
