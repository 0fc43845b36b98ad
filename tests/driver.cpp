// A fake of the functions of the CUDA driver that `kernels/host/pool.c` calls. Device memory is memory of the host.
// Streams run their commands late: one command of a random stream whenever an event is queried or waited for. A
// stream that is held runs nothing.

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "host/host.h"

namespace {
struct Command {
  ooc_rectangle copied;  // height 0: none
  void *event;           // recorded, or null
};
std::mutex mutex;
std::mt19937 draw;
std::map<void *, std::deque<Command>> streams;
std::map<void *, int> recorded;  // event -> how many of its recordings have not been reached
std::map<int, int> calls, failing;  // number of a function -> its calls, and the call that fails
void *held;

enum { ENTER, COPY, COPY_ROWS, RECORD, QUERY, WAIT };
constexpr int FAILED = 719, NOT_READY = 600;

int status_of(int function) { return ++calls[function] == failing[function] ? FAILED : 0; }

void step() {
  std::vector<void *> ready;
  for (auto &[stream, commands] : streams)
    if (!commands.empty() && stream != held) ready.push_back(stream);
  if (ready.empty()) return;
  auto &commands = streams[ready[draw() % ready.size()]];
  Command command = commands.front();
  commands.pop_front();
  const ooc_rectangle &r = command.copied;
  for (size_t row = 0; row < r.height; ++row)
    memcpy((char *)r.to.address + row * r.to.pitch, (char *)r.from.address + row * r.from.pitch, r.width);
  if (command.event) --recorded[command.event];
}

int enter(void *) {
  std::lock_guard guard(mutex);
  return status_of(ENTER);
}

int copy(uint64_t to, uint64_t from, size_t size, void *stream) {
  std::lock_guard guard(mutex);
  ooc_rectangle copied = {};
  copied.to.address = to, copied.from.address = from, copied.width = size, copied.height = 1;
  if (int status = status_of(COPY)) return status;
  streams[stream].push_back({copied, nullptr});
  return 0;
}

int copy_rows(const ooc_rectangle *copied, void *stream) {
  std::lock_guard guard(mutex);
  if (int status = status_of(COPY_ROWS)) return status;
  streams[stream].push_back({*copied, nullptr});
  return 0;
}

int record(void *event, void *stream) {
  std::lock_guard guard(mutex);
  if (int status = status_of(RECORD)) return status;
  ++recorded[event];
  streams[stream].push_back({{}, event});
  return 0;
}

int query(void *event) {
  std::lock_guard guard(mutex);
  if (int status = status_of(QUERY)) return status;
  step();
  return recorded[event] ? NOT_READY : 0;
}

int wait(void *event) {
  for (;;) {
    std::lock_guard guard(mutex);
    if (int status = status_of(WAIT)) return status;
    if (!recorded[event]) return 0;
    step();
  }
}
}  // namespace

extern "C" {
ooc_driver fake_driver = {enter, copy, copy_rows, record, query, wait};

// Forgets everything, and makes call number `first` of a function fail, counted from 1; 0: none.
void fake_reset(unsigned seed, int function, int first) {
  std::lock_guard guard(mutex);
  draw.seed(seed);
  streams.clear(), recorded.clear(), calls.clear(), failing.clear();
  failing[function] = first;
  held = nullptr;
}

void fake_hold(void *stream) {
  std::lock_guard guard(mutex);
  held = stream;
}

int fake_wait(void *event) { return wait(event); }
}
