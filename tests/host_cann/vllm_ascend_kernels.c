/* libvllm_ascend_kernels: what vllm-ascend's compiled part (vllm_ascend_C) launches on the chip, in C++ names.
 *
 * Loaded before vllm-ascend's own library of this name, which is full of the chip's code, it takes its place. The
 * compiled part itself, its checks and its allocator for sleep run as they are. The products with an adapter's matrices
 * are passed on to Python like operators of libopapi; the rest, for models that the project has not, ends the process.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define ADAPTER(name) int name##GetWorkspaceSize(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, \
                                                 int64_t, int64_t, int64_t, int64_t, double, uint64_t *, void **);      \
                      int name(void *, uint64_t, void *, void *);
ADAPTER(AdapterShrink)
ADAPTER(AdapterExpand)
const char *aclGetRecentErrMsg(void);

static void check(const char *name, int error) {
    if (!error) return;
    fprintf(stderr, "host_cann: %s: %s\n", name, aclGetRecentErrMsg());
    abort(); /* the caller has no way to hear of it */
}

static int64_t number(const void *address) { return (int64_t)(intptr_t)address; }

static void shrink(int bf16, void *x, void *weight, void *indices, uint32_t count, void *lengths, void *y, uint32_t rows,
                   uint32_t hidden, uint32_t rank, float scale) {
    uint64_t bytes;
    void *executor;
    int error = AdapterShrinkGetWorkspaceSize(bf16, number(x), number(weight), number(indices), count, number(lengths),
                                              number(y), rows, hidden, rank, 0, rank, scale, &bytes, &executor);
    check("AdapterShrink", error ? error : AdapterShrink(NULL, 0, executor, NULL));
}

static void expand(int bf16, void *x, void *weight, void *indices, uint32_t count, void *lengths, void *y, uint32_t rows,
                   uint32_t rank, uint32_t width, uint32_t offset, uint32_t full_width) {
    uint64_t bytes;
    void *executor;
    int error = AdapterExpandGetWorkspaceSize(bf16, number(x), number(weight), number(indices), count, number(lengths),
                                              number(y), rows, rank, width, offset, full_width, 1, &bytes, &executor);
    check("AdapterExpand", error ? error : AdapterExpand(NULL, 0, executor, NULL));
}

/* vllm_ascend::bgmv_shrink_impl and so on; type is 1 for bfloat16 (AscendType) */

void _ZN11vllm_ascend16bgmv_shrink_implENS_10AscendTypeEPvS1_S1_S1_jS1_jjjjf(
    int type, void *stream, void *x, void *weight, void *indices, uint32_t count, void *y, uint32_t rows,
    uint32_t rows_per_core, uint32_t hidden, uint32_t rank, float scale) {
    shrink(type == 1, x, weight, indices, count, NULL, y, rows, hidden, rank, scale);
}

void _ZN11vllm_ascend16sgmv_shrink_implENS_10AscendTypeEPvS1_S1_S1_jS1_jS1_jjjjf(
    int type, void *stream, void *x, void *weight, void *indices, uint32_t count, void *lengths, uint32_t lengths_count,
    void *y, uint32_t rows, uint32_t rows_per_core, uint32_t hidden, uint32_t rank, float scale) {
    shrink(type == 1, x, weight, indices, count, lengths, y, rows, hidden, rank, scale);
}

void _ZN11vllm_ascend16bgmv_expand_implENS_10AscendTypeEPvS1_S1_S1_jS1_S1_jjjjjj(
    int type, void *stream, void *x, void *weight, void *indices, uint32_t count, void *y, void *y_out, uint32_t rows,
    uint32_t rows_per_core, uint32_t rank, uint32_t width, uint32_t offset, uint32_t full_width) {
    expand(type == 1, x, weight, indices, count, NULL, y_out, rows, rank, width, offset, full_width);
}

void _ZN11vllm_ascend16sgmv_expand_implENS_10AscendTypeEPvS1_S1_S1_jS1_jS1_S1_jjjjjj(
    int type, void *stream, void *x, void *weight, void *indices, uint32_t count, void *lengths, uint32_t lengths_count,
    void *y, void *y_out, uint32_t rows, uint32_t rows_per_core, uint32_t rank, uint32_t width, uint32_t offset,
    uint32_t full_width) {
    expand(type == 1, x, weight, indices, count, lengths, y_out, rows, rank, width, offset, full_width);
}

#define ABSENT(mangled, name)                                       \
    void mangled(void) {                                            \
        fprintf(stderr, "host_cann: " name " has no stand-in\n");   \
        abort();                                                    \
    }

ABSENT(_ZN11vllm_ascend19mla_preprocess_implEPvS0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_S0_j,
       "vllm_ascend::mla_preprocess_impl")
ABSENT(_ZN11vllm_ascend27batch_matmul_transpose_implEPvS0_S0_S0_S0_j, "vllm_ascend::batch_matmul_transpose_impl")
ABSENT(_ZN11vllm_ascend30get_masked_input_and_mask_implEPvS0_S0_S0_lllllljj, "vllm_ascend::get_masked_input_and_mask_impl")

/* fe::PlatFormInfos and fe::PlatformInfoManager, of libplatform: only models with experts ask them. */
ABSENT(_ZN2fe13PlatFormInfos13GetLocalMemBwERKNS_12LocalMemTypeERm, "fe::PlatFormInfos::GetLocalMemBw")
ABSENT(_ZN2fe13PlatFormInfos15GetLocalMemSizeERKNS_12LocalMemTypeERm, "fe::PlatFormInfos::GetLocalMemSize")
ABSENT(_ZN2fe13PlatFormInfos20SetCoreNumByCoreTypeERKSs, "fe::PlatFormInfos::SetCoreNumByCoreType")
ABSENT(_ZN2fe13PlatFormInfos22GetPlatformResWithLockERKSsS2_RSs, "fe::PlatFormInfos::GetPlatformResWithLock")
ABSENT(_ZN2fe19PlatformInfoManager24InitRuntimePlatformInfosERKSs, "fe::PlatformInfoManager::InitRuntimePlatformInfos")
ABSENT(_ZN2fe19PlatformInfoManager31GetRuntimePlatformInfosByDeviceERKjRNS_13PlatFormInfosEb,
       "fe::PlatformInfoManager::GetRuntimePlatformInfosByDevice")
ABSENT(_ZN2fe19PlatformInfoManager8InstanceEv, "fe::PlatformInfoManager::Instance")
ABSENT(_ZNK2fe13PlatFormInfos10GetCoreNumEv, "fe::PlatFormInfos::GetCoreNum")
