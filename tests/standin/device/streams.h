// Streams and events, as they order operations. Real: what is ordered before what. Not real: an operation's own time.
// A clock holds, for each stream, how many of its operations have happened before.
#pragma once
#include "counters.h"

using Clock = std::vector<long>;
static void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = max(into[i], other[i]);
}
static bool covers(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); i++) if (other[i] > (i < clock.size() ? clock[i] : 0)) return false;
  return true;
}
extern thread_local int device;
static void use_device() {  // CUDA's first call of a thread on a device makes a context there, if the process has none
  static std::atomic<bool> used[64];
  if (!used[device].exchange(true)) count(CONTEXT, 0);
}
struct Stream;
struct Moment { Stream* stream; double at; bool reached; Clock clock; };  // a point in a stream, where an event was recorded
struct Op { double at; std::function<void()> run; };
struct Stream { size_t id; int priority; std::deque<Op> pending; Clock clock; };
struct Event { std::shared_ptr<Moment> moment; };
static std::vector<Stream*>& streams() { static std::vector<Stream*> all; return all; }
static Clock host;  // what the CPU knows to have happened: all its threads as one, since what they tell each other is not seen here
static Stream* make(int priority) {
  auto stream = new Stream{streams().size(), priority, {}, {}};
  streams().push_back(stream);
  return stream;
}
static Stream* of(cudaStream_t handle) {
  static std::vector<Stream*> defaults(64);
  use_device();
  if ((size_t)handle > 2) return (Stream*)handle;
  auto& found = defaults[device];
  return found ? found : found = make(0);
}
static void drain(Stream* stream, const Moment* until = nullptr, double asked_before = 1e300) {
  while (!stream->pending.empty() && !(until && until->reached) && stream->pending.front().at <= asked_before) {
    Op op = std::move(stream->pending.front());
    stream->pending.pop_front();
    op.run();
  }
}
static void begin(Stream* stream) {  // an operation of its own
  join(stream->clock, host);
  if (stream->clock.size() <= stream->id) stream->clock.resize(stream->id + 1);
  stream->clock[stream->id]++;
}
static void enqueue(Stream* stream, std::function<void()> run) {
  if (CHECK) stream->pending.push_back({now(), std::move(run)});
  else run();
}
static void heard(const Clock& clock);  // the CPU has waited for all that this clock holds: see pages.h
static void finish(Stream* stream) { drain(stream); heard(stream->clock); }
static void finish_all() { for (auto stream : streams()) finish(stream); }
