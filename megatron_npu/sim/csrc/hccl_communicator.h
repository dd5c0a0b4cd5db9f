// A communicator: this rank's end of a segment, its errors, and the way of a call onto its stream.
//
// A call runs in two halves. On the calling thread submit() checks the arguments, numbers the call and
// queues the rest on the stream; a wrong argument is the call's own return value. On the stream's worker
// the body exchanges messages. What fails there has nobody to return to, so it (1) is written into the
// segment for the other ranks, (2) is what HcclGetCommAsyncError answers, which torch_npu's watchdog asks
// every second, (3) fails the device, so that synchronising raises with the text, and (4) is printed. Later
// calls on the communicator fail with it at once.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "hccl_segment.h"

namespace sim::hccl {

class Communicator {
 public:
  Communicator(std::unique_ptr<Segment> segment, std::string name, uint32_t rank);
  // In a dry run: one without peers. Its calls are counted, and end at once with what this rank has.
  Communicator(uint32_t ranks, std::string name, uint32_t rank);

  const std::string name;
  const uint32_t rank;
  const uint32_t ranks;
  Segment& segment() { return *segment_; }
  bool alone() const { return !segment_; }

  // Held while a call is numbered and queued, so that both happen in one order.
  std::mutex numbering;
  uint64_t next_collective() { return ++collectives_; }
  uint64_t next_message(bool outgoing, uint32_t peer) { return ++messages_[{outgoing, peer}]; }

  // Notes that this rank joins the sub-communicator that `inviter` offers under `serial`; false if it did
  // before.
  bool take_up(uint32_t inviter, uint32_t serial) { return taken_up_.insert({inviter, serial}).second; }

  // Calls on one communicator run one at a time, whatever their streams.
  std::mutex execution;

  // A call is unfinished from begin(), when it is queued, to end(); drain() waits until none is.
  void begin();
  void end();
  void drain();

  HcclResult error() const { return error_; }
  std::string error_text();
  // Makes the failure known everywhere, see above; returns `code`. Only the first one counts.
  HcclResult fail(HcclResult code, const std::string& text);
  // Takes over a failure that another rank has written into the segment; returns the error, if there is one.
  HcclResult adopt_failure();

 private:
  std::unique_ptr<Segment> segment_;
  uint64_t collectives_ = 0;
  std::map<std::pair<bool, uint32_t>, uint64_t> messages_;
  std::set<std::pair<uint32_t, uint32_t>> taken_up_;
  std::mutex unfinished_mutex_;
  std::condition_variable finished_;
  uint64_t unfinished_ = 0;
  std::mutex error_mutex_;
  std::string error_text_;
  std::atomic<HcclResult> error_{HCCL_SUCCESS};
};

// The communicator behind a handle; null if there is none (destroyed, or never created). A queued call
// shares ownership, so that destroying a handle never pulls the memory away under a running call.
std::shared_ptr<Communicator> communicator_of(HcclComm handle);

// The handle of the living communicator of a name; null if there is none.
HcclComm handle_of(const std::string& name);

// Refuses a call on the calling thread: keeps the text for aclGetRecentErrMsg, which torch_npu appends to
// its exception, and returns `code`.
HcclResult refuse(HcclResult code, const std::string& text);

// What a collective does on the stream's worker. `call` is complete, with its number.
using Body = std::function<HcclResult(Communicator&, const Call&)>;

// Queues a collective on a stream, or, between HcclGroupStart and HcclGroupEnd, keeps it for the end.
// `bytes`: what this rank hands over, for the counters; `received`: what it gets, where that may be more.
HcclResult submit(HcclComm handle, void* stream, const Call& call, uint64_t bytes, Body body,
                  uint64_t received = 0);

// One side of a send or receive; the number is assigned when it is queued.
struct Message {
  bool outgoing;
  uint32_t peer;
  void* data;
  uint64_t count;
  uint32_t dtype;
};

// The same for messages that are on their way at the same time. `name` is what the counters call them.
HcclResult submit(HcclComm handle, void* stream, const char* name, const std::vector<Message>& messages);

}  // namespace sim::hccl
