/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/about.h"
#include "fetch/output.h"
#include "trainer/device_driver.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

static void name_processor(char *out, size_t size)
{
    char line[256];
    struct utsname host;
    snprintf(out, size, "%s", uname(&host) == 0 ? host.machine : "unknown");
    FILE *file = fopen("/proc/cpuinfo", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        if (colon != NULL && strncmp(line, "model name", 10) == 0) {
            snprintf(out, size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
            break;
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
}

static void about_put_word(FILE *stream, const char *word)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                "0123456789-_./:,=+@%";
    if (word[0] != '\0' && word[strspn(word, plain)] == '\0') {
        fputs(word, stream);
        return;
    }
    fputc('\'', stream);
    for (; *word != '\0'; word++) {
        fputs(*word == '\'' ? "'\\''" : (char[]){*word, '\0'}, stream);
    }
    fputc('\'', stream);
}

static char *about_join(int argc, const char **argv)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&text, &size));
    fputs(argv[0], stream); /* "nixl-fetch bench" */
    for (int i = 1; i < argc; i++) {
        fputc(' ', stream);
        about_put_word(stream, argv[i]);
    }
    (void)fclose(stream);
    return output_require(text);
}

void about_make(int argc, const char **argv, about *out)
{
    struct utsname host;
    struct tm utc;
    cpu_set_t usable;
    time_t now = time(NULL);
    *out = (about){.command = about_join(argc, argv)};
    name_processor(out->processor, sizeof out->processor);
    if (uname(&host) == 0) {
        snprintf(out->kernel, sizeof out->kernel, "%s %s", host.sysname, host.release);
    }
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    out->cores = sched_getaffinity(0, sizeof usable, &usable) == 0
                     ? (uint32_t)CPU_COUNT(&usable)
                     : (uint32_t)cores;
    out->memory_bytes =
        (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    if (gmtime_r(&now, &utc) != NULL) {
        strftime(out->date, sizeof out->date, "%Y-%m-%dT%H:%M:%SZ", &utc);
    }
}

void about_devices(about *a)
{
    int (*name_of)(char *, int, int) = NULL;
    int count = device_count();
    void *symbol = count > 0 ? device_symbol("cuDeviceGetName") : NULL;
    memcpy(&name_of, &symbol, sizeof symbol);
    for (int i = 0; i < count && name_of != NULL; i++) {
        char name[64] = "";
        if (name_of(name, sizeof name, i) == 0) {
            output_append(a->devices, sizeof a->devices, "%s%.63s", i > 0 ? ", " : "",
                          name);
        }
    }
}

void about_free(about *a)
{
    free(a->command);
    a->command = NULL;
}

json_t *about_machine_json(const about *a)
{
    return output_object(
        "processor", output_string(a->processor), "cores", output_u64(a->cores),
        "memory_bytes", output_u64(a->memory_bytes), "kernel", output_string(a->kernel),
        "devices", output_string(a->devices), NULL);
}
