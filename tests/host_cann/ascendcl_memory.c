/* libascendcl: memory.
 *
 * A device is one contiguous range of addresses. Which device a pointer belongs to is therefore arithmetic, and a
 * kernel can view any tensor through one array. Pages are committed when they are touched and given back when freed.
 * The range is a file without a name, so that other processes can be given some of it (ascendcl_ipc.c).
 *
 *   HOST_CANN_MEMORY_MIB   memory of each device, for this process (4096)
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "acl/acl.h"
#include "host_cann.h"

#define ALIGNMENT 512    /* what aclrtMalloc promises, and counts */
#define PAGE 4096        /* granularity of addresses, so that what is freed and shared is whole pages */
#define GRANULE (2u << 20) /* granularity of physical memory */

struct block { /* blocks of a device tile its range, in order of address */
    size_t offset, bytes;
    bool used;
    size_t charged; /* how much of the device's memory it holds; a reserved range holds none until it is mapped */
    struct block *next;
};

struct mapping { /* physical memory, and where it is mapped */
    int device;
    size_t bytes;
    void *address;
    struct mapping *next;
};

static struct {
    char *base;
    int file;
    size_t charged;
    struct block *blocks;
} memory[MAX_DEVICES];
static struct mapping *mappings;
static size_t memory_bytes, range_bytes;
static pid_t owner;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static void lay_out(void) {
    memory_bytes = (size_t)host_cann_number("HOST_CANN_MEMORY_MIB", 4096) << 20;
    range_bytes = 8 * memory_bytes + ((size_t)1 << 32); /* addresses cost nothing; reserved ranges need them */
    owner = getpid();
    for (int device = 0; device < host_cann_device_count(); device++) {
        int file = memfd_create("host_cann_memory", MFD_CLOEXEC);
        char *base = MAP_FAILED;
        if (file >= 0 && !ftruncate(file, (off_t)range_bytes))
            base = mmap(NULL, range_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
        if (base == MAP_FAILED) {
            fprintf(stderr, "host_cann: no %zu bytes of address space for device %d\n", range_bytes, device);
            abort();
        }
        memory[device].base = base;
        memory[device].file = file;
        memory[device].blocks = calloc(1, sizeof(struct block));
        memory[device].blocks->bytes = range_bytes;
    }
}

char *host_cann_memory(int device, size_t *bytes) {
    pthread_once(&once, lay_out);
    if (device < 0 || device >= host_cann_device_count()) return NULL;
    *bytes = range_bytes;
    return memory[device].base;
}

int host_cann_device_of(const void *address, size_t bytes) {
    pthread_once(&once, lay_out);
    const char *start = address;
    for (int device = 0; device < host_cann_device_count(); device++) {
        const char *base = memory[device].base;
        if (start >= base && start < base + range_bytes) return bytes <= range_bytes - (size_t)(start - base) ? device : -1;
    }
    return -1;
}

/* Gives pages back. A forked child must not: the file is its parent's memory, too. */
static void discard(void *address, size_t bytes) {
    if (getpid() == owner) madvise(address, bytes, MADV_REMOVE);
}

static int no_device(void) { return host_cann_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread"); }

static int charge(int device, size_t bytes) {
    if (bytes > memory_bytes - memory[device].charged)
        return host_cann_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of memory: device %d has %zu of %zu bytes free, %zu wanted",
                              device, memory_bytes - memory[device].charged, memory_bytes, bytes);
    memory[device].charged += bytes;
    return ACL_SUCCESS;
}

/* First fit. Called with the lock held. */
static int take(int device, size_t bytes, size_t charged, void **address) {
    int error = charge(device, charged);
    if (error) return error;
    for (struct block *block = memory[device].blocks; block; block = block->next) {
        if (block->used || block->bytes < bytes) continue;
        if (block->bytes > bytes) {
            struct block *rest = calloc(1, sizeof *rest);
            *rest = (struct block){block->offset + bytes, block->bytes - bytes, false, 0, block->next};
            block->next = rest;
            block->bytes = bytes;
        }
        block->used = true;
        block->charged = charged;
        *address = memory[device].base + block->offset;
        return ACL_SUCCESS;
    }
    memory[device].charged -= charged;
    return host_cann_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d has no range of %zu addresses left", device, bytes);
}

/* Called with the lock held. */
static int give_back(void *address) {
    int device = host_cann_device_of(address, 0);
    struct block *before = NULL;
    if (device >= 0)
        for (struct block *block = memory[device].blocks; block; before = block, block = block->next) {
            if (memory[device].base + block->offset != address || !block->used) continue;
            memory[device].charged -= block->charged;
            discard(address, block->bytes);
            block->used = false;
            block->charged = 0;
            if (block->next && !block->next->used) {
                struct block *after = block->next;
                block->bytes += after->bytes;
                block->next = after->next;
                free(after);
            }
            if (before && !before->used) {
                before->bytes += block->bytes;
                before->next = block->next;
                free(block);
            }
            return ACL_SUCCESS;
        }
    return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "%p was not allocated on a device, or was freed before", address);
}

/* Adds or gives back a range of addresses. */
static int reserve(int device, size_t bytes, size_t charged, void **address) {
    pthread_once(&once, lay_out);
    pthread_mutex_lock(&lock);
    int error = take(device, bytes, charged, address);
    pthread_mutex_unlock(&lock);
    return error;
}

/* Called with a device, unless only addresses are wanted: torch_npu tries that out before it sets a device. */
static int allocate(size_t bytes, bool charged, void **address) {
    int device = host_cann_current_device();
    if (device < 0 && charged) return no_device();
    if (device < 0) device = 0;
    int error = host_cann_check_device(device);
    if (error) return error;
    bytes = round_up(bytes ? bytes : 1, charged ? ALIGNMENT : GRANULE);
    return reserve(device, round_up(bytes, PAGE), charged ? bytes : 0, address);
}

static size_t size_of_block(const void *address) {
    int device = host_cann_device_of(address, 0);
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (struct block *block = device < 0 ? NULL : memory[device].blocks; block; block = block->next)
        if (memory[device].base + block->offset == address) bytes = block->bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}

static int release(void *address) {
    if (host_cann_shared(address, size_of_block(address)))
        return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "%p is shared: aclrtIpcMemClose comes before aclrtFree", address);
    pthread_mutex_lock(&lock);
    int error = give_back(address);
    pthread_mutex_unlock(&lock);
    return error;
}

/* ---- for other processes, see ascendcl_ipc.c ---------------------------------------------------------------------- */

int host_cann_memory_file(int device) { return memory[device].file; }

bool host_cann_allocated(const void *address, size_t bytes) {
    int device = host_cann_device_of(address, bytes);
    bool found = false;
    pthread_mutex_lock(&lock);
    for (struct block *block = device < 0 ? NULL : memory[device].blocks; block; block = block->next) {
        size_t offset = (size_t)((const char *)address - memory[device].base);
        found |= block->charged && block->offset <= offset && offset + bytes <= block->offset + block->bytes;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

int host_cann_reserve(int device, size_t bytes, void **range) { return reserve(device, round_up(bytes, PAGE), 0, range); }

int host_cann_release_range(void *range) {
    int device = host_cann_device_of(range, 0);
    pthread_mutex_lock(&lock);
    for (struct block *block = device < 0 ? NULL : memory[device].blocks; block; block = block->next)
        if (memory[device].base + block->offset == range)
            mmap(range, block->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory[device].file,
                 (off_t)block->offset);
    int error = give_back(range);
    pthread_mutex_unlock(&lock);
    return error;
}

/* ---- allocation --------------------------------------------------------------------------------------------------- */

aclError aclrtMalloc(void **address, size_t size, aclrtMemMallocPolicy policy) { return allocate(size, true, address); }
aclError aclrtMallocAlign32(void **address, size_t size, aclrtMemMallocPolicy policy) { return allocate(size, true, address); }
aclError aclrtFree(void *address) { return address ? release(address) : ACL_SUCCESS; }

aclError aclrtMallocHost(void **address, size_t size) {
    return posix_memalign(address, ALIGNMENT, size ? size : ALIGNMENT)
               ? host_cann_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no %zu bytes left", size)
               : ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void **address, uint64_t size, aclrtMallocConfig *cfg) { return aclrtMallocHost(address, size); }
aclError aclrtFreeHost(void *address) { free(address); return ACL_SUCCESS; }

aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free_bytes, size_t *total_bytes) {
    int device = host_cann_current_device();
    if (device < 0) return no_device();
    pthread_once(&once, lay_out);
    *total_bytes = memory_bytes;
    *free_bytes = memory_bytes - memory[device].charged;
    return ACL_SUCCESS;
}

/* Virtual memory, for expandable_segments:True. Memory is there all the time; mapping only accounts for it. */

aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *expected, uint64_t flags) {
    return allocate(size, false, address);
}

aclError aclrtReleaseMemAddress(void *address) { return release(address); }

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, aclrtMemGranularityOptions option, size_t *granule) {
    *granule = GRANULE;
    return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *prop, uint64_t flags) {
    int device = (int)prop->location.id, error = host_cann_check_device(device);
    if (error) return error;
    pthread_once(&once, lay_out);
    pthread_mutex_lock(&lock);
    error = charge(device, size);
    if (!error) {
        struct mapping *mapping = calloc(1, sizeof *mapping);
        *mapping = (struct mapping){device, size, NULL, mappings};
        *handle = mappings = mapping;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    struct mapping *mapping = handle;
    if (host_cann_device_of(address, size) != mapping->device || size > mapping->bytes)
        return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes at %p cannot map memory of device %d", size, address,
                              mapping->device);
    mapping->address = address;
    return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void *address) {
    int error = ACL_ERROR_RT_PARAM_INVALID;
    pthread_mutex_lock(&lock);
    for (struct mapping *mapping = mappings; mapping; mapping = mapping->next)
        if (mapping->address == address) {
            discard(address, mapping->bytes);
            mapping->address = NULL;
            error = ACL_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    return error ? host_cann_fail(error, "nothing is mapped at %p", address) : ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    int error = ACL_ERROR_RT_PARAM_INVALID;
    pthread_mutex_lock(&lock);
    for (struct mapping **link = &mappings; *link; link = &(*link)->next)
        if (*link == handle) {
            struct mapping *mapping = *link;
            memory[mapping->device].charged -= mapping->bytes;
            *link = mapping->next;
            free(mapping);
            error = ACL_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&lock);
    return error ? host_cann_fail(error, "%p is no physical memory", handle) : ACL_SUCCESS;
}

/* ---- copies ---------------------------------------------------------------------------------------------------- */

static int check_place(const char *what, const void *address, size_t bytes, bool device) {
    if ((host_cann_device_of(address, bytes) >= 0) == device) return ACL_SUCCESS;
    return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "%s of %zu bytes at %p is not in %s memory", what, bytes, address,
                          device ? "device" : "host");
}

aclError aclrtMemcpy(void *dst, size_t room, const void *src, size_t count, aclrtMemcpyKind kind) {
    int error = ACL_SUCCESS;
    if (count > room) return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "a copy of %zu bytes into %zu", count, room);
    if (kind > ACL_MEMCPY_DEVICE_TO_DEVICE)
        return host_cann_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "copies of kind %d are not supported", (int)kind);
    error = check_place("the source", src, count, kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE);
    if (!error)
        error = check_place("the target", dst, count,
                            kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE);
    if (!error) memmove(dst, src, count);
    return error;
}

aclError aclrtMemcpyAsync(void *dst, size_t room, const void *src, size_t count, aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpy(dst, room, src, count, kind);
}

aclError aclrtMemset(void *address, size_t room, int32_t value, size_t count) {
    int error = check_place("the target", address, count, true);
    if (!error && count > room) error = host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "memset of %zu bytes in %zu", count, room);
    if (!error) memset(address, value, count);
    return error;
}

aclError aclrtMemsetAsync(void *address, size_t room, int32_t value, size_t count, aclrtStream stream) {
    return aclrtMemset(address, room, value, count);
}

