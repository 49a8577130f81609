/* libhccl: communicators between processes of one machine, over shared memory.
 *
 * A communicator is one memory file without a name. The root makes it, and the others open it through /proc, so nothing
 * is left behind however a process ends. Every rank has a slot with a description of the call it is in and a chunk of
 * data. A collective starts with all ranks comparing their descriptions: a mismatch is an error in all of them, which
 * names both. Then the data goes through the chunks, with a barrier before and after each is read.
 * Sends and receives have a mailbox for every pair of ranks. hccl_collectives.c and hccl_letters.c do these.
 *
 *   HCCL_CONNECT_TIMEOUT   seconds to wait for all ranks to join (120)
 *   HCCL_EXEC_TIMEOUT      seconds to wait in a call for the other ranks (1836); 0 waits for ever
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "hccl_host.h"

#define ROOT_INFO_BYTES 4108
#define CONFIG_CAPABILITY 12 /* HCCL_COMM_CONFIG_RESERVED: every field of HcclCommConfig may be set */

const char *const type_names[TYPES] = {"int8",   "int16", "int32",  "fp16",   "fp32", "int64",
                                              "uint64", "uint8", "uint16", "uint32", "fp64", "bfp16"};
const size_t type_bytes[TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
static const bool type_reduces[TYPES] = {[INT8] = true, [INT16] = true, [INT32] = true, [INT64] = true,
                                         [FP16] = true, [FP32] = true,  [BFP16] = true};

/* ---- waiting --------------------------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static struct patience for_seconds(const char *variable, long otherwise) {
    return (struct patience){(double)host_cann_number(variable, otherwise), now(), 0};
}

struct patience for_peers(void) { return for_seconds("HCCL_EXEC_TIMEOUT", 1836); }

bool wait_more(struct patience *patience) {
    const struct timespec nap = {0, patience->turns < 1000 ? 20 * 1000 : 1000 * 1000};
    if (patience->turns++ < 50) return true;
    nanosleep(&nap, NULL);
    return patience->limit <= 0 || now() - patience->start < patience->limit;
}

int timed_out(const char *where, double limit) {
    return host_cann_fail(E_TIMEOUT, "%s: no answer from the other ranks within %.0f s", where, limit);
}

uint32_t look(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void put(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

int meet(struct communicator *comm, const char *where) {
    struct shared *shared = comm->shared;
    struct patience patience = for_peers();
    comm->sense = !comm->sense;
    if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == comm->ranks) {
        put(&shared->arrived, 0);
        put(&shared->sense, comm->sense);
        return SUCCESS;
    }
    while (look(&shared->sense) != comm->sense)
        if (!wait_more(&patience)) return timed_out(where, patience.limit);
    return SUCCESS;
}

/* ---- checks -------------------------------------------------------------------------------------------------------- */

int check_buffer(const char *name, const void *buffer, size_t bytes) {
    if (!bytes || host_cann_device_of(buffer, bytes) >= 0) return SUCCESS;
    return host_cann_fail(E_PARA, "%s: the buffer of %zu bytes at %p is not in device memory", name, bytes, buffer);
}

int check_type(const char *name, int type, int op) {
    if (type < 0 || type >= TYPES) return host_cann_fail(E_NOT_SUPPORT, "%s: data type %d is not supported", name, type);
    if (op == NO_REDUCTION) return SUCCESS;
    if (op < SUM || op > MIN) return host_cann_fail(E_NOT_SUPPORT, "%s: reduction %d is not supported", name, op);
    if (!type_reduces[type]) return host_cann_fail(E_NOT_SUPPORT, "%s: HCCL does not reduce %s", name, type_names[type]);
    return SUCCESS;
}

/* ---- communicators ----------------------------------------------------------------------------------------------- */

int HcclGetRootInfo(void *root_info) {
    int file = memfd_create("host_cann_hccl", MFD_CLOEXEC); /* closed when all ranks have opened it */
    if (file < 0 || ftruncate(file, sizeof(struct shared)))
        return host_cann_fail(E_SYSCALL, "HcclGetRootInfo: no shared memory for a communicator");
    memset(root_info, 0, ROOT_INFO_BYTES);
    snprintf(root_info, NAME_BYTES, "/proc/%d/fd/%d", getpid(), file);
    return SUCCESS;
}

int HcclCommInitRootInfo(uint32_t ranks, const void *root_info, uint32_t rank, void **made) {
    if (ranks > MAX_RANKS || rank >= ranks)
        return host_cann_fail(E_PARA, "HcclCommInitRootInfo: rank %u of %u; at most %d ranks", rank, ranks, MAX_RANKS);
    int file = open(root_info, O_RDWR | O_CLOEXEC);
    if (file < 0) return host_cann_fail(E_SYSCALL, "HcclCommInitRootInfo: the root's process has ended");
    void *shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) return host_cann_fail(E_MEMORY, "HcclCommInitRootInfo: no memory");
    struct communicator *comm = calloc(1, sizeof *comm);
    *comm = (struct communicator){ranks, rank, 0, shared, ""};
    snprintf(comm->name, sizeof comm->name, "%s", (const char *)root_info);
    *made = comm;
    struct patience patience = for_seconds("HCCL_CONNECT_TIMEOUT", 120);
    __atomic_add_fetch(&comm->shared->joined, 1, __ATOMIC_ACQ_REL);
    while (look(&comm->shared->joined) < ranks)
        if (!wait_more(&patience)) return timed_out("HcclCommInitRootInfo", patience.limit);
    int owner, owned;
    if (sscanf(root_info, "/proc/%d/fd/%d", &owner, &owned) == 2 && owner == getpid()) close(owned);
    return SUCCESS;
}

int HcclCommInitRootInfoConfig(uint32_t ranks, const void *root_info, uint32_t rank, const void *config, void **made) {
    return HcclCommInitRootInfo(ranks, root_info, rank, made);
}

int HcclCommDestroy(void *handle) {
    struct communicator *comm = handle;
    munmap(comm->shared, sizeof(struct shared));
    free(comm);
    return SUCCESS;
}

int HcclGetCommName(void *comm, char *name) {
    snprintf(name, NAME_BYTES, "%s", ((struct communicator *)comm)->name);
    return SUCCESS;
}

int HcclGetRankSize(void *comm, uint32_t *ranks) { *ranks = ((struct communicator *)comm)->ranks; return SUCCESS; }
int HcclGetRankId(void *comm, uint32_t *rank) { *rank = ((struct communicator *)comm)->rank; return SUCCESS; }
int HcclGetCommAsyncError(void *comm, int *error) { *error = SUCCESS; return SUCCESS; }
int HcclCommResume(void *comm) { return SUCCESS; }
int HcclSetConfig(int config, int value) { return SUCCESS; }
uint32_t HcclGetCommConfigCapability(void) { return CONFIG_CAPABILITY; }
const char *HcclGetErrorString(int code) { return code == E_TIMEOUT ? "timeout" : "error of the stand-in for HCCL"; }
