/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/options.h"
#include "fetch/output.h"

#include "gpu.h"
#include "ucx.h"

#include <fcntl.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/** The commit that this was built from, or "unknown". */
extern const char *const version_revision;

static void print_ucx(void)
{
    ucx *u = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    if (ucx_load(NULL, &u, &why) == FANIN_OK)
        terminal_print("UCX %s (%s)", ucx_version(u), ucx_library_path(u));
    else
        terminal_print("UCX none: %s", why.message);
    ucx_unload(&u);
}

static void print_cuda(void)
{
    gpu *g = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    if (gpu_load(NULL, &g, &why) == FANIN_OK)
        terminal_print("CUDA driver for %s", gpu_driver_version(g));
    else
        terminal_print("CUDA none: %s", why.message);
}

/* What --version says. */
static void version_print(void)
{
    terminal_print("nixl-fetch %d.%d.%d (libfanin %s)", FANIN_VERSION_MAJOR,
                   FANIN_VERSION_MINOR, FANIN_VERSION_PATCH, fanin_version());
    terminal_print("revision %s", version_revision);
    terminal_print("protocol %d", FANIN_PROTOCOL_VERSION);
    print_ucx();
    print_cuda();
}

static const char *const intro =
    "nixl-fetch looks at, pulls and measures LoRA adapters and whole models that "
    "trainer\n"
    "ranks serve.\n"
    "\n"
    "Examples:\n"
    "  nixl-fetch list 10.0.0.1:6000 --world-size 8\n"
    "  nixl-fetch pull nixl_info.json --run 0 --out /dev/shm/me/adapter\n"
    "  nixl-fetch serve --model llama-3.1-8b --r 16 --world-size 8 --base-port 6000\n"
    "\n"
    "Usage: nixl-fetch COMMAND [ARGUMENT...] [OPTION...]\n"
    "\n"
    "Commands:\n";

static const char *const outro =
    "\n"
    "A TARGET is HOST:PORT[,HOST:PORT...], HOST:BASEPORT with --world-size N, or the\n"
    "path of a nixl_info.json or of its directory; without one, NIXL_FETCH_SERVERS or\n"
    "FANIN_TRAINER from the environment.\n"
    "'nixl-fetch COMMAND --help' tells a command's options, nixl-fetch(1) all of it.\n";

static const command *const commands[] = {
    &cmd_list,   &cmd_show,   &cmd_ping,  &cmd_pull,     &cmd_verify,
    &cmd_watch,  &cmd_status, &cmd_top,   &cmd_exporter, &cmd_diff,
    &cmd_bundle, &cmd_map,    &cmd_serve, &cmd_bench,    &cmd_doctor,
    &cmd_secret, &cmd_trace,  &cmd_relay, NULL,
};

static void main_print_help(FILE *stream)
{
    fputs(intro, stream);
    for (size_t i = 0; commands[i] != NULL; i++)
        fprintf(stream, "  %-8s %s\n", commands[i]->name, commands[i]->summary);
    fputs(outro, stream);
}

static int main_unknown(const char *word)
{
    const char *names[sizeof commands / sizeof commands[0]] = {NULL};
    for (size_t i = 0; commands[i] != NULL; i++)
        names[i] = commands[i]->name;
    const char *nearest = options_nearest(word, names);
    if (nearest != NULL)
        return failure_usage(NULL, "unknown command '%s', did you mean '%s'?", word,
                             nearest);
    return failure_usage(NULL, "unknown command '%s'", word);
}

static int main_dispatch(const char *name, int argc, char **argv)
{
    const command *found = command_find(commands, name);
    bool completion = strcmp(name, "__complete") == 0;
    if (found == NULL && !completion) {
        options_expect_json(argc, (const char *const *)argv);
        return main_unknown(name);
    }
    char title[64];
    const char **words = output_require(calloc((size_t)argc + 1, sizeof *words));
    snprintf(title, sizeof title, "nixl-fetch %s", name);
    words[0] = title;
    for (int i = 1; i < argc; i++)
        words[i] = argv[i];
    int code =
        completion ? complete(commands, argc, words) : found->run(found, argc, words);
    free(words);
    return failure_of_output(code);
}

/* A world of ranks needs more descriptors than many shells allow at first. */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

/* A closed descriptor must not become a socket that output is written to; what is opened in
   its place refuses output. */
static void occupy_standard_descriptors(void)
{
    for (int descriptor = open("/dev/null", O_RDONLY); descriptor >= 0;
         descriptor = open("/dev/null", O_RDONLY)) {
        if (descriptor > STDERR_FILENO) {
            close(descriptor);
            return;
        }
    }
}

int main(int argc, char **argv)
{
    occupy_standard_descriptors();
    setlocale(LC_CTYPE, "");
    raise_descriptor_limit();
    if (argc < 2) {
        main_print_help(stderr);
        return EXIT_USAGE;
    }
    const char *word = argv[1];
    bool help = strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 ||
                strcmp(word, "help") == 0;
    if (strcmp(word, "--version") == 0 || strcmp(word, "-V") == 0) {
        version_print();
        return failure_of_output(0);
    }
    if (help && argc == 2) {
        main_print_help(stdout);
        return failure_of_output(0);
    }
    if (help) { /* help COMMAND is COMMAND --help */
        static char option[] = "--help";
        argv[1] = option;
        word = argv[2];
        argv[2] = option;
    }
    if (word[0] == '-')
        return failure_usage(NULL, "unknown option '%s' before a command", word);
    return main_dispatch(word, argc - 1, argv + 1);
}
