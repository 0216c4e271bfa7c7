// What a device says of itself: an H100, in what torch asks.
#pragma once
#include "blocks.h"

EXPORT cudaError_t cudaGetDeviceCount(int* n) { *n = DEVICES; return DEVICES ? cudaSuccess : cudaErrorNoDevice; }
EXPORT cudaError_t cudaGetDevice(int* d) { *d = device; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int d) { if (d < 0 || d >= DEVICES) return cudaErrorInvalidDevice; device = d; return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Stand-in H100");
  p->totalGlobalMem = TOTAL, p->major = 9, p->multiProcessorCount = 132, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048, p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64, p->l2CacheSize = 50 << 20, p->totalConstMem = 65536;
  p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->canMapHostMemory = p->cooperativeLaunch = 1, p->asyncEngineCount = 3;
  p->maxBlocksPerMultiProcessor = 32, p->textureAlignment = 512, p->memPitch = 2147483647, p->memoryBusWidth = 5120, p->pciBusID = 0x17;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int d) { snprintf(id, n, "0000:%02x:00.0", 0x17 + d); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
EXPORT const char* cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stand-in"; }
EXPORT const char* cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheStandIn"; }
