#include "hccl_traffic.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

#include "runtime.h"

namespace sim::hccl {

namespace {

// The documentation of HCCL_BUFFSIZE: MiB of one buffer, of which a communicator has two.
constexpr uint32_t kDefaultBuffer = 200;

struct Traffic {
  uint32_t ranks;
  uint32_t buffer;  // MiB of each of the two
  uint64_t calls, bytes, largest;
  struct {
    uint64_t messages, bytes;
  } sent[2];  // within this machine, to others
};

// Never destroyed: workers may still run when the process ends.
std::mutex traffic_mutex;
auto& traffic = *new std::map<std::string, Traffic>;

uint32_t default_buffer() {
  const char* given = std::getenv("HCCL_BUFFSIZE");
  const int value = given ? std::atoi(given) : 0;
  return value > 0 ? value : kDefaultBuffer;
}

}  // namespace

void note_communicator(const std::string& name, uint32_t ranks, uint32_t buffer) {
  std::lock_guard<std::mutex> lock(traffic_mutex);
  Traffic& entry = traffic[name];
  entry.ranks = ranks;
  entry.buffer = buffer == kBufferNotSet || buffer == 0 ? default_buffer() : buffer;
}

void note_destroyed(const std::string& name) {
  std::lock_guard<std::mutex> lock(traffic_mutex);
  traffic[name].buffer = 0;
}

void count_message(const std::string& name, uint64_t bytes, uint64_t larger) {
  std::lock_guard<std::mutex> lock(traffic_mutex);
  Traffic& entry = traffic[name];
  entry.calls++;
  entry.bytes += bytes;
  entry.largest = std::max(entry.largest, larger);
}

void count_sent(const std::string& name, bool between, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(traffic_mutex);
  auto& sent = traffic[name].sent[between];
  sent.messages++;
  sent.bytes += bytes;
}

}  // namespace sim::hccl

using namespace sim::hccl;

// Lines "name ranks buffer calls bytes largest messages bytes messages bytes", the last four within this
// machine and to others, one per communicator that this process ever had.
SIM_API size_t sim_communicators(char* buffer, size_t capacity) {
  std::lock_guard<std::mutex> lock(traffic_mutex);
  std::string text;
  for (const auto& [name, entry] : traffic) {
    text += name;
    const auto& [within, between] = entry.sent;
    for (uint64_t value : {uint64_t{entry.ranks}, uint64_t{entry.buffer}, entry.calls, entry.bytes, entry.largest,
                           within.messages, within.bytes, between.messages, between.bytes})
      text += " " + std::to_string(value);
    text += "\n";
  }
  return sim::give_text(text, buffer, capacity);
}
