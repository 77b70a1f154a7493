// A card that computes nothing, for torch's real CUDA build on a machine without one: CUDA's runtime, driver, cuBLAS and
// NVML as far as a training calls them. Put in front of all libraries (LD_PRELOAD), and found by dlopen as libcuda.so.1.
//
// Device memory is address space, and ends where the card's would. Kernels and matrix products do nothing. Copies from
// and to the host are made. So the allocator's peaks, running out of memory, the code that torch.compile writes, and
// every wait of the host are those of a real card; numbers and times are not.
#define _GNU_SOURCE
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SUCCEEDS(name) int name(void) { return 0; }
#define GIVES(name, type, value) int name(type *result) { *result = (value); return 0; }
#define GIVES_SECOND(name, type, value) int name(void *first, type *result) { *result = (value); return 0; }
#define HANDLE ((void *)__sync_add_and_fetch(&next_handle, 16))

enum { OUT_OF_MEMORY = 2 };
static const size_t CONTEXT = 600ul << 20; // what driver and CUDA keep, as aura/plan/memory.py assumes
static uintptr_t next_handle = 0x1000;

// Of the step: read and set to zero by step.py. Where a thread of the wire waits, the card still gets its next work.
long null_card_waits, null_card_waits_of_computing, null_card_copies_to_host;
static __thread int of_the_wire;
void null_card_this_thread_is_of_the_wire(void) { of_the_wire = 1; }

// The card: an RTX 4090 with as much memory as is asked for

static size_t total(void) {
    const char *bytes = getenv("NULL_CARD_BYTES");
    return bytes ? strtoull(bytes, 0, 10) : 24ul << 30;
}

static int attribute(int which) { // the driver's have the runtime's numbers
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return 8;
    case cudaDevAttrComputeCapabilityMinor: return 9;
    case cudaDevAttrMultiProcessorCount: return 128;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 99 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 100 << 10;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 1536;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrL2CacheSize: return 72 << 20;
    case cudaDevAttrMaxGridDimX: return INT32_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    default: return 0;
    }
}

int cudaDeviceGetAttribute(int *value, int which) { *value = attribute(which); return 0; }
int cuDeviceGetAttribute(int *value, int which) { *value = attribute(which); return 0; }

int cudaGetDeviceProperties(struct cudaDeviceProp *card) {
    *card = (struct cudaDeviceProp){
        .name = "NVIDIA GeForce RTX 4090",
        .totalGlobalMem = total(),
        .major = attribute(cudaDevAttrComputeCapabilityMajor),
        .minor = attribute(cudaDevAttrComputeCapabilityMinor),
        .multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount),
        .sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock),
        .sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
        .sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
        .maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock),
        .maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor),
        .regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock),
        .regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor),
        .warpSize = attribute(cudaDevAttrWarpSize),
        .l2CacheSize = attribute(cudaDevAttrL2CacheSize),
        .maxBlocksPerMultiProcessor = 24,
        .maxGridSize = {INT32_MAX, 65535, 65535},
        .maxThreadsDim = {1024, 1024, 64},
    };
    return 0;
}

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
GIVES(cudaGetDevice, int, 0)
GIVES(cudaDriverGetVersion, int, 13000)
GIVES(cudaRuntimeGetVersion, int, 13000)
GIVES(cudaDeviceCanAccessPeer, int, 0)
SUCCEEDS(cudaSetDevice)
SUCCEEDS(cudaGetLastError)
SUCCEEDS(cudaPeekAtLastError)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode)
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaDeviceGetPCIBusId(char *id, int size) { strncpy(id, "0000:01:00.0", size); return 0; }
int cudaMemGetInfo(size_t *free, size_t *all) { *all = total(); *free = *all - CONTEXT; return 0; }

// Memory

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used; // of the card
static struct block { char *begin; size_t size; int on_host; } blocks[1 << 16];
static int block_count;

static char *address_space(size_t size) { // pages come when they are touched
    char *begin = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return begin == MAP_FAILED ? 0 : begin;
}

static void remember(char *begin, size_t size, int on_host) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < block_count && blocks[i].begin) i++;
    if (i == block_count) block_count++;
    blocks[i] = (struct block){begin, size, on_host};
    pthread_mutex_unlock(&lock);
}

static struct block block_of(const char *address, int forget) {
    struct block found = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < block_count && !found.begin; i++)
        if (blocks[i].begin && address >= blocks[i].begin && address < blocks[i].begin + blocks[i].size) {
            found = blocks[i];
            if (forget) blocks[i].begin = 0;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static int take(size_t size) {
    if (used + size > total() - CONTEXT) return OUT_OF_MEMORY;
    used += size;
    return 0;
}

static int allocate(void **result, size_t size, int on_host) {
    size = (size + 4096) & ~4095ul;
    if (!on_host && take(size)) return OUT_OF_MEMORY;
    *result = address_space(size);
    if (!*result) return OUT_OF_MEMORY;
    remember(*result, size, on_host);
    return 0;
}

int cudaMalloc(void **result, size_t size) { return allocate(result, size, 0); }
int cudaHostAlloc(void **result, size_t size) { return allocate(result, size, 1); }

static int release(void *address) {
    struct block block = block_of(address, 1);
    if (!block.begin) return 0; // a null pointer
    if (!block.on_host) used -= block.size;
    munmap(block.begin, block.size);
    return 0;
}

int cudaFree(void *address) { return release(address); }
int cudaFreeHost(void *address) { return release(address); }
SUCCEEDS(cudaHostRegister)
SUCCEEDS(cudaHostUnregister)

int cudaPointerGetAttributes(struct cudaPointerAttributes *result, void *address) {
    struct block block = block_of(address, 0);
    int kind = block.on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    *result = (struct cudaPointerAttributes){
        .type = block.begin ? kind : cudaMemoryTypeUnregistered,
        .devicePointer = address,
        .hostPointer = address,
    };
    return 0;
}

int cuPointerGetAttribute(void **result, int which, void *address) { *result = address; return 0; }

static int copy(void *to, const void *from, size_t size) {
    struct block target = block_of(to, 0), source = block_of(from, 0);
    int into_card = target.begin && !target.on_host, out_of_card = source.begin && !source.on_host;
    if (out_of_card && !into_card) null_card_copies_to_host++;
    if (!out_of_card || !into_card) memcpy(to, from, size); // inside the card are no numbers
    return 0;
}

int cudaMemcpy(void *to, const void *from, size_t size) { return copy(to, from, size); }
int cudaMemcpyAsync(void *to, const void *from, size_t size) { return copy(to, from, size); }
SUCCEEDS(cudaMemcpy2DAsync)
SUCCEEDS(cudaMemset)
SUCCEEDS(cudaMemsetAsync)

// Virtual memory, of which torch makes its expandable segments

static int reserve(void **result, size_t size) {
    const size_t page = 2ul << 20;
    char *begin = address_space(size + page);
    if (!begin) return OUT_OF_MEMORY;
    *result = (void *)(((uintptr_t)begin + page - 1) & ~(page - 1));
    remember(*result, size, 0);
    return 0;
}

static int create(uint64_t *handle, size_t size) { *handle = size; return take(size); }
static int destroy(uint64_t handle) { used -= handle; return 0; }
static int unmap(void *begin, size_t size) { madvise(begin, size, MADV_DONTNEED); return 0; }
static GIVES(granularity, size_t, 2ul << 20)
static GIVES(zero, int, 0)
static GIVES_SECOND(no_words, const char *, "the null card")
static SUCCEEDS(nothing)

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, long flags, int *found) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuMemAddressReserve", reserve}, {"cuMemCreate", create}, {"cuMemRelease", destroy}, {"cuMemUnmap", unmap},
        {"cuMemGetAllocationGranularity", granularity}, {"cuDeviceGet", zero}, {"cuDeviceGetAttribute", zero},
        {"cuGetErrorString", no_words},
    };
    *function = nothing;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) *function = known[i].function;
    if (found) *found = cudaDriverEntryPointSuccess;
    return 0;
}

// Streams and events: everything has happened at once

GIVES(cudaStreamCreateWithPriority, void *, HANDLE)
GIVES(cudaStreamCreateWithFlags, void *, HANDLE)
GIVES(cudaEventCreate, void *, HANDLE)
GIVES(cudaEventCreateWithFlags, void *, HANDLE)
GIVES(cudaEventElapsedTime, float, 1.0f)
GIVES_SECOND(cudaStreamIsCapturing, int, cudaStreamCaptureStatusNone)
GIVES_SECOND(cudaStreamGetCaptureInfo, int, cudaStreamCaptureStatusNone)
SUCCEEDS(cudaStreamDestroy)
SUCCEEDS(cudaStreamQuery)
SUCCEEDS(cudaStreamWaitEvent)
SUCCEEDS(cudaEventDestroy)
SUCCEEDS(cudaEventQuery)
SUCCEEDS(cudaEventRecord)
SUCCEEDS(cudaEventRecordWithFlags)

static int wait_for_card(void) {
    __sync_fetch_and_add(&null_card_waits, 1);
    if (!of_the_wire) __sync_fetch_and_add(&null_card_waits_of_computing, 1);
    return 0;
}
int cudaStreamSynchronize(void) { return wait_for_card(); }
int cudaEventSynchronize(void) { return wait_for_card(); }
int cudaDeviceSynchronize(void) { return wait_for_card(); }

// Kernels

SUCCEEDS(__cudaInitModule)
SUCCEEDS(__cudaLaunchKernel)
SUCCEEDS(cudaLaunchKernel)
SUCCEEDS(cudaLaunchKernelExC)
SUCCEEDS(cudaLaunchCooperativeKernel)
SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaKernelSetAttributeForDevice)
SUCCEEDS(cudaMemcpyToSymbol)
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int, 2)
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int, 2)
int __cudaGetKernel(void **kernel, void *function) { *kernel = function; return 0; }
int cudaGetKernel(void **kernel, void *function) { *kernel = function; return 0; }
int cudaGetSymbolAddress(void **address) { static char symbol[1 << 16]; *address = symbol; return 0; }

int cudaFuncGetAttributes(struct cudaFuncAttributes *result) { // torch's kernels are of 8.6, which 8.9 runs
    *result = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 86, .binaryVersion = 86,
        .maxDynamicSharedSizeBytes = 99 << 10,
    };
    return 0;
}

// The driver, which Triton calls

SUCCEEDS(cuInit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLaunchKernel)
SUCCEEDS(cuLaunchKernelEx)
SUCCEEDS(cuLaunchCooperativeKernel)
SUCCEEDS(cuTensorMapEncodeTiled)
SUCCEEDS(cuLinkAddData_v2)
SUCCEEDS(cuLinkComplete)
SUCCEEDS(cuLinkCreate_v2)
GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuDeviceGetCount, int, 1)
GIVES(cuDeviceGet, int, 0)
GIVES(cuDevicePrimaryCtxRetain, void *, HANDLE)
GIVES(cuCtxGetCurrent, void *, HANDLE)
GIVES(cuCtxGetDevice, int, 0)
GIVES(cuModuleLoad, void *, HANDLE)
GIVES(cuModuleLoadData, void *, HANDLE)
GIVES(cuModuleLoadDataEx, void *, HANDLE)
GIVES(cuModuleGetFunction, void *, HANDLE)
GIVES(cuOccupancyMaxActiveClusters, int, 1)
GIVES(cuOccupancyMaxActiveBlocksPerMultiprocessor, int, 1)
GIVES_SECOND(cuGetErrorString, const char *, "the null card")
int cuDeviceGetName(char *name, int size) { strncpy(name, "null card", size); return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

int cuFuncGetAttribute(int *value, int which) {
    const int max_threads_per_block = 0;
    *value = which == max_threads_per_block ? 1024 : 0;
    return 0;
}

// cuBLAS

SUCCEEDS(cublasGemmEx)
SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasDgemm_v2)
SUCCEEDS(cublasSgemmEx)
SUCCEEDS(cublasSgemmStridedBatched)
SUCCEEDS(cublasGemmStridedBatchedEx)
SUCCEEDS(cublasSgemmBatched)
SUCCEEDS(cublasSgemv_v2)
SUCCEEDS(cublasDotEx)
SUCCEEDS(cublasSdot_v2)
SUCCEEDS(cublasDdot_v2)
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS(cublasLtMatmul)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
GIVES(cublasCreate_v2, void *, HANDLE)
GIVES(cublasLtMatmulDescCreate, void *, HANDLE)
GIVES(cublasLtMatrixLayoutCreate, void *, HANDLE)
GIVES(cublasLtMatmulPreferenceCreate, void *, HANDLE)
GIVES_SECOND(cublasGetMathMode, int, 0)
GIVES_SECOND(cublasGetPointerMode_v2, int, 0)

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    *found = 1;
    return 0;
}

// NVML

SUCCEEDS(nvmlInit)
SUCCEEDS(nvmlInit_v2)
SUCCEEDS(nvmlShutdown)
GIVES(nvmlDeviceGetCount_v2, unsigned, 1)
GIVES(nvmlSystemGetCudaDriverVersion_v2, int, 13000)
GIVES_SECOND(nvmlDeviceGetHandleByIndex_v2, void *, HANDLE)
GIVES_SECOND(nvmlDeviceGetHandleByPciBusId_v2, void *, HANDLE)
GIVES_SECOND(nvmlDeviceGetComputeRunningProcesses, unsigned, 0)
GIVES_SECOND(nvmlDeviceGetComputeRunningProcesses_v3, unsigned, 0)
const char *nvmlErrorString(void) { return "the null card"; }

static const int NOT_SUPPORTED = 3;
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfo(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *device, char *info) { memset(info + 4, 0, 32); return 0; }
