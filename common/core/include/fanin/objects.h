/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Tensors of other libraries, described all at once: for bindings of languages whose own loops
 * would take longer than a pull. The objects are read by the function that their library gives out
 * for that, dltensor_from_py_object_no_sync of the exchange API of DLPack 1.3.
 */
#ifndef FANIN_OBJECTS_H
#define FANIN_OBJECTS_H

#include <fanin/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The object of that number, not NULL; PyList_GetItem() is one. */
typedef void *(*fanin_item_fn)(void *list, ptrdiff_t index);
/** Fills the DLTensor at @p tensor_out; anything but 0: it cannot. */
typedef int (*fanin_dltensor_fn)(void *object, void *tensor_out);
/** What the memory of @p object is kept by, as a reference that the caller of this owns; NULL: it
    cannot tell. PyObject_CallOneArg() is one, with a method as @p how. */
typedef void *(*fanin_owner_fn)(void *how, void *object);
/** Takes a reference to @p owner over, also when it fails; anything but 0: it has failed.
    PyList_SetItem() is one. */
typedef int (*fanin_keep_fn)(void *kept, ptrdiff_t index, void *owner);

/** Objects, and what was found of them. */
typedef struct fanin_objects {
    size_t struct_size;
    void *list;
    size_t count;
    fanin_item_fn item;
    fanin_dltensor_fn read;
    /** out: numbers of tensors that could be views of complex ones, of which DLTensor does not tell
        whether they are negated when they are read; room for count */
    uint32_t *doubtful;
    size_t n_doubtful; /**< out */
    uint64_t devices;  /**< out: bit n: some are on CUDA device n */
    /** out: of dtypes, shapes, strides, places and addresses. Equal: fanin_describe_objects()
        writes the same again */
    uint8_t digest[16];
    /** NULL, as where struct_size ends before it: none. Asked of each object right before it is
        read, with nothing in between: so what is found of an object lies in what its owner keeps */
    fanin_owner_fn owner;
    void *how;          /**< for owner */
    fanin_keep_fn keep; /**< is given what owner returned; not NULL unless owner is */
    void *kept;         /**< for keep */
} fanin_objects;

/**
 * Reads all objects; if @p tensors is not NULL, fills as many of them, each whole and of one box
 * (none if it is empty), in @p boxes, as many. @p names: the tensors' names, one behind the other,
 * each with its NUL; must outlive @p tensors, as @p boxes must; not looked at without @p tensors.
 *
 * False: an object cannot be read or described so, its owner cannot be told or kept, or an argument
 * is wrong. Not described are: a dtype that safetensors lacks or that is complex; more than
 * FANIN_MAX_DIMS dimensions; elements that share memory; memory that is neither the host's nor a
 * CUDA device's below 64.
 *
 * Calls @p objects->item, ->owner, ->keep and ->read in this thread, so it wants of its caller what
 * those do (the GIL). Blocks as long as they do. Thread: any.
 */
FANIN_API bool fanin_describe_objects(fanin_objects *objects, fanin_tensor *tensors,
                                      fanin_box *boxes, const char *names);

#ifdef __cplusplus
}
#endif
#endif
