// Settings, counters, streams and events of the simulated CANN runtime.
#include "runtime.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "codes.h"
#include "failure.h"

namespace sim {
namespace {

std::mutex settings_mutex;
std::map<std::string, std::string>& settings() {
  static std::map<std::string, std::string> values;
  return values;
}

// Tasks queued or running in the whole process: lets a computation see at once that nothing is to be awaited.
std::atomic<int64_t> unfinished_tasks{0};

int next_stream_id() {
  static std::atomic<int> next{0};
  return next++;
}

}  // namespace

std::string setting(const std::string& name, const std::string& otherwise) {
  std::lock_guard<std::mutex> lock(settings_mutex);
  auto found = settings().find(name);
  return found == settings().end() ? otherwise : found->second;
}

int64_t setting(const std::string& name, int64_t otherwise) {
  return std::stoll(setting(name, std::to_string(otherwise)));
}

int64_t dry_limit() {
  static const int64_t bytes = setting("dry", 0);
  return bytes;
}

// ---------------------------------------------------------------- streams

Stream::Stream(int on_device) : device(on_device), id(next_stream_id()) {}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
}

void Stream::submit(Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  tasks_.push_back(std::move(task));
  ++unfinished_;
  ++unfinished_tasks;
  changed_.notify_all();
}

void Stream::run_in_order(Task task) {
  if (idle()) {
    task();
  } else {
    submit(std::move(task));
  }
}

void Stream::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    lock.lock();
    --unfinished_;
    --unfinished_tasks;
    changed_.notify_all();
  }
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return unfinished_ == 0;
}

bool Stream::synchronize(int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto done = [&] { return unfinished_ == 0; };
  if (timeout_ms >= 0) return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), done);
  changed_.wait(lock, done);
  return true;
}

void wait_for_queued(void* stream) {
  if (unfinished_tasks.load(std::memory_order_acquire) != 0) stream_of(stream).synchronize();
}

namespace {

// Streams and events live as long as a handle or a queued task needs them; hence shared, in these tables.
// The tables are never destroyed: worker threads may still run when the process ends.
std::mutex handles_mutex;
auto& streams = *new std::map<void*, std::shared_ptr<Stream>>;

// One recording of an event counts one generation. A wait is for the generation recorded when it was asked
// for, as on hardware: recording again later does not prolong it.
class Event {
 public:
  uint64_t record() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++recorded_;
  }
  void complete(uint64_t generation) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (generation > completed_) {
      completed_ = generation;
      time_ = std::chrono::steady_clock::now();
    }
    changed_.notify_all();
  }
  uint64_t recorded() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }
  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_ >= recorded_;
  }
  bool wait(uint64_t generation, int timeout_ms = -1) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto reached = [&] { return completed_ >= generation; };
    if (timeout_ms >= 0) return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), reached);
    changed_.wait(lock, reached);
    return true;
  }
  std::chrono::steady_clock::time_point time() {
    std::lock_guard<std::mutex> lock(mutex_);
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0, completed_ = 0;
  std::chrono::steady_clock::time_point time_{};
};

auto& events = *new std::map<void*, std::shared_ptr<Event>>;

std::shared_ptr<Event> event_of(void* handle) {
  std::lock_guard<std::mutex> lock(handles_mutex);
  auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Stream>> streams_of_device(int device) {
  std::lock_guard<std::mutex> lock(handles_mutex);
  std::vector<std::shared_ptr<Stream>> found;
  for (auto& [handle, stream] : streams)
    if (stream->device == device) found.push_back(stream);
  return found;
}

Stream& default_stream(int device) {
  static auto& defaults = *new std::map<int, std::unique_ptr<Stream>>;
  std::lock_guard<std::mutex> lock(handles_mutex);
  auto& stream = defaults[device];
  if (!stream) stream = std::make_unique<Stream>(device);
  return *stream;
}

int create_stream(void** handle) {
  auto stream = std::make_shared<Stream>(current_device());
  *handle = stream.get();
  std::lock_guard<std::mutex> lock(handles_mutex);
  streams[stream.get()] = stream;
  return kOk;
}

int create_event(void** handle) {
  auto event = std::make_shared<Event>();
  *handle = event.get();
  std::lock_guard<std::mutex> lock(handles_mutex);
  events[event.get()] = event;
  return kOk;
}

int synchronize_device(int timeout_ms) {
  if (!default_stream(current_device()).synchronize(timeout_ms)) return kStreamSyncTimeout;
  for (auto& stream : streams_of_device(current_device()))
    if (!stream->synchronize(timeout_ms)) return kStreamSyncTimeout;
  return device_status();
}

}  // namespace

Stream& stream_of(void* handle) {
  return handle ? *static_cast<Stream*>(handle) : default_stream(current_device());
}

// ---------------------------------------------------------------- counters

namespace {

struct Traffic {
  uint64_t calls = 0, bytes = 0;
};
std::mutex counters_mutex;
auto& traffic = *new std::map<std::string, Traffic>;
auto& defaults_called = *new std::map<std::string, uint64_t>;

}  // namespace

size_t give_text(const std::string& text, char* buffer, size_t capacity) {
  if (buffer && capacity) {
    size_t length = std::min(capacity - 1, text.size());
    std::memcpy(buffer, text.data(), length);
    buffer[length] = 0;
  }
  return text.size();
}

void count_communication(const std::string& name, size_t bytes) {
  std::lock_guard<std::mutex> lock(counters_mutex);
  auto& entry = traffic[name];
  ++entry.calls;
  entry.bytes += bytes;
}

void note_default(const char* name) {
  static const bool verbose = setting("verbose", 0) != 0;
  std::lock_guard<std::mutex> lock(counters_mutex);
  if (++defaults_called[name] == 1 && verbose) std::fprintf(stderr, "simulated NPU: %s has no body\n", name);
}

void note_refused(const char* name) {
  note_default(name);
  set_recent_error(std::string(name) + " computes nothing here: the operation has no kernel (docs/explanation/simulator.md)");
}

}  // namespace sim

using namespace sim;

// ---------------------------------------------------------------- the interface to Python

SIM_API void sim_set(const char* name, const char* value) {
  std::lock_guard<std::mutex> lock(settings_mutex);
  settings()[name] = value;
}

// Lines "name calls bytes", one per collective. Returns the length of the whole text.
SIM_API size_t sim_communication(char* buffer, size_t capacity) {
  std::lock_guard<std::mutex> lock(counters_mutex);
  std::string text;
  for (auto& [name, entry] : traffic)
    text += name + " " + std::to_string(entry.calls) + " " + std::to_string(entry.bytes) + "\n";
  return give_text(text, buffer, capacity);
}

// Lines "name calls": CANN functions without a body of their own that were called.
SIM_API size_t sim_defaults_called(char* buffer, size_t capacity) {
  std::lock_guard<std::mutex> lock(counters_mutex);
  std::string text;
  for (auto& [name, calls] : defaults_called) text += name + " " + std::to_string(calls) + "\n";
  return give_text(text, buffer, capacity);
}

// ---------------------------------------------------------------- CANN: streams

SIM_API int aclrtCreateStream(void** stream) { return create_stream(stream); }
SIM_API int aclrtCreateStreamWithConfig(void** stream, uint32_t /*priority*/, uint32_t /*flag*/) {
  return create_stream(stream);
}
SIM_API int aclrtDestroyStream(void* stream) {
  std::shared_ptr<Stream> last;  // the destructor waits for the worker, so it must run without the lock
  std::lock_guard<std::mutex> lock(handles_mutex);
  auto found = streams.find(stream);
  if (found == streams.end()) return kInvalidParameter;
  last = std::move(found->second);
  streams.erase(found);
  return kOk;
}
SIM_API int aclrtDestroyStreamForce(void* stream) { return aclrtDestroyStream(stream); }
SIM_API int aclrtSynchronizeStream(void* stream) {
  stream_of(stream).synchronize();
  return device_status();
}
SIM_API int aclrtSynchronizeStreamWithTimeout(void* stream, int timeout_ms) {
  return stream_of(stream).synchronize(timeout_ms) ? device_status() : kStreamSyncTimeout;
}
// 0: everything on the stream is done; 1: not yet.
SIM_API int aclrtStreamQuery(void* stream, int* status) {
  *status = stream_of(stream).idle() ? 0 : 1;
  return kOk;
}
SIM_API int aclrtStreamGetId(void* stream, int* id) {
  *id = stream_of(stream).id;
  return kOk;
}
SIM_API int aclrtSynchronizeDevice() { return synchronize_device(-1); }
SIM_API int aclrtSynchronizeDeviceWithTimeout(int timeout_ms) { return synchronize_device(timeout_ms); }

// ---------------------------------------------------------------- CANN: events

SIM_API int aclrtCreateEvent(void** event) { return create_event(event); }
SIM_API int aclrtCreateEventWithFlag(void** event, uint32_t /*flag*/) { return create_event(event); }
SIM_API int aclrtCreateEventExWithFlag(void** event, uint32_t /*flag*/) { return create_event(event); }
SIM_API int aclrtDestroyEvent(void* event) {
  std::lock_guard<std::mutex> lock(handles_mutex);
  return events.erase(event) ? kOk : kInvalidParameter;
}
SIM_API int aclrtRecordEvent(void* handle, void* stream) {
  auto event = event_of(handle);
  if (!event) return kInvalidParameter;
  uint64_t generation = event->record();
  stream_of(stream).run_in_order([event, generation] { event->complete(generation); });
  return kOk;
}
SIM_API int aclrtResetEvent(void* /*event*/, void* /*stream*/) { return kOk; }
// 1: done (ACL_EVENT_RECORDED_STATUS_COMPLETE); the wait status below has it the other way round.
SIM_API int aclrtQueryEventStatus(void* handle, int* status) {
  auto event = event_of(handle);
  if (!event) return kInvalidParameter;
  *status = event->done() ? 1 : 0;
  return kOk;
}
SIM_API int aclrtQueryEventWaitStatus(void* handle, int* status) {
  auto event = event_of(handle);
  if (!event) return kInvalidParameter;
  *status = event->done() ? 0 : 1;
  return kOk;
}
SIM_API int aclrtSynchronizeEventWithTimeout(void* handle, int timeout_ms) {
  auto event = event_of(handle);
  if (!event) return kInvalidParameter;
  return event->wait(event->recorded(), timeout_ms) ? device_status() : kEventSyncTimeout;
}
SIM_API int aclrtSynchronizeEvent(void* event) { return aclrtSynchronizeEventWithTimeout(event, -1); }
SIM_API int aclrtStreamWaitEvent(void* stream, void* handle) {
  auto event = event_of(handle);
  if (!event) return kInvalidParameter;
  if (event->done()) return kOk;
  uint64_t generation = event->recorded();
  stream_of(stream).submit([event, generation] { event->wait(generation); });
  return kOk;
}
SIM_API int aclrtEventElapsedTime(float* milliseconds, void* start, void* end) {
  auto first = event_of(start), second = event_of(end);
  if (!first || !second) return kInvalidParameter;
  if (!first->recorded() || !second->recorded() || !first->done() || !second->done()) return kEventNotComplete;
  *milliseconds = std::chrono::duration<float, std::milli>(second->time() - first->time()).count();
  return kOk;
}
SIM_API int aclrtEventGetTimestamp(void* handle, uint64_t* microseconds) {
  auto event = event_of(handle);
  if (!event) return kInvalidParameter;
  auto since = event->time().time_since_epoch();
  *microseconds = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  return kOk;
}
