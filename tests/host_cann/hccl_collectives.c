/* libhccl: collectives and reductions. */
#include <stdio.h>
#include <string.h>

#include "hccl_host.h"

static const char *const op_names[] = {"sum", "prod", "max", "min"};

/* ---- reductions -------------------------------------------------------------------------------------------------- */

static float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bf16(float value) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define COMBINE(a, b) (op == SUM ? (a) + (b) : op == PROD ? (a) * (b) : op == MAX ? ((a) > (b) ? (a) : (b)) : ((a) < (b) ? (a) : (b)))
#define REDUCE(T) for (size_t i = 0; i < count; i++) ((T *)target)[i] = (T)COMBINE(((T *)target)[i], ((const T *)source)[i])

static void reduce(void *target, const void *source, size_t count, int type, int op) {
    switch (type) {
    case INT8: REDUCE(int8_t); break;
    case INT16: REDUCE(int16_t); break;
    case INT32: REDUCE(int32_t); break;
    case INT64: REDUCE(int64_t); break;
    case FP16: REDUCE(_Float16); break;
    case FP32: REDUCE(float); break;
    case BFP16:
        for (size_t i = 0; i < count; i++) {
            float a = from_bf16(((uint16_t *)target)[i]), b = from_bf16(((const uint16_t *)source)[i]);
            ((uint16_t *)target)[i] = to_bf16(COMBINE(a, b));
        }
    }
}

/* ---- collectives ------------------------------------------------------------------------------------------------- */

static void describe(const struct call *call, char *text, size_t room) {
    const char *type = call->type < TYPES ? type_names[call->type] : "?";
    int length = snprintf(text, room, "%s of %lu %s", call->name, (unsigned long)call->count, type);
    if (call->op != NO_REDUCTION) length += snprintf(text + length, room - length, ", %s", op_names[call->op]);
    if (call->root >= 0) snprintf(text + length, room - length, ", root %d", call->root);
}

static bool same_call(const struct call *a, const struct call *b) {
    return !strcmp(a->name, b->name) && a->count == b->count && a->type == b->type && a->op == b->op && a->root == b->root;
}

/* All ranks say what they are about to do, and find out whether they agree. */
static int agree(struct communicator *comm, const char *name, uint64_t count, int type, int op, int root) {
    struct slot *slots = comm->shared->slots;
    struct call mine = {"", count, type, op, root};
    int error = check_type(name, type, op);
    if (error) return error;
    snprintf(mine.name, sizeof mine.name, "%s", name);
    slots[comm->rank].call = mine;
    if ((error = meet(comm, name))) return error;
    for (uint32_t rank = 1; rank < comm->ranks && !error; rank++) {
        char one[128], other[128];
        if (same_call(&slots[0].call, &slots[rank].call)) continue;
        describe(&slots[0].call, one, sizeof one);
        describe(&slots[rank].call, other, sizeof other);
        error = host_cann_fail(E_PARA, "the ranks disagree: rank 0 is in %s, rank %u in %s", one, rank, other);
    }
    int late = meet(comm, name); /* a slot must not change while another rank reads it */
    return error ? error : late;
}

/* Moves `bytes` through the slots. Those who `give` write a chunk; then each who `takes` folds all chunks into it. */
struct transfer {
    const char *name, *give;
    char *take;
    size_t bytes;
    int from;           /* the only rank to read, or -1: all, one after another */
    size_t stride;      /* distance of the ranks' parts in `take`; 0 with a reduction */
    int type, op;
};

static int move(struct communicator *comm, const struct transfer *move) {
    struct slot *slots = comm->shared->slots;
    int error;
    for (size_t done = 0; done < move->bytes; done += CHUNK) {
        size_t part = move->bytes - done < CHUNK ? move->bytes - done : CHUNK;
        if (move->give) memcpy(slots[comm->rank].data, move->give + done, part);
        if ((error = meet(comm, move->name))) return error;
        for (uint32_t rank = 0; move->take && rank < comm->ranks; rank++) {
            if (move->from >= 0 && (int)rank != move->from) continue;
            char *target = move->take + rank * move->stride + done;
            if (move->op == NO_REDUCTION || !rank) memcpy(target, slots[rank].data, part);
            else reduce(target, slots[rank].data, part / type_bytes[move->type], move->type, move->op);
        }
        if ((error = meet(comm, move->name))) return error;
    }
    return SUCCESS;
}

int HcclAllReduce(void *give, void *take, uint64_t count, int type, int op, void *handle, void *stream) {
    struct communicator *comm = handle;
    TRY(agree(comm, "HcclAllReduce", count, type, op, -1));
    size_t bytes = count * type_bytes[type];
    TRY(check_buffer("HcclAllReduce", give, bytes));
    TRY(check_buffer("HcclAllReduce", take, bytes));
    return move(comm, &(struct transfer){"HcclAllReduce", give, take, bytes, -1, 0, type, op});
}

int HcclReduce(void *give, void *take, uint64_t count, int type, int op, uint32_t root, void *handle, void *stream) {
    struct communicator *comm = handle;
    TRY(agree(comm, "HcclReduce", count, type, op, (int)root));
    size_t bytes = count * type_bytes[type];
    TRY(check_buffer("HcclReduce", give, bytes));
    return move(comm, &(struct transfer){"HcclReduce", give, comm->rank == root ? take : NULL, bytes, -1, 0, type, op});
}

int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, void *handle, void *stream) {
    struct communicator *comm = handle;
    TRY(agree(comm, "HcclBroadcast", count, type, NO_REDUCTION, (int)root));
    size_t bytes = count * type_bytes[type];
    TRY(check_buffer("HcclBroadcast", buffer, bytes));
    bool giving = comm->rank == root;
    return move(comm, &(struct transfer){"HcclBroadcast", giving ? buffer : NULL, giving ? NULL : buffer, bytes, (int)root,
                                         0, type, NO_REDUCTION});
}

int HcclAllGather(void *give, void *take, uint64_t count, int type, void *handle, void *stream) {
    struct communicator *comm = handle;
    TRY(agree(comm, "HcclAllGather", count, type, NO_REDUCTION, -1));
    size_t bytes = count * type_bytes[type];
    TRY(check_buffer("HcclAllGather", give, bytes));
    TRY(check_buffer("HcclAllGather", take, bytes * comm->ranks));
    return move(comm, &(struct transfer){"HcclAllGather", give, take, bytes, -1, bytes, type, NO_REDUCTION});
}

int HcclReduceScatter(void *give, void *take, uint64_t count, int type, int op, void *handle, void *stream) {
    struct communicator *comm = handle;
    TRY(agree(comm, "HcclReduceScatter", count, type, op, -1));
    size_t bytes = count * type_bytes[type];
    TRY(check_buffer("HcclReduceScatter", give, bytes * comm->ranks));
    TRY(check_buffer("HcclReduceScatter", take, bytes));
    for (uint32_t rank = 0; rank < comm->ranks; rank++)
        TRY(move(comm, &(struct transfer){"HcclReduceScatter", (char *)give + rank * bytes, comm->rank == rank ? take : NULL,
                                          bytes, -1, 0, type, op}));
    return SUCCESS;
}

int HcclScatter(void *give, void *take, uint64_t count, int type, uint32_t root, void *handle, void *stream) {
    struct communicator *comm = handle;
    TRY(agree(comm, "HcclScatter", count, type, NO_REDUCTION, (int)root));
    size_t bytes = count * type_bytes[type];
    TRY(check_buffer("HcclScatter", take, bytes));
    for (uint32_t rank = 0; rank < comm->ranks; rank++)
        TRY(move(comm, &(struct transfer){"HcclScatter", comm->rank == root ? (char *)give + rank * bytes : NULL,
                                          comm->rank == rank ? take : NULL, bytes, (int)root, 0, type, NO_REDUCTION}));
    return SUCCESS;
}

int HcclBarrier(void *handle, void *stream) { return agree(handle, "HcclBarrier", 0, INT8, NO_REDUCTION, -1); }
