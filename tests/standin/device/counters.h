// Settings from the environment, counters of calls, and complaints. Included once, by cudart.cpp, as the other headers here.
#pragma once
#include "kinds.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

using std::max;
using std::min;
static long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}
static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static const int CHECK = setting("STANDIN_CHECK", 0);
static const bool NUMBERS = strcmp(getenv("STANDIN_KERNELS") ?: "host", "none");  // none: no large copy is made either
static const double AGE = setting("STANDIN_AGE_MS", 50) / 1e3;
static const size_t TOTAL = (size_t)setting("STANDIN_GB", 80) * 1000000000ul;
static const size_t PINNABLE = (size_t)setting("STANDIN_PINNED_MB", 1L << 30) << 20;
static const int DEVICES = setting("STANDIN_DEVICES", 8);
static std::recursive_mutex mutex;
#define LOCKED std::lock_guard<std::recursive_mutex> locked(mutex)
#define EXPORT extern "C" __attribute__((visibility("default")))

// What was counted, and complaints.
static std::atomic<long> calls[KINDS], bytes[KINDS];
static std::atomic<long> traced{0};
EXPORT const char* standin_count(int kind, long* n, long* b) {  // name of a counter, and what it holds; null behind the last
  if (kind >= KINDS) return nullptr;
  *n = calls[kind], *b = bytes[kind];
  return NAMES[kind];
}
EXPORT void standin_trace(long kinds) { traced = kinds; }  // a mask: print a Python stack at each of these
static void stack() { raise(SIGUSR2); }                     // sitecustomize.py has faulthandler print one
static void count(int kind, size_t n) {
  calls[kind]++, bytes[kind] += n;
  if (traced >> kind & 1) { fprintf(stderr, "[standin] %s, %zu bytes\n", NAMES[kind], n); stack(); }
}
EXPORT void standin_counted(int kind) { count(kind, 0); }
static void complain(int kind, const std::string& words) {
  bytes[kind]++;
  if (calls[kind]++ < 5) { fprintf(stderr, "[standin] %s: %s\n", NAMES[kind], words.c_str()); stack(); }
  if (CHECK > 1) _exit(99);
}
EXPORT long standin_report() {  // says what was found, and returns how much
  long found = calls[TOUCHED] + calls[CHANGED] + calls[RACE];
  if (found || (CHECK && calls[COPY] + calls[KERNEL]))
    fprintf(stderr, "[standin] touched %ld, changed %ld, races %ld (%ld copies, %ld kernels, %ld collectives)\n", calls[TOUCHED].load(),
            calls[CHANGED].load(), calls[RACE].load(), calls[COPY].load(), calls[KERNEL].load(), calls[COLLECTIVE].load());
  return found;
}
__attribute__((destructor)) static void leave() { if (standin_report()) _exit(99); }
