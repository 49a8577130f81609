/* Functions that torch_npu is linked against and that the stand-in does not have: each fails with its own name.
 * Functions that torch_npu looks up by name when it needs them are simply not there; it names them itself. */
#include <stdio.h>

#include "host_cann.h"

#define ACL_ERROR_RT_FEATURE_NOT_SUPPORT 207000
#define ABSENT(name)                                                                                   \
    int name(void) {                                                                                   \
        fprintf(stderr, "host_cann: " #name " has no stand-in\n");                                     \
        return host_cann_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, #name " has no stand-in");             \
    }

ABSENT(aclGetTensorDescDimV2)
ABSENT(aclGetTensorDescFormat)
ABSENT(aclGetTensorDescNumDims)
ABSENT(aclGetTensorDescType)
ABSENT(aclopSetAttrBool)
ABSENT(aclopSetAttrDataType)
ABSENT(aclopSetAttrFloat)
ABSENT(aclopSetAttrInt)
ABSENT(aclopSetAttrListBool)
ABSENT(aclopSetAttrListFloat)
ABSENT(aclopSetAttrListInt)
ABSENT(aclopSetAttrListListInt)
ABSENT(aclopSetAttrString)
ABSENT(aclrtBinaryGetFunction)
ABSENT(aclrtBinaryLoadFromData)
ABSENT(aclrtGetFunctionAddr)
ABSENT(aclrtLaunchHostFunc)
ABSENT(aclrtMemcpyBatchAsync)
ABSENT(aclrtMemExportToShareableHandle)
ABSENT(aclrtMemImportFromShareableHandle)
ABSENT(aclrtMemSetPidToShareableHandle)
ABSENT(rtDevBinaryRegister)
ABSENT(rtFunctionRegister)
ABSENT(rtGetC2cCtrlAddr)
ABSENT(rtKernelLaunch)
