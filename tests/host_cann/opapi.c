/* libopapi: describes the arguments of aclnn operators, and hands them to the reference kernels in Python.
 *
 * An operator has two functions, as in CANN. The first takes the arguments and returns an executor; here it passes
 * them on to Python, which reads them at once, since the caller may free them. The second runs the executor.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "host_cann.h"

#define ACLNN_ERR_INNER 561000
#define MAX_DIMS 8

/* `operators.py` reads these three structures. */
union argument {
    void *pointer;
    const char *text;
    int64_t integer;
    double real;
};

struct tensor {
    int64_t dtype, dims, offset; /* the offset counts elements */
    int64_t sizes[MAX_DIMS], strides[MAX_DIMS];
    void *storage;
};

struct list { /* of int64_t, or of pointers */
    int64_t count;
    int64_t values[];
};

int (*host_cann_prepare)(int operator, const union argument *arguments, void **executor);
int (*host_cann_run)(void *executor);

static int prepare(int operator, const union argument *arguments, uint64_t *workspace_bytes, void **executor) {
    if (!host_cann_prepare) return host_cann_fail(ACLNN_ERR_INNER, "the reference kernels are not installed");
    *workspace_bytes = 0;
    return host_cann_prepare(operator, arguments, executor);
}

static int run(void *executor) { return host_cann_run(executor); }

struct tensor *aclCreateTensor(const int64_t *sizes, uint64_t dims, int dtype, const int64_t *strides, int64_t offset,
                               int format, const int64_t *storage_sizes, uint64_t storage_dims, void *storage) {
    if (dims > MAX_DIMS) {
        host_cann_fail(ACLNN_ERR_INNER, "a tensor has %llu dimensions; at most %d are supported", (unsigned long long)dims,
                       MAX_DIMS);
        return NULL;
    }
    struct tensor *tensor = calloc(1, sizeof *tensor);
    tensor->dtype = dtype;
    tensor->dims = (int64_t)dims;
    tensor->offset = offset;
    tensor->storage = storage;
    memcpy(tensor->sizes, sizes, dims * sizeof *sizes);
    memcpy(tensor->strides, strides, dims * sizeof *strides);
    return tensor;
}

static struct list *make_list(const void *values, uint64_t count) {
    struct list *list = malloc(sizeof *list + count * sizeof(int64_t));
    list->count = (int64_t)count;
    if (count) memcpy(list->values, values, count * sizeof(int64_t));
    return list;
}

struct list *aclCreateIntArray(const int64_t *values, uint64_t count) { return make_list(values, count); }
struct list *aclCreateTensorList(void *const *tensors, uint64_t count) { return make_list(tensors, count); }
struct list *aclCreateScalarList(void *const *scalars, uint64_t count) { return make_list(scalars, count); }

/* A scalar is a tensor of no dimensions that owns its value. */
struct tensor *aclCreateScalar(void *value, int dtype) {
    static const uint8_t bytes[] = {4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1}; /* by aclDataType */
    const int bf16 = 27;
    if (dtype != bf16 && (dtype < 0 || dtype >= (int)sizeof bytes || !bytes[dtype])) {
        host_cann_fail(ACLNN_ERR_INNER, "a scalar has the unsupported type %d", dtype);
        return NULL;
    }
    struct tensor *scalar = calloc(1, sizeof *scalar);
    scalar->dtype = dtype;
    scalar->storage = calloc(1, 8);
    memcpy(scalar->storage, value, dtype == bf16 ? 2 : bytes[dtype]);
    return scalar;
}

int aclDestroyScalar(struct tensor *scalar) {
    if (scalar) free(scalar->storage);
    free(scalar);
    return 0;
}

int aclDestroyTensor(void *tensor) { free(tensor); return 0; }
int aclDestroyIntArray(void *list) { free(list); return 0; }
int aclDestroyScalarList(void *list) { free(list); return 0; } /* its owner destroys the scalars */

int aclDestroyTensorList(struct list *list) {
    for (int64_t i = 0; list && i < list->count; i++) free((void *)list->values[i]);
    free(list);
    return 0;
}

#include "opapi_functions.inc"
