/* SPDX-License-Identifier: Apache-2.0 */
/** @file Access Control Services of PCIe bridges: whether traffic between devices is sent up. */
#ifndef ACS_H
#define ACS_H

typedef enum acs_state {
    ACS_UNKNOWN, /**< configuration space cannot be read whole (needs root) */
    ACS_OFF,
    ACS_REDIRECTS, /**< requests or completions between devices go through the root */
} acs_state;

/** The bridge at @p pci below @p sysfs ("/sys"). PCI Express Base Specification, "ACS Extended
    Capability". */
acs_state acs_of_bridge(const char *sysfs, const char *pci);

#endif
