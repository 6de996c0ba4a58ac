/* SPDX-License-Identifier: Apache-2.0 */
/** @file The tool's kernels as fat binaries; NULL in a build without CUDA's compiler. */
#ifndef DEVICE_IMAGES_H
#define DEVICE_IMAGES_H

/** device_pattern.cu. */
const void *device_pattern_image(void);
/** device_load.cu. */
const void *device_load_image(void);

#endif
