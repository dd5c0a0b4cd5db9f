// What the parts of the simulated CANN share: settings, streams, counters. Implemented in runtime.cpp.
//
// Model. Device memory is host memory. Computation runs on the thread that asks for it (compute.cpp), at
// once. Communication (hccl_*.cpp) is queued on a stream and runs on that stream's worker thread. Copies,
// events and computations that come after queued work on a stream wait for it, as on hardware.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

// Marks a function that torch_npu, or Python through ctypes, finds by its name.
#define SIM_API extern "C" __attribute__((visibility("default")))

namespace sim {

// The value of a setting, as megatron_npu/sim/settings.py: simulator_values() names it; `otherwise` if unset.
std::string setting(const std::string& name, const std::string& otherwise);
int64_t setting(const std::string& name, int64_t otherwise);

// In a dry run: bytes above which nothing is computed or copied; 0: this is none. See dry.h.
int64_t dry_limit();

using Task = std::function<void()>;

// A queue of tasks that run one after the other. The worker thread starts with the first task, so that a
// stream which only computes costs nothing.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();  // runs what is queued to its end
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Queues a task; returns at once.
  void submit(Task task);
  // Runs a task now if nothing is queued before it, else queues it.
  void run_in_order(Task task);
  bool idle();
  // Waits until all tasks submitted so far are done; false after `timeout_ms` (negative: no limit).
  bool synchronize(int timeout_ms = -1);

  const int device;
  const int id;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  size_t unfinished_ = 0;  // queued or running
  bool closing_ = false;
  std::thread worker_;
};

// The stream behind an aclrtStream; null is the default stream of the calling thread's device.
Stream& stream_of(void* handle);

// Waits for the tasks queued on a stream before the calling thread computes on data that they may write.
void wait_for_queued(void* stream);

// The device that the calling thread has set; 0 if it has set none.
int current_device();

// Whether an address of a device lies in host memory that is registered for it (torch_npu's swapped memory).
bool in_host_memory(const void* address);

// Counts one collective of this rank: `name` as in HcclAllReduce without Hccl, `bytes` this rank sends.
void count_communication(const std::string& name, size_t bytes);

// Called by the generated functions: a CANN function was called that the simulator does not implement.
void note_default(const char* name);
// The same for a function that would compute something and therefore fails; the next error message says so.
void note_refused(const char* name);

// Copies a text and its final zero into a buffer as far as it fits; returns the text's length.
size_t give_text(const std::string& text, char* buffer, size_t capacity);

}  // namespace sim
