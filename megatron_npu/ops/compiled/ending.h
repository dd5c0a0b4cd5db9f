// How a kernel ends. What is thrown must leave neither a thread of OpenMP nor a function of C: either ends the process.
#pragma once

#include <atomic>
#include <new>
#include <stdexcept>

namespace {

// As `_Status` in abi.py.
enum : int { kDone = 0, kNoMemory = 1, kFailed = 2 };

class Ending {
 public:
  // Do some work; what it throws is kept as the status.
  template <typename Work>
  void of(Work work) noexcept {
    try {
      work();
    } catch (const std::bad_alloc &) {
      status_ = kNoMemory;
    } catch (const std::length_error &) {  // of a vector that no memory could hold
      status_ = kNoMemory;
    } catch (...) {
      status_ = kFailed;
    }
  }

  // Whether some thread has failed, this one or, sooner or later, another.
  bool failed() const { return status_.load(std::memory_order_relaxed) != kDone; }

  int status() const { return status_; }

 private:
  std::atomic<int> status_{kDone};
};

// Return the status of work that is given the ending for its threads.
template <typename Work>
int ended(Work work) {
  Ending ending;
  ending.of([&] { work(ending); });
  return ending.status();
}

}  // namespace
