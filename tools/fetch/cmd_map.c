/* SPDX-License-Identifier: Apache-2.0 */
/* A recorded mapping: its fields are checked here, as for pulls, and Python tells them. */
#include "fetch/failure.h"
#include "fetch/mapping_file.h"
#include "fetch/python.h"

static int map_become(const command *self, const common_options *common,
                      const char *path, const char *key)
{
    fanin_error error = FANIN_ERROR_INIT;
    mapping_file m;
    python p;
    if (mapping_read(path, &m, &error) != FANIN_OK)
        return failure_report("cannot read the mapping", &error);
    mapping_free(&m);
    python_start(&p, self, common);
    python_add(&p, path);
    python_add(&p, key);
    return python_become(&p);
}

static int run(const command *self, int argc, const char **argv)
{
    common_options common = {.timeout_ms = 1000};
    struct poptOption common_part[COMMON_OPTIONS];
    char *key = NULL;
    options_common(&common, common_part);
    struct poptOption table[] = {
        {"key", 'k', POPT_ARG_STRING, &key, 0,
         "only what takes of published tensors like PATTERN, with *, ? and [...]",
         "PATTERN"},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, common_part, 0, "Common options:", NULL},
        POPT_TABLEEND,
    };
    arguments parsed;
    int code;
    if (options_parse(self, argc, argv, table, &common, &parsed, &code))
        code = parsed.count == 0 ? failure_usage(self->name, "FILE is needed")
               : parsed.count > 1
                   ? failure_usage(self->name, "unexpected argument '%s'",
                                   parsed.positional[1])
                   : map_become(self, &common, parsed.positional[0], key);
    options_free(&parsed);
    return code;
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch map rank0.json\n"
    "  nixl-fetch map rank0.json --key '*.layers.0.*q_proj*'\n"
    "\n"
    "FILE is what Mapping.save() of fanin.mapping writes, of one rank of an engine.\n"
    "For each module: which box of which published tensor goes into which of its\n"
    "tensors, at which byte. A module is filled by boxes, by the engine's loader,\n"
    "which is said with the reason, or by nothing that is published (own).";

const command cmd_map = {
    .name = "map",
    .arguments = "FILE [OPTION...]",
    .summary = "show a recorded mapping: where an engine takes published tensors",
    .help = help,
    .run = run,
};
