/* SPDX-License-Identifier: Apache-2.0 */
/* The documented worker as a program. usage: documented_worker STEP DIRECTORY ADDRESS... */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

int fetch(const char *const *addresses, size_t n_ranks, uint64_t step,
          const char *directory);

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    return fetch((const char *const *)argv + 3, (size_t)argc - 3,
                 strtoull(argv[1], NULL, 10), argv[2]);
}
