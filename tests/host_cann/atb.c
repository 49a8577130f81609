/* libatb: three operators of the library of transformer operators (ATB, in NNAL), which torch_npu calls in C++.
 *
 * Names and layouts are those of the C++ interface: an operation is an object with a table of virtual functions, and a
 * vector has room for 65 tensors. The kernels are in Python, like those of libopapi, whose functions are called here.
 * torch_npu ignores what Execute returns. Setup therefore does the work, too: its failure is raised.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host_cann.h"

#define ERROR_INVALID_PARAM 1
#define VECTOR_ROOM 65

struct atb_tensor {
    int32_t dtype, format;
    int64_t sizes[8];
    uint64_t dims;
    void *device_data, *host_data;
    uint64_t bytes;
};

struct atb_vector {
    size_t capacity, count;
    struct atb_tensor stored[VECTOR_ROOM], *heap;
};

struct atb_pack {
    struct atb_vector inputs, outputs;
};

struct cpp_string { /* std::string */
    char *text;
    size_t length;
    char local[16];
};

struct operation {
    const void *const *functions;
    const char *name;
    int (*run)(const struct operation *operation, void **tensors);
    int64_t parameter;
    unsigned inputs, outputs;
};

struct context {
    const void *const *functions;
    void *stream;
};

/* Of libopapi. */
void *aclCreateTensor(const int64_t *sizes, uint64_t dims, int dtype, const int64_t *strides, int64_t offset, int format,
                      const int64_t *storage_sizes, uint64_t storage_dims, void *storage);
int aclDestroyTensor(void *tensor);
const char *aclGetRecentErrMsg(void);
int AtbRopeGetWorkspaceSize(void *, void *, void *, void *, void *, int64_t, void *, void *, uint64_t *, void **);
int AtbReshapeAndCacheGetWorkspaceSize(void *, void *, void *, void *, void *, void *, void *, uint64_t *, void **);
int AtbLinearGetWorkspaceSize(void *, void *, void *, void *, uint64_t *, void **);
int AtbRope(void *, uint64_t, void *, void *);
int AtbReshapeAndCache(void *, uint64_t, void *, void *);
int AtbLinear(void *, uint64_t, void *, void *);

/* ---- operators --------------------------------------------------------------------------------------------------- */

static int run_rope(const struct operation *operation, void **t) {
    void *executor;
    uint64_t bytes;
    int error = AtbRopeGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], operation->parameter, t[5], t[6], &bytes, &executor);
    return error ? error : AtbRope(NULL, 0, executor, NULL);
}

static int run_reshape_and_cache(const struct operation *operation, void **t) {
    void *executor;
    uint64_t bytes;
    int error = AtbReshapeAndCacheGetWorkspaceSize(t[0], t[1], t[2], t[3], t[4], t[5], t[6], &bytes, &executor);
    return error ? error : AtbReshapeAndCache(NULL, 0, executor, NULL);
}

static int run_linear(const struct operation *operation, void **t) {
    void *executor;
    uint64_t bytes;
    int error = AtbLinearGetWorkspaceSize(t[0], t[1], t[2], t[3], &bytes, &executor);
    return error ? error : AtbLinear(NULL, 0, executor, NULL);
}

/* ---- the class Operation ----------------------------------------------------------------------------------------- */

static void *tensor_of(const struct atb_tensor *given) {
    int64_t strides[8], step = 1;
    for (int i = (int)given->dims - 1; i >= 0; i--) strides[i] = step, step *= given->sizes[i];
    return aclCreateTensor(given->sizes, given->dims, given->dtype, strides, 0, given->format, given->sizes, given->dims,
                           given->device_data ? given->device_data : given->host_data);
}

static int fill(void **tensors, const struct atb_vector *vector) {
    const struct atb_tensor *given = vector->heap ? vector->heap : vector->stored;
    for (size_t i = 0; i < vector->count; i++) tensors[i] = tensor_of(&given[i]);
    return (int)vector->count;
}

static int setup(struct operation *operation, const struct atb_pack *pack, uint64_t *workspace_bytes, struct context *context) {
    void *tensors[2 * VECTOR_ROOM];
    *workspace_bytes = 0;
    if (pack->inputs.count != operation->inputs || pack->outputs.count != operation->outputs) {
        fprintf(stderr, "host_cann: %s takes %u and %u tensors, not %zu and %zu\n", operation->name, operation->inputs,
                operation->outputs, pack->inputs.count, pack->outputs.count);
        return ERROR_INVALID_PARAM;
    }
    int count = fill(tensors, &pack->inputs);
    count += fill(tensors + count, &pack->outputs);
    int error = operation->run(operation, tensors);
    for (int i = 0; i < count; i++) aclDestroyTensor(tensors[i]);
    if (error) fprintf(stderr, "host_cann: %s\n", aclGetRecentErrMsg());
    return error ? ERROR_INVALID_PARAM : 0;
}

static int execute(struct operation *operation, const struct atb_pack *pack, uint8_t *workspace, uint64_t bytes,
                   struct context *context) {
    return 0;
}

/* The result's place comes first. Every name is short enough for the string's own room. */
static struct cpp_string *get_name(struct cpp_string *made, const struct operation *operation) {
    made->text = made->local;
    made->length = (size_t)snprintf(made->local, sizeof made->local, "%s", operation->name);
    return made;
}

static int infer_shape(const struct operation *operation, const void *inputs, void *outputs) { return ERROR_INVALID_PARAM; }
static uint32_t input_count(const struct operation *operation) { return operation->inputs; }
static uint32_t output_count(const struct operation *operation) { return operation->outputs; }
static void destroy(void *object) {}
static void destroy_and_free(void *object) { free(object); }

static const void *const operation_functions[] = {destroy,     destroy_and_free, get_name, infer_shape,
                                                  input_count, output_count,     setup,    execute};

static int make(struct operation **made, struct operation wanted) {
    *made = malloc(sizeof wanted);
    wanted.functions = operation_functions;
    **made = wanted;
    return 0;
}

int _ZN3atb16DestroyOperationEPNS_9OperationE(struct operation *operation) { free(operation); return 0; }

/* ---- the class Context ------------------------------------------------------------------------------------------- */

static int set_stream(struct context *context, void *stream) { context->stream = stream; return 0; }
static void *get_stream(const struct context *context) { return context->stream; }
static int set_tiling_copy(struct context *context, bool enable) { return 0; }
static bool get_tiling_copy(const struct context *context) { return false; }

static const void *const context_functions[] = {destroy,    destroy_and_free, set_stream,
                                                get_stream, set_tiling_copy,  get_tiling_copy};

int _ZN3atb13CreateContextEPPNS_7ContextE(struct context **made) {
    *made = calloc(1, sizeof **made);
    (*made)->functions = context_functions;
    return 0;
}

int _ZN3atb14DestroyContextEPNS_7ContextE(struct context *context) { free(context); return 0; }

/* Utils::GetTensorSize */
uint64_t _ZN3atb5Utils13GetTensorSizeERKNS_6TensorE(const struct atb_tensor *tensor) {
    uint64_t elements = tensor->dims > 0;
    for (uint64_t i = 0; i < tensor->dims; i++) elements *= (uint64_t)tensor->sizes[i];
    return elements * (tensor->dtype == 0 || tensor->dtype == 3 ? 4 : tensor->dtype == 9 ? 8 : tensor->dtype == 2 ? 1 : 2);
}

/* ---- CreateOperation, for each class of parameters ----------------------------------------------------------------- */

struct rope_parameters { int32_t coefficient, cos_format; };
struct cache_parameters { int32_t compress_type, cache_kind; };
struct linear_parameters { bool transpose_a, transpose_b, has_bias; int32_t out_type; bool accumulates; };

static int refuse(struct operation **made, const char *what) {
    *made = NULL; /* torch_npu raises then, and names the operator */
    fprintf(stderr, "host_cann: ATB: %s has no stand-in\n", what);
    return ERROR_INVALID_PARAM;
}

int _ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE(const struct rope_parameters *given,
                                                                         struct operation **made) {
    if (given->cos_format) return refuse(made, "RopeParam.cosFormat");
    return make(made, (struct operation){.name = "RopeOperation", .run = run_rope, .parameter = given->coefficient,
                                         .inputs = 5, .outputs = 2});
}

int _ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE(const struct cache_parameters *given,
                                                                                     struct operation **made) {
    if (given->compress_type || given->cache_kind) return refuse(made, "a compressed, single or NZ cache");
    return make(made, (struct operation){.name = "ReshapeAndCache", .run = run_reshape_and_cache, .inputs = 5, .outputs = 2});
}

int _ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE(const struct linear_parameters *given,
                                                                            struct operation **made) {
    if (!given->transpose_a || given->transpose_b || given->has_bias || !given->accumulates)
        return refuse(made, "LinearParam other than C + A^T B");
    return make(made, (struct operation){.name = "LinearOperation", .run = run_linear, .inputs = 3, .outputs = 1});
}

#define ABSENT(mangled, name)                                                                                  \
    int _ZN3atb15CreateOperationINS_5infer##mangled##EEEiRKT_PPNS_9OperationE(const void *given,               \
                                                                              struct operation **made) {       \
        return refuse(made, name);                                                                             \
    }

ABSENT(12ElewiseParam, "ElewiseParam")
ABSENT(12RmsNormParam, "RmsNormParam")
ABSENT(14GroupTopkParam, "GroupTopkParam")
ABSENT(18SelfAttentionParam, "SelfAttentionParam")
ABSENT(19PagedAttentionParam, "PagedAttentionParam")
