/* SPDX-License-Identifier: Apache-2.0 */
/** @file Trees like sysfs, made in a scratch folder: machines that are not there. */
#ifndef SYSFS_TREE_H
#define SYSFS_TREE_H

/** A new scratch folder; the caller removes it with sysfs_tree_remove(). */
const char *sysfs_tree_make(char out[256]);
void sysfs_tree_remove(const char *root);

/** A file below @p root with its folders; @p format makes its name. */
void sysfs_tree_file(const char *root, const char *text, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** A PCI device at devices/PATH (ending in its address), linked from bus/pci/devices. */
void sysfs_tree_pci(const char *root, const char *path, const char *vendor,
                    const char *class, int numa);
/** An RDMA device NAME on the PCI device at devices/PATH; NULL: on none (soft-RoCE). */
void sysfs_tree_nic(const char *root, const char *name, const char *path, double gbps,
                    int state, const char *link);

/** A DGX H100: eight GPUs, eight compute NICs behind the same switches, four storage ports. */
void sysfs_tree_dgx(const char *root);
/** A rented virtual machine: two GPUs and one RoCE port on a flat bus, no NUMA. */
void sysfs_tree_cloud(const char *root);
/** A laptop: a graphics controller of another vendor, nothing else. */
void sysfs_tree_laptop(const char *root);

#endif
