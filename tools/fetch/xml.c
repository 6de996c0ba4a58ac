/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/xml.h"

#include <string.h>

void xml_put(FILE *stream, const char *text)
{
    while (*text != '\0') {
        if (strncmp(text, "\xef\xbf\xbe", 3) == 0 ||
            strncmp(text, "\xef\xbf\xbf", 3) == 0) { /* U+FFFE and U+FFFF */
            fputc(' ', stream);
            text += 3;
            continue;
        }
        if (strchr("&<>\"", *text) != NULL) {
            fprintf(stream, "&#%d;", *text);
        } else {
            fputc((unsigned char)*text < 0x20 ? ' ' : *text, stream);
        }
        text++;
    }
}
