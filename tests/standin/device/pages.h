// Pages of pinned memory under a copy, protected until the CPU has waited for it: "touched" if the CPU uses them before.
// Only whole pages can be; a copy of less than one is not watched.
#pragma once
#include "streams.h"

static const size_t PAGE = 4096;
struct Guard { size_t begin, end; int allowed; double since; Clock clock; };  // the clock: of the copy
static std::vector<Guard> guards;
static struct sigaction before;
static void allow(size_t begin, size_t end) {  // what the guards that are left allow
  mprotect((void*)begin, end - begin, PROT_READ | PROT_WRITE);
  for (auto& g : guards) if (max(begin, g.begin) < min(end, g.end)) mprotect((void*)max(begin, g.begin), min(end, g.end) - max(begin, g.begin), g.allowed);
}
static void on_fault(int, siginfo_t* info, void*) {
  size_t p = (size_t)info->si_addr;
  bool ours = false;
  for (auto& g : guards) if (p >= g.begin && p < g.end && g.allowed != (PROT_READ | PROT_WRITE)) {
    char words[200];
    snprintf(words, sizeof words, "the CPU %s pinned memory of a copy %s the device that was asked for %.0f ms ago and that it did not wait for",
             g.allowed ? "writes" : "uses", g.allowed ? "to" : "from", 1e3 * (now() - g.since));
    complain(TOUCHED, words);
    g.allowed = PROT_READ | PROT_WRITE;  // once is enough
    ours = true;
  }
  if (ours) for (auto& g : guards) if (p >= g.begin && p < g.end) allow(g.begin, g.end);
  if (!ours) sigaction(SIGSEGV, &before, nullptr);
}
static void guard(const void* p, size_t n, int allowed, const Clock& clock) {
  size_t begin = ((size_t)p + PAGE - 1) & ~(PAGE - 1), end = ((size_t)p + n) & ~(PAGE - 1);
  if (begin >= end) return;
  struct sigaction is, ours{};
  ours.sa_sigaction = on_fault, ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, nullptr, &is);
  if (is.sa_sigaction != on_fault) sigaction(SIGSEGV, &ours, &before);  // Python's faulthandler takes its place
  guards.push_back({begin, end, allowed, now(), clock});
  allow(begin, end);
}
static void heard(const Clock& clock) {
  join(host, clock);
  std::vector<Guard> over;
  auto left = std::partition(guards.begin(), guards.end(), [](Guard& g) { return !covers(host, g.clock); });
  std::move(left, guards.end(), std::back_inserter(over));
  guards.erase(left, guards.end());
  for (auto& g : over) allow(g.begin, g.end);
}
static bool arrives(const void* p, size_t n) {  // whether a copy down to there may be pending, or was not waited for
  size_t begin = (size_t)p, end = begin + n;
  return std::any_of(guards.begin(), guards.end(), [&](Guard& g) { return g.allowed == PROT_NONE && max(begin, g.begin) < min(end, g.end); });
}
template <class Act> static void past_guards(const void* p, size_t n, Act act) {  // what the device itself does
  size_t begin = (size_t)p & ~(PAGE - 1), end = ((size_t)p + n + PAGE - 1) & ~(PAGE - 1);
  bool guarded = std::any_of(guards.begin(), guards.end(), [&](Guard& g) { return max(begin, g.begin) < min(end, g.end); });
  if (guarded) mprotect((void*)begin, end - begin, PROT_READ | PROT_WRITE);
  act();
  if (guarded) allow(begin, end);
}
