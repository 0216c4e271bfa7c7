// Pages of pinned memory under a pending copy, protected: "touched" if the CPU uses them before it has waited for the copy.
// Only whole pages can be; a copy of less than one is not watched.
#pragma once
#include "counters.h"

struct Guard { size_t begin, end; int allowed; double since; };
static std::vector<Guard> guards;
static struct sigaction before;
static void allow(size_t begin, size_t end) {
  mprotect((void*)begin, end - begin, PROT_READ | PROT_WRITE);
  for (auto& g : guards) if (max(begin, g.begin) < min(end, g.end)) mprotect((void*)max(begin, g.begin), min(end, g.end) - max(begin, g.begin), g.allowed);
}
static void on_fault(int, siginfo_t* info, void*) {
  size_t p = (size_t)info->si_addr;
  for (auto& g : guards) if (p >= g.begin && p < g.end) {
    char words[200];
    snprintf(words, sizeof words, "the CPU %s pinned memory of a copy %s the device that was asked for %.0f ms ago and that it did not wait for",
             g.allowed ? "writes" : "uses", g.allowed ? "to" : "from", 1e3 * (now() - g.since));
    complain(TOUCHED, words);
    mprotect((void*)g.begin, g.end - g.begin, PROT_READ | PROT_WRITE);
    return;
  }
  sigaction(SIGSEGV, &before, nullptr);
}
static void guard(const void* p, size_t n, int allowed) {  // whole pages only
  size_t begin = ((size_t)p + 4095) & ~4095ul, end = ((size_t)p + n) & ~4095ul;
  if (begin >= end) return;
  struct sigaction is, ours{};
  ours.sa_sigaction = on_fault, ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, nullptr, &is);
  if (is.sa_sigaction != on_fault) sigaction(SIGSEGV, &ours, &before);  // Python's faulthandler takes its place
  guards.push_back({begin, end, allowed, now()});
  allow(begin, end);
}
static void unguard(const void* p, size_t n, int allowed) {
  size_t begin = ((size_t)p + 4095) & ~4095ul, end = ((size_t)p + n) & ~4095ul;
  auto found = std::find_if(guards.begin(), guards.end(), [&](Guard& g) { return g.begin == begin && g.end == end && g.allowed == allowed; });
  if (found == guards.end()) return;
  guards.erase(found);
  allow(begin, end);
}
