/* SPDX-License-Identifier: Apache-2.0 */
/** @file Text in pictures. */
#ifndef XML_H
#define XML_H

#include <stdio.h>

/** Writes UTF-8 as the content of an element or the value of an attribute; characters that XML
    cannot have become blanks. */
void xml_put(FILE *stream, const char *text);

#endif
