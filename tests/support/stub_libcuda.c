/* A libcuda.so.1 for machines without a GPU: enough of the driver that the real kvikio reads into host memory.
 *
 * kvikio looks every symbol below up by name before its first read. Pointers are said to belong to no context
 * (CUDA_ERROR_NOT_INITIALIZED), which is how it recognises host memory; pinned memory is page-aligned memory.
 * Everything that would need a device fails.
 */
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3 };

#ifdef DEAF /* a driver that does not answer, as after a failed update */
int cuDriverGetVersion(int *version) { (void)version; return NOT_INITIALIZED; }
#else
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
#endif
int cuInit(unsigned flags) { (void)flags; return SUCCESS; }
int cuPointerGetAttribute(void) { return NOT_INITIALIZED; }
int cuPointerGetAttributes(void) { return NOT_INITIALIZED; }
int cuGetErrorName(int error, const char **name) { (void)error; *name = "STUB_ERROR"; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "the stub driver has no device"; return SUCCESS; }
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
  (void)flags;
  return posix_memalign(memory, 4096, bytes) ? INVALID_VALUE : SUCCESS;
}
int cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }
int cuMemHostRegister(void) { return SUCCESS; }
int cuMemHostRegister_v2(void) { return SUCCESS; }
int cuMemHostUnregister(void) { return SUCCESS; }

#define FAILS(name) int name(void) { return INVALID_VALUE; }
FAILS(cuCtxCreate) FAILS(cuCtxCreate_v2) FAILS(cuCtxCreate_v4) FAILS(cuCtxDestroy) FAILS(cuCtxDestroy_v2)
FAILS(cuCtxGetCurrent) FAILS(cuCtxGetDevice) FAILS(cuCtxPopCurrent) FAILS(cuCtxPopCurrent_v2)
FAILS(cuCtxPushCurrent) FAILS(cuCtxPushCurrent_v2) FAILS(cuCtxSynchronize)
FAILS(cuDeviceGet) FAILS(cuDeviceGetAttribute) FAILS(cuDeviceGetCount) FAILS(cuDeviceGetName)
FAILS(cuDevicePrimaryCtxRelease) FAILS(cuDevicePrimaryCtxRelease_v2) FAILS(cuDevicePrimaryCtxRetain)
FAILS(cuEventCreate) FAILS(cuEventDestroy) FAILS(cuEventDestroy_v2) FAILS(cuEventQuery) FAILS(cuEventRecord)
FAILS(cuEventSynchronize) FAILS(cuLaunchHostFunc)
FAILS(cuMemAlloc_v2) FAILS(cuMemFree_v2) FAILS(cuMemGetAddressRange) FAILS(cuMemGetAddressRange_v2)
FAILS(cuMemcpyAsync) FAILS(cuMemcpyBatchAsync) FAILS(cuMemcpyBatchAsync_v2)
FAILS(cuMemcpyDtoHAsync) FAILS(cuMemcpyDtoHAsync_v2) FAILS(cuMemcpyHtoDAsync) FAILS(cuMemcpyHtoDAsync_v2)
FAILS(cuStreamCreate) FAILS(cuStreamDestroy) FAILS(cuStreamDestroy_v2) FAILS(cuStreamSynchronize)
FAILS(cuStreamWaitEvent)
