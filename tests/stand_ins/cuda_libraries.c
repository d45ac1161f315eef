/* The libraries that ONNX Runtime's CUDA provider is linked with, for a machine without a GPU. "Memory of the
   device" is the host's, copies copy, and kernels do nothing. Each call is counted by its name, and copies by their
   kind and bytes. One file is all the libraries, each under its own name; NVIDIA's headers say what structures are. */
#include <driver_types.h>
#include <library_types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 512 };
static const char *names[MOST];
static long counts[MOST];

static int add(const char *name, long amount) {
    int n = 0;
    while (names[n] && strcmp(names[n], name)) n++;
    if (!names[n]) names[n] = strdup(name);
    counts[n] += amount;
    return 0;
}

static int count(const char *name) { return add(name, 1); }

static int copy(const char *name, void *to, const void *from, size_t size, int kind) {
    char said[64];
    memmove(to, from, size);
    snprintf(said, sizeof said, "%s %s", name, (const char *[]){"HtoH", "HtoD", "DtoH", "DtoD", "default"}[kind]);
    count(said);
    return add(strcat(said, " bytes"), size);
}

/* Returns the calls since the last time, a line each. */
const char *told(void) {
    static char said[MOST * 64];
    char *end = said;
    *end = 0;
    for (int n = 0; names[n]; n++) {
        if (counts[n]) end += sprintf(end, "%s=%ld\n", names[n], counts[n]);
        counts[n] = 0;
    }
    return said;
}

#define DOES(name) int name(void) { return count(#name); }
#define MAKES(name) int name(void **made) { *made = calloc(1, 64); return count(#name); }
#define TAKES(name) \
    int name(void **made, size_t size) { *made = aligned_alloc(256, (size + 511) & ~255UL); return count(#name); }
#define FREES(name) int name(void *given) { free(given); return count(#name); }
#define SAYS(name, value) int name(int *out) { *out = value; return count(#name); }
#define WORDS(name) const char *name(void) { count(#name); return #name; }

DOES(__cudaRegisterFatBinaryEnd) DOES(__cudaRegisterFunction) DOES(__cudaRegisterVar) DOES(__cudaUnregisterFatBinary)
DOES(__cudaPushCallConfiguration) DOES(__cudaPopCallConfiguration) DOES(__cudaLaunchKernel) MAKES(__cudaGetKernel)
void **__cudaRegisterFatBinary(void *binary) { static void *held; return &held; }

DOES(cudaLaunchKernel) DOES(cudaLaunchKernelExC) DOES(cudaLaunchCooperativeKernel) DOES(cudaLaunchHostFunc)
DOES(cudaGetLastError) DOES(cudaPeekAtLastError) DOES(cudaSetDevice) DOES(cudaDeviceSynchronize)
DOES(cudaFuncSetAttribute) DOES(cudaKernelSetAttributeForDevice) DOES(cudaLibraryUnload) DOES(cuTensorMapEncodeTiled)
DOES(cudaEventRecord) DOES(cudaEventRecordWithFlags) DOES(cudaEventSynchronize) DOES(cudaStreamSynchronize)
DOES(cudaStreamWaitEvent) DOES(cudaGraphInstantiate) DOES(cudaStreamBeginCapture) DOES(cudaStreamEndCapture)
DOES(cudaGraphLaunch) DOES(cudaGraphDestroy) DOES(cudaGraphExecDestroy) DOES(cudaMemPoolDestroy)
DOES(cudaMemPoolSetAttribute) DOES(cudaMemPoolTrimTo) DOES(cudaMemcpyFromSymbol) DOES(cudaMemcpy2DAsync)
FREES(cudaEventDestroy) FREES(cudaStreamDestroy) FREES(cudaFree) FREES(cudaFreeAsync) FREES(cudaFreeHost)
MAKES(cudaEventCreate) MAKES(cudaEventCreateWithFlags) MAKES(cudaStreamCreate) MAKES(cudaStreamCreateWithFlags)
MAKES(cudaMemPoolCreate) MAKES(cudaLibraryLoadData) MAKES(cudaLibraryGetKernel)
TAKES(cudaMalloc) TAKES(cudaMallocHost) TAKES(cudaHostAlloc) TAKES(cudaMallocFromPoolAsync)
SAYS(cudaGetDevice, 0) SAYS(cudaGetDeviceCount, 1) SAYS(cudaDriverGetVersion, 13000) SAYS(cudaRuntimeGetVersion, 13000)
SAYS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2) WORDS(cudaGetErrorName) WORDS(cudaGetErrorString)

int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copy(__func__, to, from, size, kind); }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind) { return copy(__func__, to, from, size, kind); }
int cudaMemset(void *to, int value, size_t size) { memset(to, value, size); return count("cudaMemset"); }
int cudaMemsetAsync(void *to, int value, size_t size) { memset(to, value, size); return count("cudaMemsetAsync"); }
int cudaStreamIsCapturing(void *stream, int *out) { *out = 0; return count("cudaStreamIsCapturing"); }
int cudaEventElapsedTime(float *out) { *out = 0; return count("cudaEventElapsedTime"); }
int cudaMemGetInfo(size_t *unused, size_t *all) { *unused = *all = 1UL << 34; return count("cudaMemGetInfo"); }
int cudaMemPoolGetAttribute(void *pool, int what, unsigned long long *out) { *out = 0; return count(__func__); }
int cudaFuncGetAttributes(struct cudaFuncAttributes *out) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    return count("cudaFuncGetAttributes");
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *out, void *pointer) {
    *out = (struct cudaPointerAttributes){cudaMemoryTypeDevice, 0, pointer, pointer};
    return count("cudaPointerGetAttributes");
}
int cudaGetDriverEntryPointByVersion(void *name, void **out, unsigned version, unsigned long long flags, int *found) {
    *out = NULL;
    if (found) *found = cudaDriverEntryPointSymbolNotFound;
    return count("cudaGetDriverEntryPointByVersion");
}
int cudaDeviceGetAttribute(int *out, int what, int device) {
    *out = what == cudaDevAttrComputeCapabilityMajor ? 9 : what == cudaDevAttrComputeCapabilityMinor ? 0
         : what == cudaDevAttrWarpSize ? 32 : what == cudaDevAttrMultiProcessorCount ? 132
         : what == cudaDevAttrMaxThreadsPerBlock ? 1024 : what == cudaDevAttrMaxSharedMemoryPerBlock ? 49152 : 0;
    return count("cudaDeviceGetAttribute");
}
int cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    memset(out, 0, sizeof *out);
    strcpy(out->name, "a device of a test");
    out->major = 9, out->warpSize = 32, out->multiProcessorCount = 132, out->totalGlobalMem = 1UL << 34;
    out->maxThreadsPerBlock = 1024, out->maxThreadsPerMultiProcessor = 2048, out->sharedMemPerBlock = 49152;
    out->regsPerBlock = 65536, out->sharedMemPerBlockOptin = 232448, out->sharedMemPerMultiprocessor = 233472;
    for (int n = 0; n < 3; n++) out->maxThreadsDim[n] = 1024, out->maxGridSize[n] = 65535;
    return count("cudaGetDeviceProperties");
}

MAKES(cublasCreate_v2) FREES(cublasDestroy_v2) DOES(cublasSetStream_v2) DOES(cublasSetMathMode)
WORDS(cublasGetStatusName) WORDS(cublasGetStatusString) DOES(cublasScopy_v2) DOES(cublasSscal_v2)
DOES(cublasSgemm_v2) DOES(cublasDgemm_v2) DOES(cublasGemmEx) DOES(cublasGemmBatchedEx) DOES(cublasGemmStridedBatchedEx)
DOES(cublasSgemmBatched) DOES(cublasSgemmStridedBatched) DOES(cublasDgemmBatched) DOES(cublasDgemmStridedBatched)
DOES(cublasSgeam) DOES(cublasDgeam) DOES(cublasSgetrfBatched) DOES(cublasSgetriBatched) DOES(cublasDgetrfBatched)
DOES(cublasDgetriBatched) MAKES(cublasLtCreate) FREES(cublasLtDestroy) DOES(cublasLtMatmul)
MAKES(cublasLtMatmulDescCreate) FREES(cublasLtMatmulDescDestroy) DOES(cublasLtMatmulDescSetAttribute)
MAKES(cublasLtMatmulPreferenceCreate) FREES(cublasLtMatmulPreferenceDestroy) DOES(cublasLtMatmulPreferenceSetAttribute)
MAKES(cublasLtMatrixLayoutCreate) FREES(cublasLtMatrixLayoutDestroy) DOES(cublasLtMatrixLayoutSetAttribute)
MAKES(cublasLtMatrixTransformDescCreate) FREES(cublasLtMatrixTransformDescDestroy) DOES(cublasLtMatrixTransform)
DOES(cublasLtMatmulAlgoInit) DOES(cublasLtMatmulAlgoConfigSetAttribute)
int cublasGetMathMode(void *handle, int *out) { *out = 0; return count("cublasGetMathMode"); }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *what, void *a, void *b, void *c, void *d, void *preferred,
                                   int most, void *results, int *found) {
    memset(results, 0, 96);
    *found = 1;
    return count("cublasLtMatmulAlgoGetHeuristic");
}
