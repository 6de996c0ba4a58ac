/* SPDX-License-Identifier: Apache-2.0 */
/** @file What is still called after the last call into the library must stay mapped. */
#ifndef PIN_H
#define PIN_H

/** Keeps the file that holds this code mapped until the process ends. Thread: any. */
void pin_own_library(void);

#endif
