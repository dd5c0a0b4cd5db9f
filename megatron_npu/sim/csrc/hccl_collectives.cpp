#include "hccl_collectives.h"

#include <algorithm>
#include <cstring>

#include "hccl_exchange.h"
#include "hccl_reduce.h"
#include "runtime.h"

namespace sim::hccl {

namespace {

// Up to this size an all-reduce sends everything to everybody, which takes one exchange. Above it, each rank
// reduces one section and sends the result around: two exchanges, but less to copy. Both give the same bits.
constexpr uint64_t kDirectBytes = 16 << 10;

// The messages of one collective on one rank.
class Plan {
 public:
  Plan(Communicator& communicator, const Call& call) : communicator_(communicator), call_(call) {}

  void send(uint32_t peer, const char* data, uint64_t bytes) {
    transfers_.push_back({Transfer::Send, peer, const_cast<char*>(data), bytes, call_});
  }
  void receive(uint32_t peer, char* data, uint64_t bytes) {
    transfers_.push_back({Transfer::Receive, peer, data, bytes, call_});
  }
  HcclResult run() { return exchange(communicator_, call_, transfers_, Completion::Written); }

 private:
  Communicator& communicator_;
  const Call& call_;
  std::vector<Transfer> transfers_;
};

// Contributions of all ranks to one result: the own one where it lies, the others in memory of their own.
class Contributions {
 public:
  Contributions(Communicator& communicator, const char* own, uint64_t bytes)
      : memory_(new char[bytes * (communicator.ranks - 1) + 1]) {
    char* next = memory_.get();
    for (uint32_t rank = 0; rank < communicator.ranks; rank++) {
      parts_.push_back(rank == communicator.rank ? own : next);
      if (rank != communicator.rank) next += bytes;
    }
  }

  char* of(uint32_t rank) { return const_cast<char*>(parts_[rank]); }
  void reduce(char* result, uint64_t bytes, const Call& call) const {
    hccl::reduce(result, parts_, bytes / size_of(call.dtype), call.dtype, call.reduction);
  }

 private:
  std::unique_ptr<char[]> memory_;
  std::vector<const char*> parts_;
};

// Sections of a whole number of elements, as equal as they can be.
Parts sections(uint64_t count, uint64_t element, uint32_t ranks) {
  Parts parts;
  for (uint64_t rank = 0; rank < ranks; rank++) {
    const uint64_t start = count * rank / ranks, end = count * (rank + 1) / ranks;
    parts.push_back({start * element, (end - start) * element});
  }
  return parts;
}

// In a dry run every peer is taken to have what this rank has, and nothing large is moved.
void move_small(char* to, const char* from, uint64_t bytes) {
  if (bytes <= static_cast<uint64_t>(dry_limit())) std::memmove(to, from, bytes);
}

// The same for a reduction: counters and sums are those of ranks that all have what this one has.
constexpr uint64_t kReducedAlone = 4 << 10;

void reduce_alone(const Communicator& communicator, const Call& call, const char* from, char* to,
                  uint64_t bytes) {
  if (bytes > std::min<uint64_t>(kReducedAlone, dry_limit())) {
    if (from != to) move_small(to, from, bytes);
    return;
  }
  const std::vector<char> own(from, from + bytes);
  const std::vector<const char*> parts(communicator.ranks, own.data());
  reduce(to, parts, bytes / size_of(call.dtype), call.dtype, call.reduction);
}

}  // namespace

HcclResult exchange_parts(Communicator& communicator, const Call& call, const char* send,
                          const Parts& outgoing, char* receive, const Parts& incoming) {
  if (communicator.alone()) {
    for (uint32_t peer = 0; peer < communicator.ranks; peer++)
      move_small(receive + incoming[peer].offset, send + outgoing[peer].offset,
                 std::min(incoming[peer].bytes, outgoing[peer].bytes));
    return HCCL_SUCCESS;
  }
  Plan plan(communicator, call);
  for (uint32_t peer = 0; peer < communicator.ranks; peer++) {
    if (peer == communicator.rank) continue;
    plan.send(peer, send + outgoing[peer].offset, outgoing[peer].bytes);
    plan.receive(peer, receive + incoming[peer].offset, incoming[peer].bytes);
  }
  const Part &from = outgoing[communicator.rank], &to = incoming[communicator.rank];
  std::memmove(receive + to.offset, send + from.offset, std::min(from.bytes, to.bytes));
  return plan.run();
}

HcclResult reduce_parts(Communicator& communicator, const Call& call, const char* send, const Parts& parts,
                        char* result) {
  const Part& own = parts[communicator.rank];
  if (communicator.alone()) {
    reduce_alone(communicator, call, send + own.offset, result, own.bytes);
    return HCCL_SUCCESS;
  }
  Contributions contributions(communicator, send + own.offset, own.bytes);
  Plan plan(communicator, call);
  for (uint32_t peer = 0; peer < communicator.ranks; peer++) {
    if (peer == communicator.rank) continue;
    plan.send(peer, send + parts[peer].offset, parts[peer].bytes);
    plan.receive(peer, contributions.of(peer), own.bytes);
  }
  if (HcclResult failure = plan.run()) return failure;
  contributions.reduce(result, own.bytes, call);
  return HCCL_SUCCESS;
}

HcclResult all_reduce(Communicator& communicator, const Call& call, const char* send, char* receive) {
  const uint64_t element = size_of(call.dtype), bytes = call.count * element;
  if (communicator.alone()) {
    reduce_alone(communicator, call, send, receive, bytes);
    return HCCL_SUCCESS;
  }
  if (bytes <= kDirectBytes) {
    const Parts everything(communicator.ranks, Part{0, bytes});
    return reduce_parts(communicator, call, send, everything, receive);
  }
  const Parts parts = sections(call.count, element, communicator.ranks);
  const Part& own = parts[communicator.rank];
  if (HcclResult failure = reduce_parts(communicator, call, send, parts, receive + own.offset)) {
    return failure;
  }
  const Parts result(communicator.ranks, own);
  return exchange_parts(communicator, call, receive, result, receive, parts);
}

HcclResult reduce_to_root(Communicator& communicator, const Call& call, const char* send, char* receive) {
  const uint64_t bytes = call.count * size_of(call.dtype);
  if (communicator.alone()) {
    reduce_alone(communicator, call, send, receive, bytes);
    return HCCL_SUCCESS;
  }
  Plan plan(communicator, call);
  if (communicator.rank != call.root) {
    plan.send(call.root, send, bytes);
    return plan.run();
  }
  Contributions contributions(communicator, send, bytes);
  for (uint32_t peer = 0; peer < communicator.ranks; peer++) {
    if (peer != call.root) plan.receive(peer, contributions.of(peer), bytes);
  }
  if (HcclResult failure = plan.run()) return failure;
  contributions.reduce(receive, bytes, call);
  return HCCL_SUCCESS;
}

HcclResult distribute(Communicator& communicator, const Call& call, const char* send, const Parts& parts,
                      char* receive) {
  const Part& own = parts[communicator.rank];
  if (communicator.alone()) {
    if (communicator.rank == call.root && send != receive) move_small(receive, send + own.offset, own.bytes);
    return HCCL_SUCCESS;
  }
  Plan plan(communicator, call);
  if (communicator.rank != call.root) {
    plan.receive(call.root, receive, own.bytes);
    return plan.run();
  }
  for (uint32_t peer = 0; peer < communicator.ranks; peer++) {
    if (peer != call.root) plan.send(peer, send + parts[peer].offset, parts[peer].bytes);
  }
  std::memmove(receive, send + own.offset, own.bytes);
  return plan.run();
}

}  // namespace sim::hccl
