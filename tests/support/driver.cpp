// A fake of the functions of the CUDA driver that `kernels/host/pool.c` calls. Device memory is memory of the host.
// Streams run their commands late, and overtake each other. A stream that is held runs nothing.

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
  uint64_t mark;         // address of a number that is written, or 0
  uint32_t value;
  void *event;   // recorded, or null
  void *waited;  // an event, or null: its recording number `turn` comes before this command
  int turn;
};
std::mutex mutex;
std::mt19937 draw;
std::map<void *, std::deque<Command>> streams;
std::map<void *, int> recorded, reached;  // event -> its recordings, and those that its streams have reached
std::map<int, int> calls, failing;  // number of a function -> its calls, and the call that fails
void *held;

enum { ENTER, COPY, COPY_ROWS, WRITE, QUERY, RECORD, WAIT };
constexpr int FAILED = 719, NOT_READY = 600;

int status_of(int function) { return ++calls[function] == failing[function] ? FAILED : 0; }

// Runs the next command of a random stream.
void step() {
  std::vector<void *> ready;
  for (auto &[stream, commands] : streams)
    if (!commands.empty() && stream != held && reached[commands.front().waited] >= commands.front().turn)
      ready.push_back(stream);
  if (ready.empty()) return;
  auto &commands = streams[ready[draw() % ready.size()]];
  Command command = commands.front();
  commands.pop_front();
  const ooc_rectangle &r = command.copied;
  for (size_t row = 0; row < r.height; ++row)
    memcpy((char *)r.to.address + row * r.to.pitch, (char *)r.from.address + row * r.from.pitch, r.width);
  if (command.mark) __atomic_store_n((uint32_t *)command.mark, command.value, __ATOMIC_RELEASE);
  if (command.event) ++reached[command.event];
}

int enter(void *) {
  std::lock_guard guard(mutex);
  return status_of(ENTER);
}

int push(int function, void *stream, const Command &command) {
  std::lock_guard guard(mutex);
  if (int status = status_of(function)) return status;
  streams[stream].push_back(command);
  streams[stream].back().turn = command.waited ? recorded[command.waited] : 0;
  recorded[command.event] += command.event != nullptr;
  if (draw() % 2) step();
  return 0;
}

int copy(uint64_t to, uint64_t from, size_t size, void *stream) {
  ooc_rectangle copied = {};
  copied.to.address = to, copied.from.address = from, copied.width = size, copied.height = 1;
  return push(COPY, stream, {copied});
}

int copy_rows(const ooc_rectangle *copied, void *stream) { return push(COPY_ROWS, stream, {*copied}); }

int write(void *stream, uint64_t address, uint32_t value, unsigned) {
  return push(WRITE, stream, {{}, address, value});
}

int record(void *event, void *stream) { return push(RECORD, stream, {{}, 0, 0, event}); }

int wait(void *stream, void *event, unsigned) { return push(WAIT, stream, {{}, 0, 0, nullptr, event}); }

int query(void *stream) {
  std::lock_guard guard(mutex);
  if (int status = status_of(QUERY)) return status;
  for (int i = 0; i < 20; ++i) step();
  return streams[stream].empty() ? 0 : NOT_READY;
}
}  // namespace

extern "C" {
ooc_driver fake_driver = {enter, copy, copy_rows, write, query, record, wait};

// Forgets everything.
void fake_reset(unsigned seed) {
  std::lock_guard guard(mutex);
  draw.seed(seed);
  streams.clear(), recorded.clear(), reached.clear(), calls.clear(), failing.clear();
  held = nullptr;
}

// Makes call number `first` of a function fail, counted from now on, from 1; 0: none.
void fake_fail(int function, int first) {
  std::lock_guard guard(mutex);
  calls.clear(), failing.clear();
  failing[function] = first;
}

int fake_recordings(void *event) {
  std::lock_guard guard(mutex);
  return recorded[event];
}

int fake_reached(void *event) {
  std::lock_guard guard(mutex);
  return reached[event];
}

void fake_step() {
  std::lock_guard guard(mutex);
  step();
}

void fake_record(void *event, void *stream) { record(event, stream); }

void fake_hold(void *stream) {
  std::lock_guard guard(mutex);
  held = stream;
}

// Runs commands until an event is reached.
void fake_wait(void *event) {
  std::lock_guard guard(mutex);
  while (reached[event] < recorded[event]) step();
}

// `ooc_move` of pieces that are rows of an `ooc_memory`, or parts of one.
int fake_move(const void *place, const ooc_piece *piece, char *buffer, int) {
  const ooc_memory *from = (const ooc_memory *)place;
  for (size_t row = 0; row < piece->rows; ++row)
    memcpy(buffer + row * piece->size, from->address + (piece->row + row) * from->pitch + piece->at, piece->size);
  return 0;
}
}
