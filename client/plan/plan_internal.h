/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The planner's parts. A *geometry* is how the sources' boxes cut one tensor; tensors that
 * are cut alike share it, so that proofs are made once per geometry (a model has a
 * handful), not once per tensor. A *fill* is a geometry seen by one way to land: template
 * pieces, copied for each tensor. A *view* is a non-contiguous landing, also shared.
 */
#ifndef PLAN_INTERNAL_H
#define PLAN_INTERNAL_H

#include "array.h"
#include "convert.h"
#include "dtype.h"
#include "plan/plan.h"

#define PLAN_NONE UINT32_MAX

/* ------------------------- numbering of equal things (plan_cut.c) ---- */

typedef struct intern_slot {
    uint64_t hash;
    uint64_t id_plus_1; /**< 0: free */
} intern_slot;

/** A hash table of numbers; the things numbered lie elsewhere. Starts zeroed. */
typedef struct intern {
    intern_slot *slots;
    uint64_t mask, used;
} intern;

/** Numbers that were looked up last: neighbouring keys have few shapes in turn, and to compare a
    few of them costs less than a hash. */
typedef struct recent {
    uint32_t ids[8];
    uint32_t n; /**< that there were */
} recent;

/** The @p i th of them; PLAN_NONE: there are no more. */
static inline uint32_t recent_id(const recent *r, uint32_t i)
{
    const uint32_t most = sizeof r->ids / sizeof *r->ids;
    return i < r->n && i < most ? r->ids[i] : PLAN_NONE;
}
static inline void recent_add(recent *r, uint32_t id)
{
    r->ids[r->n++ % (sizeof r->ids / sizeof *r->ids)] = id;
}

/** Numbers added with @p hash, one a call; *@p probe starts at 0. PLAN_NONE: no more. */
uint32_t intern_next(const intern *t, uint64_t hash, uint64_t *probe);
bool intern_add(intern *t, uint64_t hash, uint32_t id); /**< false: out of memory */
void intern_free(intern *t);
/** @p stop (may be NULL) is looked at; once it is stopped the hash is not to be used. */
uint64_t words_hash(const uint64_t *words, uint64_t count, work_stop *stop);

/* ------------------------------ cutting and views (plan_cut.c) ---- */

/**
 * A block copied between two strided layouts, in units (whole bytes). n_dims may be 0. If it is
 * converted, `to` is counted as if the landed elements were as large as those they come from, so
 * that what is contiguous looks so on both sides; copy_landed() tells the true bytes.
 */
typedef struct copy_block {
    uint32_t n_dims;
    uint64_t extent[FANIN_MAX_DIMS]; /**< > 0 */
    int64_t from[FANIN_MAX_DIMS];    /**< bytes, >= 0, descending */
    int64_t to[FANIN_MAX_DIMS];      /**< bytes */
    uint32_t unit;                   /**< bytes */
    uint32_t convert;                /**< CONVERT_... */
} copy_block;

/** Bytes in the destination that copy_block's measure @p to stands for. */
static inline int64_t copy_landed(uint32_t convert, int64_t to)
{
    return convert == CONVERT_NONE ? to : to / 2; /* always a multiple of 2 */
}
/** The other way. */
static inline int64_t copy_measure(uint32_t convert, int64_t bytes)
{
    return convert == CONVERT_NONE ? bytes : (int64_t)(2 * (uint64_t)bytes);
}

typedef struct cut_rule {
    uint64_t max_length; /**< of a covering range; at least one unit */
    uint64_t short_run;  /**< gaps are read along only beside runs shorter than this */
    uint64_t max_gap;
    uint64_t min_step; /**< or between neighbours that begin nearer to each other */
} cut_rule;

/** Gets a part, where it starts on either side, and the bytes from its first to its end. */
typedef bool (*cut_fn)(void *cookie, const copy_block *part, uint64_t from, uint64_t to,
                       uint64_t length);

/** The outermost of these dimensions around runs up to which neighbours are near enough to be read
    together. */
uint32_t cut_joined(uint32_t n_dims, const uint64_t *extent, const int64_t *from,
                    uint64_t run, const cut_rule *rule);
/** Cuts @p b into parts by @p rule, ascending by `from`; false once @p fn says so. */
bool cut_block(const copy_block *b, const cut_rule *rule, cut_fn fn, void *cookie);

typedef struct view_set {
    strided *views;
    uint64_t n, capacity;
    intern index;
} view_set;

/** 1 + the number of an equal view, added if new. False: out of memory. */
bool view_intern(view_set *set, const strided *s, uint32_t *view_out);
/** 0 if the part lands contiguously and as it is, else as view_intern(). */
bool view_of_block(view_set *set, const copy_block *part, uint32_t *view_out);
void view_set_free(view_set *set);

/* -------------------------- pieces as ranges of bytes (plan_slice.c) ---- */

/** How each of the views is read (plan.readings), of which there are more then. False: out of
    memory, or stopped. */
bool views_read(view_set *views, work_stop *stop, plan_reading **out);

/** Extents and offsets in elements to units; scalars become one dimension of one. */
uint32_t block_to_units(const block *b, dtype_unit unit, uint64_t *offset,
                        uint64_t *extent);

/* -------------------------------------- the proof (plan_cover.c) ---- */

/** Who holds a box: the source, and the how manieth of its boxes of that tensor. */
typedef struct holder {
    uint32_t source, local;
} holder;

typedef struct geometry {
    dtype_unit unit;
    uint32_t n_dims;
    uint32_t n_owners;  /**< boxes, replicas counted */
    uint32_t n_uniques; /**< different boxes, ascending along the axis */
    uint32_t axis;      /**< the most finely cut dimension */
    /** fills of the whole tensor, as it is and converted; PLAN_NONE: not made yet */
    uint32_t whole[2];
    uint64_t shape[FANIN_MAX_DIMS];
    uint64_t keys;      /**< tensors that have it, counted under chunk rules */
    uint64_t n_id;      /**< of words: what tells it from others */
    uint64_t *words;    /**< id, and (source, offset, extent) of each owner */
    uint64_t *end_max;  /**< furthest end on the axis of the uniques so far */
    holder *holders;    /**< by unique, then source */
    uint32_t *first;    /**< n_uniques + 1: of holders */
    uint32_t *sample;   /**< an owner of each unique, for its block */
    uint32_t *class_of; /**< of each unique */
    uint32_t *sources;  /**< of each owner */
    void *storage;
    work_stop *stop; /**< while it is made */
} geometry;

/** Sources that hold the same boxes. The first n_sources classes are single sources. */
typedef struct holder_class {
    uint64_t first; /**< of cover.class_sources and cover.bounds */
    uint32_t count;
    uint32_t position, key; /**< who serves which key now */
    uint32_t turn;          /**< who comes first: added to positions */
    uint64_t weight, given; /**< bytes wanted of it, given out so far */
    uint64_t pieces;        /**< wanted of it */
} holder_class;

typedef struct cover {
    const key_table *keys;
    const plan_source *sources;
    size_t n_sources;
    key_set proven;      /**< whose boxes all sources' tables have; borrowed */
    key_range whole;     /**< of proven, if that is all */
    bool by_shape;       /**< all follow chunk rules: a shape has one geometry */
    uint32_t dim, world; /**< of the rule all follow, world 0: several rules */
    uint32_t *of_key;    /**< geometry of each key */
    geometry *geometries;
    uint64_t n_geometries, geometry_capacity;
    intern index;
    recent recent;
    holder_class *classes;
    uint64_t n_classes, class_capacity;
    uint32_t *class_sources; /**< of all classes, each ascending */
    uint64_t *bounds;        /**< of all classes: cumulated bytes per source */
    uint64_t n_class_sources, class_source_capacity;
    intern class_index;
    bool *sole; /**< by source: some box is held by it alone */
    /* while building */
    uint64_t *words;
    uint64_t n_words, word_capacity;
    work_stop *stop;
    uint64_t *cursor; /**< by source: next box */
    uint64_t *end;    /**< by source: behind the last box of these neighbouring keys */
    uint32_t *next_key; /**< by source: that box's key */
} cover;

/** Reads all boxes and proves that they tile. As plan_build(). */
fanin_status cover_build(cover *c, const key_table *keys, const plan_source *sources,
                         size_t n_sources, const plan_rules *rules, fanin_error *error);
/** Cursors to the first boxes of neighbouring keys of c->proven, ends behind their last ones. */
void cover_seek(cover *c, const key_range *keys);
/** Why a step did not succeed: FANIN_ERR_TIMEOUT if the work was stopped, else FANIN_ERR_MEMORY. */
static inline fanin_status plan_broken_off(const work_stop *stop, fanin_error *error)
{
    return work_broken_off(stop, "plan", "the plan was made", error);
}
void cover_free(cover *c);

/** Block of unique @p u. */
void geometry_block(const geometry *g, uint32_t u, block *out);
/** Words of one owner. */
static inline uint64_t geometry_step(uint32_t n_dims)
{
    return 1 + 2 * (uint64_t)n_dims;
}

/* A geometry from c->words, which it takes (plan_geometry.c); PROTOCOL, INCOMPLETE, MEMORY. */
fanin_status geometry_make(cover *c, uint32_t key, uint64_t n_id, uint64_t hash,
                           uint32_t *id_out, fanin_error *error);
void geometry_free(geometry *g);

/* ------------------------------- who serves what (plan_geometry.c) ---- */

/** Shares out the classes' weights so that the sources' loads are level; of sources that are
    equally loaded @p seed says who comes first. False: out of memory, or c->stop. */
bool classes_balance(cover *c, uint64_t seed);
/** Index among the class's sources of the one that serves @p key; keys ascend. @p split: of this
    key, too, some may be served by one and some by the next. */
uint32_t class_holder(const cover *c, holder_class *k, uint32_t key, bool split);

/* ----------------------------- targets to templates (plan_cut.c) ---- */

typedef struct fill {
    uint32_t geometry;
    uint64_t words;        /**< index in fill_set.words: what tells it from others */
    uint64_t first, count; /**< of fill_set.templates */
    uint64_t uses;         /**< targets */
} fill;

typedef struct fill_set {
    fill *fills;
    uint64_t n, capacity;
    intern index;
    recent recent;
    uint64_t *words;
    uint64_t n_words, word_capacity;
    piece *templates; /**< box: unique of the geometry; to: relative */
    uint64_t n_templates, template_capacity;
    view_set views;
} fill_set;

/** The fill of the whole tensor, packed. False: out of memory. */
bool fill_whole(fill_set *set, cover *c, uint32_t geometry_id, uint32_t convert,
                uint32_t *id_out);
/** The fill of a (valid) target. */
bool fill_target(fill_set *set, cover *c, uint32_t geometry_id, uint32_t convert,
                 const plan_target *target, uint32_t *id_out);
void fill_set_free(fill_set *set);

#endif
