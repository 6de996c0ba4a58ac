/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Describes tensors of other libraries, all in one call. It is for bindings of languages whose own
 * loops would take longer than a pull. The objects' library provides the function that reads them:
 * dltensor_from_py_object_no_sync of DLPack 1.3's exchange API.
 */
#ifndef FANIN_OBJECTS_H
#define FANIN_OBJECTS_H

#include <fanin/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Returns object number @p index of @p list, never NULL. PyList_GetItem() is one. */
typedef void *(*fanin_item_fn)(void *list, ptrdiff_t index);
/** Fills the DLTensor at @p tensor_out. A result other than 0: it cannot. */
typedef int (*fanin_dltensor_fn)(void *object, void *tensor_out);
/**
 * Returns the object that keeps the memory of @p object alive, as a reference that the caller owns.
 * NULL: it cannot tell. PyObject_CallOneArg() is one, with a method as @p how.
 */
typedef void *(*fanin_owner_fn)(void *how, void *object);
/**
 * Takes over the caller's reference to @p owner, also when it fails. A result other than 0: it has
 * failed. PyList_SetItem() is one.
 */
typedef int (*fanin_keep_fn)(void *kept, ptrdiff_t index, void *owner);

/** Objects, and what was found of them. */
typedef struct fanin_objects {
    size_t struct_size;
    void *list;
    size_t count;
    fanin_item_fn item;
    fanin_dltensor_fn read;
    /** out: numbers of tensors that could be views of complex ones. DLTensor does not tell
        whether such a view is negated when it is read. Has room for count */
    uint32_t *doubtful;
    size_t n_doubtful; /**< out */
    uint64_t devices;  /**< out: bit n: some objects are on CUDA device n */
    /** out: digest of dtypes, shapes, strides, places and addresses. If it is the same,
        fanin_describe_objects() writes the same descriptions again */
    uint8_t digest[16];
    /** asked of each object right before the object is read, with nothing in between. So the
        memory that is found lies in what the owner keeps. NULL, or a struct_size that ends
        before this field: not asked */
    fanin_owner_fn owner;
    void *how;          /**< for owner */
    fanin_keep_fn keep; /**< gets what owner returned; not NULL if owner is given */
    void *kept;         /**< for keep */
} fanin_objects;

/**
 * Reads all objects. If @p tensors is not NULL, the function also fills count tensors and count
 * boxes. Each tensor is whole and has one box in @p boxes, or none if it is empty.
 *
 * @p names holds the tensors' names one behind the other, each with its NUL. Without @p tensors the
 * function ignores it. @p names and @p boxes must outlive @p tensors.
 *
 * Returns false if an object cannot be read or described, if its owner cannot be told or kept, or
 * if an argument is wrong. These objects cannot be described:
 * - a dtype that safetensors lacks, or a complex one;
 * - more than FANIN_MAX_DIMS dimensions;
 * - elements that share memory;
 * - memory that is neither the host's nor that of a CUDA device below 64.
 *
 * Calls @p objects->item, ->owner, ->keep and ->read in this thread, so the caller holds what they
 * need (the GIL). Blocks as long as they do. Thread: any.
 */
FANIN_API bool fanin_describe_objects(fanin_objects *objects, fanin_tensor *tensors,
                                      fanin_box *boxes, const char *names);

#ifdef __cplusplus
}
#endif
#endif
