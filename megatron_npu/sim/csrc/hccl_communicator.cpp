#include "hccl_communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>

#include "hccl_exchange.h"
#include "failure.h"
#include "hccl_traffic.h"
#include "runtime.h"

namespace sim::hccl {

namespace {

// One call on its way to a stream: a collective has a body, send and receive have messages.
struct Queued {
  std::shared_ptr<Communicator> communicator;
  void* stream;
  Call call;
  Body body;
  std::vector<Message> messages;
};

// What the calling thread has submitted since its outermost HcclGroupStart.
struct Group {
  int depth = 0;
  std::vector<Queued> calls;
};
thread_local Group group;

std::vector<Transfer> number(Communicator& communicator, const std::vector<Message>& messages) {
  std::vector<Transfer> transfers;
  for (const Message& message : messages) {
    const uint64_t sequence = communicator.next_message(message.outgoing, message.peer);
    const Call call{Operation::SendReceive, message.dtype, kNone, kNone, message.count, sequence};
    transfers.push_back({message.outgoing ? Transfer::Send : Transfer::Receive, message.peer,
                         static_cast<char*>(message.data), message.count * size_of(message.dtype), call});
  }
  return transfers;
}

// The second half of a call, on the stream's worker.
void run(Communicator& communicator, const Call& call, const Body& body) {
  static const std::chrono::microseconds delay(setting("hccl_delay", int64_t{0}));
  if (delay.count() != 0) std::this_thread::sleep_for(delay);
  std::lock_guard<std::mutex> lock(communicator.execution);
  if (communicator.error() != HCCL_SUCCESS) return;
  try {
    body(communicator, call);
  } catch (const std::exception& exception) {  // no memory for the contributions of the others
    communicator.fail(HCCL_E_INTERNAL, describe(call) + ": " + exception.what());
  }
}

void queue(Queued queued) {
  Communicator& communicator = *queued.communicator;
  if (communicator.alone()) {
    if (queued.body) queued.body(communicator, queued.call);
    return;
  }
  std::lock_guard<std::mutex> lock(communicator.numbering);
  Call call = queued.call;
  Body body = std::move(queued.body);
  if (body) {
    call.sequence = communicator.next_collective();
    body = [inner = std::move(body)](Communicator& communicator, const Call& call) {
      const HcclResult fits = enter(communicator, call);
      return fits ? fits : inner(communicator, call);
    };
  } else {
    std::vector<Transfer> transfers = number(communicator, queued.messages);
    call = transfers.front().call;
    body = [transfers = std::move(transfers)](Communicator& communicator, const Call& call) {
      return exchange(communicator, call, transfers, Completion::Received);
    };
  }
  communicator.begin();
  stream_of(queued.stream).submit([owner = queued.communicator, call, body = std::move(body)] {
    run(*owner, call, body);
    owner->end();
  });
}

// Queues a call, or keeps it for the end of the group. Messages of one group are on their way together.
void queue_or_keep(Queued queued) {
  if (group.depth == 0) return queue(std::move(queued));
  const auto joins = [&](const Queued& kept) {
    return !kept.body && kept.communicator == queued.communicator && kept.stream == queued.stream;
  };
  auto kept = queued.body ? group.calls.end() : std::find_if(group.calls.begin(), group.calls.end(), joins);
  if (kept == group.calls.end()) {
    group.calls.push_back(std::move(queued));
  } else {
    kept->messages.insert(kept->messages.end(), queued.messages.begin(), queued.messages.end());
  }
}

// The communicator for a new call; null, with `result` set, if there is none or it has failed.
std::shared_ptr<Communicator> usable(HcclComm handle, HcclResult* result) {
  auto communicator = communicator_of(handle);
  if (!communicator) {
    *result = refuse(HCCL_E_PTR, "the communicator was destroyed or never created");
    return nullptr;
  }
  if (communicator->adopt_failure() != HCCL_SUCCESS) {
    *result = refuse(communicator->error(), communicator->error_text());
    return nullptr;
  }
  return communicator;
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Segment> segment, std::string name, uint32_t rank)
    : name(std::move(name)), rank(rank), ranks(segment->ranks), segment_(std::move(segment)) {}

Communicator::Communicator(uint32_t ranks, std::string name, uint32_t rank)
    : name(std::move(name)), rank(rank), ranks(ranks) {}

void Communicator::begin() {
  std::lock_guard<std::mutex> lock(unfinished_mutex_);
  unfinished_++;
}

void Communicator::end() {
  std::lock_guard<std::mutex> lock(unfinished_mutex_);
  if (--unfinished_ == 0) finished_.notify_all();
}

void Communicator::drain() {
  std::unique_lock<std::mutex> lock(unfinished_mutex_);
  finished_.wait(lock, [this] { return unfinished_ == 0; });
}

std::string Communicator::error_text() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return error_text_;
}

HcclResult Communicator::fail(HcclResult code, const std::string& text) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (error_ != HCCL_SUCCESS) return error_;
  segment_->fail(rank, text.c_str());
  error_text_ = text;
  fail_device("HCCL: " + text);
  error_ = code;
  return code;
}

HcclResult Communicator::adopt_failure() {
  if (alone()) return error_;
  const Failure& failure = segment_->header().failure;
  if (failure.state.load(std::memory_order_acquire) != kWritten) return error_;
  return fail(HCCL_E_REMOTE, segment_->describe(rank) + " stops, because " +
                                 segment_->describe(failure.rank) + " reported: " + failure.text);
}

HcclResult refuse(HcclResult code, const std::string& text) {
  set_recent_error("HCCL: " + text);
  return code;
}

HcclResult submit(HcclComm handle, void* stream, const Call& call, uint64_t bytes, Body body,
                  uint64_t received) {
  HcclResult result = HCCL_SUCCESS;
  auto communicator = usable(handle, &result);
  if (!communicator) return result;
  count_communication(name_of(call.operation), bytes);
  count_message(communicator->name, bytes, std::max(bytes, received));
  queue_or_keep({std::move(communicator), stream, call, std::move(body), {}});
  return HCCL_SUCCESS;
}

HcclResult submit(HcclComm handle, void* stream, const char* name, const std::vector<Message>& messages) {
  HcclResult result = HCCL_SUCCESS;
  auto communicator = usable(handle, &result);
  if (!communicator || messages.empty()) return result;
  uint64_t bytes = 0, received = 0;
  for (const Message& message : messages) {
    if (message.peer >= communicator->ranks) {
      return refuse(HCCL_E_PARA, std::string(name) + ": there is no rank " + std::to_string(message.peer) +
                                     " among " + std::to_string(communicator->ranks));
    }
    (message.outgoing ? bytes : received) += message.count * size_of(message.dtype);
  }
  count_communication(name, bytes);
  count_message(communicator->name, bytes, std::max(bytes, received));
  queue_or_keep({std::move(communicator), stream, Call{}, nullptr, messages});
  return HCCL_SUCCESS;
}

}  // namespace sim::hccl

using namespace sim::hccl;

SIM_API HcclResult HcclGroupStart() {
  group.depth++;
  return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGroupEnd() {
  if (group.depth == 0) return refuse(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart");
  if (--group.depth != 0) return HCCL_SUCCESS;
  std::vector<Queued> calls = std::move(group.calls);
  group.calls.clear();
  for (Queued& queued : calls) queue(std::move(queued));
  return HCCL_SUCCESS;
}
