/* What the files of libhccl share. */
#ifndef HCCL_HOST_H
#define HCCL_HOST_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "host_cann.h"

/* The values of hccl_types.h, which is C++ only. */
enum { SUCCESS = 0, E_PARA = 1, E_MEMORY = 3, E_NOT_SUPPORT = 5, E_SYSCALL = 8, E_TIMEOUT = 9 };
enum { SUM, PROD, MAX, MIN, NO_REDUCTION = -1 };
enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BFP16, TYPES };

extern const char *const type_names[TYPES];
extern const size_t type_bytes[TYPES];

#define MAX_RANKS 16
#define NAME_BYTES 128
#define CHUNK (1u << 20)
#define LETTER (256u << 10)

struct call { /* what the ranks of a collective must agree on */
    char name[24];
    uint64_t count;
    int type, op, root;
};

struct slot {
    struct call call;
    char data[CHUNK];
};

struct mailbox { /* from one rank to another */
    uint32_t full;
    int type;
    uint64_t count; /* of the whole message */
    char data[LETTER];
};

struct shared {
    uint32_t joined, arrived, sense;
    struct slot slots[MAX_RANKS];
    struct mailbox mail[MAX_RANKS][MAX_RANKS];
};

struct communicator {
    uint32_t ranks, rank, sense;
    struct shared *shared;
    char name[NAME_BYTES];
};

struct patience {
    double limit, start;
    unsigned turns;
};

/* Starts to wait for other ranks in a call. */
struct patience for_peers(void);

/* Waits a little; false when the time is over. */
bool wait_more(struct patience *patience);

int timed_out(const char *where, double limit);

/* Returns when all ranks are here. */
int meet(struct communicator *comm, const char *where);

/* Words that other ranks write and read. */
uint32_t look(const uint32_t *word);
void put(uint32_t *word, uint32_t value);

int check_buffer(const char *name, const void *buffer, size_t bytes);
int check_type(const char *name, int type, int op);

#define TRY(call) do { int error_ = (call); if (error_) return error_; } while (0)

#endif
