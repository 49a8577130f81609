/* What the stand-in libraries share. libascendcl defines these functions; libhccl and libopapi use them. */
#ifndef HOST_CANN_H
#define HOST_CANN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Notes why the current thread's call fails, for aclGetRecentErrMsg, and gives `code` back. */
__attribute__((format(printf, 2, 3))) int host_cann_fail(int code, const char *format, ...);

/* The device whose memory holds all of [address, address + bytes), or -1 for host memory. */
int host_cann_device_of(const void *address, size_t bytes);

#define MAX_DEVICES 16

/* An environment variable's number. */
long host_cann_number(const char *name, long otherwise);

/* How many devices this process sees. */
int host_cann_device_count(void);

/* The current device of this thread, or -1. */
int host_cann_current_device(void);

/* ACL_SUCCESS if there is such a device, or the error to give back. */
int host_cann_check_device(int device);

/* First byte and size of a device's address range, for the kernels that view it. */
char *host_cann_memory(int device, size_t *bytes);

/* The number that a device of this process has in the machine. */
int host_cann_number_of(int device);

/* ---- between ascendcl_memory.c and ascendcl_ipc.c ---------------------------------------------------------------- */

/* The file that holds a device's memory. */
int host_cann_memory_file(int device);

/* Whether all of [address, address + bytes) was allocated in one piece. */
bool host_cann_allocated(const void *address, size_t bytes);

/* Whether another process may open some of [address, address + bytes). */
bool host_cann_shared(const void *address, size_t bytes);

/* A range of a device's addresses without memory, and its return, after which it is the device's own memory again. */
int host_cann_reserve(int device, size_t bytes, void **range);
int host_cann_release_range(void *range);

#endif
