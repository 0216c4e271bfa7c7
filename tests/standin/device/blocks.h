// Memory: which addresses are pinned, or a device's. A device's memory is the host's, and is taken from it when it is touched.
#pragma once
#include "counters.h"

enum Place { PAGEABLE, PINNED, DEVICE };
struct Block { size_t bytes; Place place; bool registered; int device; };
static std::map<size_t, Block> blocks;
static std::atomic<size_t> pinned{0}, allocated{0};
thread_local int device = 0;
static Place where(const void* pointer, size_t* left = nullptr, int* on = nullptr) {
  size_t p = (size_t)pointer;
  auto found = blocks.upper_bound(p);
  if (found == blocks.begin() || p >= (--found)->first + found->second.bytes) { if (left) *left = ~0ul; return PAGEABLE; }
  if (left) *left = found->first + found->second.bytes - p;
  if (on) *on = found->second.device;
  return found->second.place;
}
static void* map(size_t n) {
  void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
