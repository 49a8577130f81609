/* libascendcl: devices, streams and events. It computes nothing; memory is in ascendcl_memory.c.
 *
 * Work is done when it is asked for, so a stream is always idle and an event is always complete.
 *
 *   HOST_CANN_DEVICES           devices in the machine, numbered from 0 (2)
 *   HOST_CANN_SOC               name of the chip (Ascend910B2)
 *   HOST_CANN_DRIVER=absent     every call that needs the driver fails, as on a machine without it
 *   ASCEND_RT_VISIBLE_DEVICES   which of them a process sees; a number that does not exist hides it and the rest
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "host_cann.h"

#define HOST_CANN_VERSION "9.1.0"

#define CORES 24 /* cube cores of an Ascend910B2; it has as many pairs of vector cores */
#define VERSION_MAJOR 1
#define VERSION_MINOR 15

/* ---- errors ---------------------------------------------------------------------------------------------------- */

static __thread char last_error[2048] = "";

int host_cann_fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return code;
}

const char *aclGetRecentErrMsg(void) {
    return last_error[0] ? last_error : "no error was noted by the stand-in for CANN";
}

void aclAppLog(aclLogLevel level, const char *func, const char *file, uint32_t line, const char *fmt, ...) {
}

int32_t CheckLogLevel(int32_t module, int32_t level) { return 0; } /* nothing is logged */
void DlogRecord(int32_t module, int32_t level, const char *fmt, ...) {}

/* ---- devices --------------------------------------------------------------------------------------------------- */

long host_cann_number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

static bool driver_absent(void) {
    const char *driver = getenv("HOST_CANN_DRIVER");
    return driver && !strcmp(driver, "absent");
}

static int no_driver(void) {
    return host_cann_fail(ACL_ERROR_RT_DRV_INTERNAL_ERROR, "HOST_CANN_DRIVER=absent: there is no driver");
}

static int installed_devices(void) {
    long count = host_cann_number("HOST_CANN_DEVICES", 2);
    return count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : (int)count;
}

/* Fills `physical` with the device behind each visible number, and returns how many there are. */
static int visible_devices(int physical[MAX_DEVICES]) {
    const char *list = getenv("ASCEND_RT_VISIBLE_DEVICES");
    int installed = installed_devices(), count = 0;
    if (!list) {
        for (; count < installed; count++) physical[count] = count;
        return count;
    }
    while (count < MAX_DEVICES) {
        char *end;
        long id = strtol(list, &end, 10);
        if (end == list || id < 0 || id >= installed) break;
        for (int i = 0; i < count; i++)
            if (physical[i] == id) return count; /* a repeated number ends the list, too */
        physical[count++] = (int)id;
        if (*end != ',') break;
        list = end + 1;
    }
    return count;
}

int host_cann_device_count(void) {
    static int count = -1; /* CANN reads its environment once */
    int physical[MAX_DEVICES];
    if (count < 0) count = visible_devices(physical);
    return count;
}

int host_cann_number_of(int device) {
    int physical[MAX_DEVICES];
    return device < visible_devices(physical) ? physical[device] : -1;
}

static __thread int current_device = -1;
static int contexts[MAX_DEVICES]; /* a context is the address of its device's element */

int host_cann_current_device(void) { return current_device; }

int host_cann_check_device(int device) {
    if (driver_absent()) return no_driver();
    if (device >= 0 && device < host_cann_device_count()) return ACL_SUCCESS;
    return host_cann_fail(ACL_ERROR_RT_INVALID_DEVICEID, "device %d does not exist: this process sees %d device(s)",
                          device, host_cann_device_count());
}

aclError aclInit(const char *configPath) { return driver_absent() ? no_driver() : ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }

const char *aclrtGetSocName(void) {
    const char *name = getenv("HOST_CANN_SOC");
    return name && *name ? name : "Ascend910B2";
}

aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion) {
    *majorVersion = VERSION_MAJOR, *minorVersion = VERSION_MINOR, *patchVersion = 0;
    return ACL_SUCCESS;
}

/* Of CANN's packages. torch_npu chooses versions of operators by it. */
aclError aclsysGetVersionStr(char *pkgName, char *versionStr) {
    strcpy(versionStr, HOST_CANN_VERSION);
    return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    strcpy(version->version, HOST_CANN_VERSION);
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = 0;
    if (driver_absent()) return no_driver();
    *count = (uint32_t)host_cann_device_count();
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    int error = host_cann_check_device(device);
    if (!error) current_device = device;
    return error;
}

aclError aclrtGetDevice(int32_t *device) {
    if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL; /* torch_npu asks, and then sets one: no reason is noted */
    *device = current_device;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) { return host_cann_check_device(device); }

aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *context = &contexts[current_device];
    return ACL_SUCCESS;
}

aclError aclrtCreateContext(aclrtContext *context, int32_t device) {
    int error = host_cann_check_device(device);
    if (!error) *context = &contexts[device];
    return error;
}

aclError aclrtSetCurrentContext(aclrtContext context) { return aclrtSetDevice((int32_t)((int *)context - contexts)); }

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    *value = info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 2 * CORES : CORES;
    return host_cann_check_device((int)device);
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attr, int64_t *value) {
    *value = attr == ACL_DEV_ATTR_VECTOR_CORE_NUM ? 2 * CORES : CORES;
    return host_cann_check_device((int)device);
}

aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value) {
    *value = type == ACL_RT_DEV_RES_VECTOR_CORE ? 2 * CORES : CORES;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetBareTgid(int32_t *pid) { *pid = getpid(); return ACL_SUCCESS; }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) { *can = device != peer; return ACL_SUCCESS; }
aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return host_cann_check_device(peer); }

/* ---- streams and events: all work is done by the time it is asked about ----------------------------------------- */

static aclError make_handle(void **handle) {
    static int32_t count = 0;
    int32_t *made = malloc(sizeof *made);
    *made = __sync_fetch_and_add(&count, 1);
    *handle = made;
    return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream *stream) { return make_handle(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) { return make_handle(stream); }
aclError aclrtDestroyStream(aclrtStream stream) { free(stream); return ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream stream) { free(stream); return ACL_SUCCESS; }
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) { *id = stream ? *(int32_t *)stream : -1; return ACL_SUCCESS; }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) { *status = ACL_STREAM_STATUS_COMPLETE; return ACL_SUCCESS; }
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) { return ACL_SUCCESS; }
aclError aclrtSynchronizeStream(aclrtStream stream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDevice(void) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t timeout) { return ACL_ERROR_RT_THREAD_SUBSCRIBE; /* no callback is pending, ever */ }

/* Nothing is captured, ever. torch_npu asks before every use of a generator. */
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    *model = NULL;
    return ACL_SUCCESS;
}

static aclError make_event(aclrtEvent *event) { *event = calloc(1, sizeof(struct timespec)); return ACL_SUCCESS; }
aclError aclrtCreateEvent(aclrtEvent *event) { return make_event(event); }
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return make_event(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) { return make_event(event); }
aclError aclrtDestroyEvent(aclrtEvent event) { free(event); return ACL_SUCCESS; }
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent event) { return ACL_SUCCESS; }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    clock_gettime(CLOCK_MONOTONIC, event);
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent end) {
    struct timespec *from = start, *to = end;
    *ms = (float)((double)(to->tv_sec - from->tv_sec) * 1e3 + (double)(to->tv_nsec - from->tv_nsec) * 1e-6);
    return ACL_SUCCESS;
}

/* ---- settings -------------------------------------------------------------------------------------------------- */

static int64_t system_options[8];

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    if ((unsigned)option >= 8) return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "system option %d is unknown", (int)option);
    system_options[option] = value;
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    if ((unsigned)option >= 8) return host_cann_fail(ACL_ERROR_RT_PARAM_INVALID, "system option %d is unknown", (int)option);
    *value = system_options[option];
    return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t timeout) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t timeout) { return ACL_SUCCESS; }
aclError aclmdlInitDump(void) { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char *path) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump(void) { return ACL_SUCCESS; }

/* torch_npu takes its aclnn path only where operators are not compiled just in time, which "disable" says. */
static const char compile_option[] = "disable";
aclError aclSetCompileopt(aclCompileOpt option, const char *value) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt option) { return sizeof compile_option; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    snprintf(value, length, "%s", compile_option);
    return ACL_SUCCESS;
}

/* The legacy operators, compiled by name: there are none. Their descriptions are made before they are refused. */

aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dims, const int64_t *sizes, aclFormat format) { return calloc(1, 8); }
void aclDestroyTensorDesc(const aclTensorDesc *desc) { free((void *)desc); }
aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc *desc, int dims, const int64_t *sizes) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc *desc, aclMemType type) { return ACL_SUCCESS; }
void aclSetTensorDescName(aclTensorDesc *desc, const char *name) {}
aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) { return calloc(1, 8); }
aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) { free((void *)buffer); return ACL_SUCCESS; }
aclopAttr *aclopCreateAttr(void) { return calloc(1, 8); }
void aclopDestroyAttr(const aclopAttr *attr) { free((void *)attr); }

aclError aclopCompileAndExecute(const char *op, int inputs, const aclTensorDesc *const input_descs[],
                                const aclDataBuffer *const input_buffers[], int outputs,
                                const aclTensorDesc *const output_descs[], aclDataBuffer *const output_buffers[],
                                const aclopAttr *attr, aclopEngineType engine, aclopCompileType flag, const char *path,
                                aclrtStream stream) {
    fprintf(stderr, "host_cann: the legacy operator %s has no stand-in\n", op);
    return host_cann_fail(ACL_ERROR_OP_NOT_FOUND, "the legacy operator %s has no stand-in", op);
}

aclError aclopCompileAndExecuteV2(const char *op, int inputs, aclTensorDesc *input_descs[], aclDataBuffer *input_buffers[],
                                  int outputs, aclTensorDesc *output_descs[], aclDataBuffer *output_buffers[],
                                  aclopAttr *attr, aclopEngineType engine, aclopCompileType flag, const char *path,
                                  aclrtStream stream) {
    return aclopCompileAndExecute(op, 0, NULL, NULL, 0, NULL, NULL, attr, engine, flag, path, stream);
}

/* ---- profiling: nobody listens ----------------------------------------------------------------------------------- */

struct MsprofApi;
int32_t MsprofRegisterCallback(uint32_t module, void *handle) { return 0; }
uint64_t MsprofGetHashId(const char *text, size_t length) { return 0; }
int32_t MsprofReportApi(uint32_t flag, const struct MsprofApi *api) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t flag, const void *data, uint32_t length) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t flag, const void *data, uint32_t length) { return 0; }
uint64_t MsprofSysCycleTime(void) { return 0; }
