#include "failure.h"

#include <atomic>
#include <cstdio>
#include <mutex>

#include "codes.h"
#include "runtime.h"

namespace sim {
namespace {

std::atomic<bool> failed{false};
std::mutex failure_mutex;
auto& failure = *new std::string;  // workers may still run when the process ends

thread_local std::string recent;
thread_local std::string answered;  // stays valid until the thread asks again

}  // namespace

void set_recent_error(const std::string& text) { recent = text; }

void fail_device(const std::string& text) {
  std::lock_guard<std::mutex> lock(failure_mutex);
  if (failed) return;
  std::fprintf(stderr, "simulated NPU: %s\n", text.c_str());
  failure = text;
  failed = true;
}

int device_status() {
  if (!failed) return kOk;
  std::lock_guard<std::mutex> lock(failure_mutex);
  set_recent_error(failure);
  return kDeviceFailed;
}

}  // namespace sim

using namespace sim;

// Answers once, as CANN does: an old text must not explain a new error.
SIM_API const char* aclGetRecentErrMsg() {
  answered = recent.empty() ? "(simulated NPU)" : "simulated NPU: " + recent;
  recent.clear();
  return answered.c_str();
}
