/* libascendcl: device memory that several processes see.
 *
 * A device's memory is a file without a name. A process lists what it shares in another such file, and the key says
 * where: process, file, place in the list, and a random number. Whoever has the key opens both files through /proc, and
 * maps the memory into the range of its own current device. Nothing is left behind however a process ends.
 *
 * The order is CANN's: the importers close, then the exporter closes, then it frees the memory.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "acl/acl.h"
#include "host_cann.h"

#define KEY_BYTES 65
#define EXPORTS 1024
#define PROCESSES 32 /* that may open one export */
#define PAGE 4096
#define LIST_NAME "host_cann_exports"
#define KEY_FORMAT "host_cann %d %d %d %016" PRIx64
#define ANY_PROCESS 1 /* ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION */
#define PEER_ACCESS 1 /* ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS */

struct export {
    uint64_t secret; /* 0: nothing is shared here */
    uint64_t flags;
    size_t offset, bytes;
    int file, device; /* the device's number in the machine */
    int32_t processes[PROCESSES];
};

struct import {
    char key[KEY_BYTES];
    void *range;
    struct import *next;
};

struct key {
    int process, file, place;
    uint64_t secret;
};

static struct export *exports;
static int exports_file = -1;
static struct import *imports;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int refuse(const char *key, const char *reason) {
    return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "shared memory '%.64s': %s", key, reason);
}

static bool read_key(const char *text, struct key *key) {
    int end = 0;
    return sscanf(text, KEY_FORMAT "%n", &key->process, &key->file, &key->place, &key->secret, &end) == 4 && !text[end] &&
           key->place >= 0 && key->place < EXPORTS && key->secret;
}

/* ---- the exporter ------------------------------------------------------------------------------------------------- */

static int open_list(void) {
    if (exports) return ACL_SUCCESS;
    exports_file = memfd_create(LIST_NAME, MFD_CLOEXEC);
    if (exports_file < 0 || ftruncate(exports_file, EXPORTS * sizeof *exports))
        return host_cann_fail(ACL_ERROR_RT_INTERNAL_ERROR, "no list of exports: %s", strerror(errno));
    exports = mmap(NULL, EXPORTS * sizeof *exports, PROT_READ | PROT_WRITE, MAP_SHARED, exports_file, 0);
    if (exports != MAP_FAILED) return ACL_SUCCESS;
    exports = NULL;
    return host_cann_fail(ACL_ERROR_RT_INTERNAL_ERROR, "no list of exports: %s", strerror(errno));
}

static struct export *own_export(const char *text) {
    struct key key;
    if (!exports || !read_key(text, &key) || key.process != getpid() || key.file != exports_file) return NULL;
    return exports[key.place].secret == key.secret ? &exports[key.place] : NULL;
}

static int add_export(int device, const char *address, size_t bytes, uint64_t flags, char *key) {
    int error = open_list(), place = 0;
    if (error) return error;
    while (place < EXPORTS && exports[place].secret) place++;
    if (place == EXPORTS) return host_cann_fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "%d exports are open", EXPORTS);
    size_t unused;
    struct export *export = &exports[place];
    *export = (struct export){0, flags, (size_t)(address - host_cann_memory(device, &unused)), bytes,
                              host_cann_memory_file(device), host_cann_number_of(device), {0}};
    uint64_t secret = 0;
    while (!secret)
        if (getrandom(&secret, sizeof secret, 0) != sizeof secret) secret = 0;
    __atomic_store_n(&export->secret, secret, __ATOMIC_RELEASE);
    snprintf(key, KEY_BYTES, KEY_FORMAT, getpid(), exports_file, place, secret);
    return ACL_SUCCESS;
}

aclError aclrtIpcMemGetExportKey(void *address, size_t size, char *key, size_t len, uint64_t flags) {
    int device = host_cann_device_of(address, size);
    if (len != KEY_BYTES) return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "a key has 65 bytes, not %zu", len);
    if (device < 0 || !size || !host_cann_allocated(address, size))
        return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes at %p are not memory from aclrtMalloc", size, address);
    pthread_mutex_lock(&lock);
    int error = add_export(device, address, size, flags, key);
    pthread_mutex_unlock(&lock);
    return error;
}

aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count) {
    pthread_mutex_lock(&lock);
    struct export *export = own_export(key);
    int error = !export ? refuse(key, "this process does not share it") : ACL_SUCCESS;
    size_t place = 0;
    while (export && place < PROCESSES && export->processes[place]) place++;
    if (export && place + count > PROCESSES) error = refuse(key, "too many processes may open it");
    if (!error) memcpy(export->processes + place, pids, count * sizeof *pids);
    pthread_mutex_unlock(&lock);
    return error;
}

bool host_cann_shared(const void *address, size_t bytes) {
    int device = host_cann_device_of(address, bytes);
    bool shared = false;
    size_t unused;
    pthread_mutex_lock(&lock);
    for (int place = 0; exports && device >= 0 && place < EXPORTS; place++) {
        const struct export *export = &exports[place];
        const char *start = host_cann_memory(device, &unused) + export->offset;
        shared |= export->secret && export->file == host_cann_memory_file(device) && start < (const char *)address + bytes &&
                  (const char *)address < start + export->bytes;
    }
    pthread_mutex_unlock(&lock);
    return shared;
}

/* ---- the importer ------------------------------------------------------------------------------------------------- */

static int open_of(int process, int file, int mode) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
    return open(path, mode | O_CLOEXEC);
}

/* Reads the entry of another process's list. */
static int look_up(const char *text, const struct key *key, struct export *found) {
    char path[64], target[64] = "";
    snprintf(path, sizeof path, "/proc/%d/fd/%d", key->process, key->file);
    if (readlink(path, target, sizeof target - 1) < 0) return refuse(text, "its process has ended");
    if (strncmp(target, "/memfd:" LIST_NAME, strlen("/memfd:" LIST_NAME))) return refuse(text, "this is no key");
    int file = open_of(key->process, key->file, O_RDONLY);
    bool read = file >= 0 && pread(file, found, sizeof *found, key->place * (off_t)sizeof *found) == sizeof *found;
    if (file >= 0) close(file);
    if (!read) return refuse(text, strerror(errno));
    return found->secret == key->secret ? ACL_SUCCESS : refuse(text, "it is not shared, or not any more");
}

static int check_importer(const char *text, const struct export *export, int device, uint64_t flags) {
    bool allowed = export->flags & ANY_PROCESS;
    for (int i = 0; i < PROCESSES; i++) allowed |= export->processes[i] == getpid();
    if (!allowed) return refuse(text, "this process was not named by aclrtIpcMemSetImportPid");
    if (export->device != host_cann_number_of(device) && !(flags & PEER_ACCESS))
        return refuse(text, "it is on another device, and access to peers was not asked for");
    return ACL_SUCCESS;
}

static int map(const char *text, const struct key *key, const struct export *export, int device, void **range) {
    size_t skipped = export->offset % PAGE, bytes = (skipped + export->bytes + PAGE - 1) / PAGE * PAGE;
    int error = host_cann_reserve(device, bytes, range);
    if (error) return error;
    int file = open_of(key->process, export->file, O_RDWR);
    void *at = file < 0 ? MAP_FAILED
                        : mmap(*range, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                               (off_t)(export->offset - skipped));
    if (file >= 0) close(file);
    if (at != MAP_FAILED) return ACL_SUCCESS;
    host_cann_release_range(*range);
    return refuse(text, strerror(errno));
}

static int open_import(const char *text, int device, uint64_t flags, void **address) {
    struct key key;
    struct export export;
    void *range;
    if (!read_key(text, &key)) return refuse(text, "this is no key");
    if (key.process == getpid()) return refuse(text, "a process cannot open what it shares itself");
    for (struct import *import = imports; import; import = import->next)
        if (!strncmp(import->key, text, KEY_BYTES)) return refuse(text, "this process has it open");
    int error = look_up(text, &key, &export);
    if (!error) error = check_importer(text, &export, device, flags);
    if (!error) error = map(text, &key, &export, device, &range);
    if (error) return error;
    struct import *import = calloc(1, sizeof *import);
    *import = (struct import){.range = range, .next = imports};
    snprintf(import->key, KEY_BYTES, "%s", text);
    imports = import;
    *address = (char *)range + export.offset % PAGE;
    return ACL_SUCCESS;
}

aclError aclrtIpcMemImportByKey(void **address, const char *key, uint64_t flags) {
    int device = host_cann_current_device();
    if (device < 0) return host_cann_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    pthread_mutex_lock(&lock);
    int error = open_import(key, device, flags, address);
    pthread_mutex_unlock(&lock);
    return error;
}

/* By the exporter, nobody can open it any more; by an importer, its addresses are free. */
aclError aclrtIpcMemClose(const char *key) {
    int error = ACL_ERROR_RT_PARAM_INVALID;
    pthread_mutex_lock(&lock);
    struct export *export = own_export(key);
    if (export) export->secret = 0, error = ACL_SUCCESS;
    for (struct import **link = &imports; error && *link; link = &(*link)->next)
        if (!strncmp((*link)->key, key, KEY_BYTES)) {
            struct import *import = *link;
            error = host_cann_release_range(import->range);
            *link = import->next;
            free(import);
            break;
        }
    pthread_mutex_unlock(&lock);
    return error ? refuse(key, "this process neither shares it nor has it open") : ACL_SUCCESS;
}
