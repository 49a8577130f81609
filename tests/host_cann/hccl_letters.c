/* libhccl: data from rank to rank, through a mailbox for every pair. */
#include <stdlib.h>
#include <string.h>

#include "hccl_host.h"

struct letter {
    bool sending;
    char *data;
    uint64_t count;
    int type;
    uint32_t peer;
    size_t done;
};

/* Moves one part of a letter if the mailbox is ready for it, and says so. */
static int pass(struct communicator *comm, struct letter *letter, bool *moved) {
    struct mailbox *box = letter->sending ? &comm->shared->mail[comm->rank][letter->peer]
                                          : &comm->shared->mail[letter->peer][comm->rank];
    *moved = look(&box->full) != letter->sending;
    if (!*moved) return SUCCESS;
    size_t left = letter->count * type_bytes[letter->type] - letter->done, part = left < LETTER ? left : LETTER;
    if (letter->sending) {
        box->type = letter->type;
        box->count = letter->count;
        memcpy(box->data, letter->data + letter->done, part);
    } else {
        if (box->type != letter->type || box->count != letter->count)
            return host_cann_fail(E_PARA, "the ranks disagree: rank %u sends %lu %s, rank %u receives %lu %s", letter->peer,
                                  (unsigned long)box->count, type_names[box->type], comm->rank,
                                  (unsigned long)letter->count, type_names[letter->type]);
        memcpy(letter->data + letter->done, box->data, part);
    }
    letter->done += part;
    put(&box->full, letter->sending);
    return SUCCESS;
}

static int exchange(struct communicator *comm, const char *name, struct letter *letters, uint32_t count) {
    struct patience patience = for_peers();
    for (uint32_t i = 0; i < count; i++) {
        TRY(check_type(name, letters[i].type, NO_REDUCTION));
        TRY(check_buffer(name, letters[i].data, letters[i].count * type_bytes[letters[i].type]));
        if (letters[i].peer >= comm->ranks)
            return host_cann_fail(E_PARA, "%s: rank %u of %u does not exist", name, letters[i].peer, comm->ranks);
    }
    for (uint32_t open = count; open;) {
        bool progress = false, moved;
        open = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (letters[i].done == letters[i].count * type_bytes[letters[i].type]) continue;
            TRY(pass(comm, &letters[i], &moved));
            progress |= moved;
            open += letters[i].done < letters[i].count * type_bytes[letters[i].type];
        }
        if (progress) patience = for_peers();
        else if (open && !wait_more(&patience)) return timed_out(name, patience.limit);
    }
    return SUCCESS;
}

/* Between the two calls of libhcomm, sends and receives are only noted; the last call exchanges them all at once. */
static _Thread_local struct {
    int depth;
    struct communicator *comm;
    uint32_t count;
    struct letter letters[2 * MAX_RANKS];
} group;

static int one(struct communicator *comm, const char *name, struct letter letter) {
    if (!group.depth) return exchange(comm, name, &letter, 1);
    if (group.comm && group.comm != comm) return host_cann_fail(E_PARA, "%s: a group of two communicators", name);
    if (group.count == 2 * MAX_RANKS) return host_cann_fail(E_PARA, "%s: more than %u in a group", name, group.count);
    group.comm = comm;
    group.letters[group.count++] = letter;
    return SUCCESS;
}

int host_cann_group_start(void) {
    group.depth++;
    return SUCCESS;
}

int host_cann_group_end(void) {
    if (!group.depth) return host_cann_fail(E_PARA, "HcclGroupEnd without HcclGroupStart");
    if (--group.depth || !group.count) return SUCCESS;
    uint32_t count = group.count;
    struct communicator *comm = group.comm;
    group.count = 0;
    group.comm = NULL;
    return exchange(comm, "HcclGroupEnd", group.letters, count);
}

int HcclSend(void *buffer, uint64_t count, int type, uint32_t peer, void *comm, void *stream) {
    return one(comm, "HcclSend", (struct letter){true, buffer, count, type, peer, 0});
}

int HcclRecv(void *buffer, uint64_t count, int type, uint32_t peer, void *comm, void *stream) {
    return one(comm, "HcclRecv", (struct letter){false, buffer, count, type, peer, 0});
}

struct send_recv_item { /* HcclSendRecvItem */
    int receiving;
    void *buffer;
    uint64_t count;
    int type;
    uint32_t peer;
};

int HcclBatchSendRecv(struct send_recv_item *items, uint32_t count, void *comm, void *stream) {
    struct letter *letters = calloc(count, sizeof *letters);
    for (uint32_t i = 0; i < count; i++)
        letters[i] = (struct letter){!items[i].receiving, items[i].buffer, items[i].count, items[i].type, items[i].peer, 0};
    int error = exchange(comm, "HcclBatchSendRecv", letters, count);
    free(letters);
    return error;
}

int HcclAlltoAllV(const void *give, const uint64_t *give_counts, const uint64_t *give_starts, int give_type,
                  const void *take, const uint64_t *take_counts, const uint64_t *take_starts, int take_type,
                  void *handle, void *stream) {
    struct communicator *comm = handle;
    struct letter letters[2 * MAX_RANKS];
    TRY(check_type("HcclAlltoAllV", give_type, NO_REDUCTION));
    TRY(check_type("HcclAlltoAllV", take_type, NO_REDUCTION));
    for (uint32_t rank = 0; rank < comm->ranks; rank++) { /* a rank's part for itself goes through a mailbox, too */
        char *out = (char *)give + give_starts[rank] * type_bytes[give_type];
        char *in = (char *)take + take_starts[rank] * type_bytes[take_type];
        letters[2 * rank] = (struct letter){true, out, give_counts[rank], give_type, rank, 0};
        letters[2 * rank + 1] = (struct letter){false, in, take_counts[rank], take_type, rank, 0};
    }
    return exchange(comm, "HcclAlltoAllV", letters, 2 * comm->ranks);
}

int HcclAlltoAll(const void *give, uint64_t give_count, int give_type, const void *take, uint64_t take_count,
                 int take_type, void *comm, void *stream) {
    uint64_t counts[MAX_RANKS], starts[MAX_RANKS];
    for (uint64_t rank = 0; rank < MAX_RANKS; rank++) counts[rank] = give_count, starts[rank] = rank * give_count;
    return HcclAlltoAllV(give, counts, starts, give_type, take, counts, starts, take_type, comm, stream);
}
