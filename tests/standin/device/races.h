// Who used which bytes last, by the clocks of their streams: "race" where no event orders two uses.
// Not seen: what CPU threads tell each other, since all count as one.
#pragma once
#include "streams.h"

struct Use { size_t stream; long clock; const char* what; };
struct Cell { size_t end; Use write; std::vector<Use> reads; };
static std::map<size_t, Cell> cells;
static void split(size_t at) {
  auto next = cells.upper_bound(at);
  if (next == cells.begin()) return;
  auto cell = std::prev(next);
  if (cell->first == at || cell->second.end <= at) return;
  Cell right = cell->second;
  cell->second.end = at;
  cells.emplace(at, std::move(right));
}
static void forget(size_t begin, size_t end) {
  split(begin), split(end);
  cells.erase(cells.lower_bound(begin), cells.lower_bound(end));
}
static void use(Stream* stream, const void* p, size_t n, bool writes, const char* what) {
  size_t begin = (size_t)p, end = begin + n;
  if (!CHECK || !n) return;
  split(begin), split(end);
  const Clock& clock = stream->clock;
  const Use* against = nullptr;
  bool wrote = false;
  auto ordered = [&](const Use& u) { return u.stream == stream->id || (u.stream < clock.size() && clock[u.stream] >= u.clock); };
  Use mine{stream->id, clock[stream->id], what};
  size_t at = begin;
  for (auto cell = cells.lower_bound(begin); cell != cells.end() && cell->first < end; at = cell->second.end, ++cell) {
    if (!against && cell->second.write.what && !ordered(cell->second.write)) against = &cell->second.write, wrote = true;
    if (writes) for (auto& read : cell->second.reads) if (!against && !ordered(read)) against = &read;
    if (writes) continue;
    if (at < cell->first) cells[at] = {cell->first, {}, {mine}};
    auto& reads = cell->second.reads;
    reads.erase(std::remove_if(reads.begin(), reads.end(), ordered), reads.end());
    reads.push_back(mine);
  }
  if (against) {
    char words[300];
    snprintf(words, sizeof words, "%s on stream %zu %s bytes that %s on stream %zu %s; no event orders the two", what, stream->id,
             writes ? "writes" : "reads", against->what, against->stream, wrote ? "wrote" : "read");
    complain(RACE, words);
  }
  if (writes) {
    cells.erase(cells.lower_bound(begin), cells.lower_bound(end));
    cells[begin] = {end, mine, {}};
  } else if (at < end) cells[at] = {end, {}, {mine}};
}
