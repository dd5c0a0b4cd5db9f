// The collectives: which messages each exchanges, and what it computes from them.
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

// A part of a buffer, in bytes.
struct Part {
  uint64_t offset;
  uint64_t bytes;
};
using Parts = std::vector<Part>;  // one per rank

Parts equal_parts(uint64_t bytes, uint32_t ranks) {
  Parts parts;
  for (uint32_t rank = 0; rank < ranks; rank++) parts.push_back({rank * bytes, bytes});
  return parts;
}

Parts parts_of(const void* counts, const void* displacements, uint64_t element, uint32_t ranks) {
  const auto* count = static_cast<const uint64_t*>(counts);
  const auto* displacement = static_cast<const uint64_t*>(displacements);
  Parts parts;
  for (uint32_t rank = 0; rank < ranks; rank++)
    parts.push_back({displacement[rank] * element, count[rank] * element});
  return parts;
}

uint64_t total(const Parts& parts) {
  uint64_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  return bytes;
}

// ---- building blocks, on the worker

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

// Everybody sends part `p` of `send` to rank p and receives part p of `receive` from it. The own part is
// copied, unless it is already in place.
HcclResult exchange_parts(Communicator& communicator, const Call& call, const char* send,
                          const Parts& outgoing, char* receive, const Parts& incoming) {
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

// Everybody gives part p of `send` to rank p, which reduces what it gets. `result` may lie in `send`, as the
// part of this rank.
HcclResult reduce_parts(Communicator& communicator, const Call& call, const char* send, const Parts& parts,
                        char* result) {
  const Part& own = parts[communicator.rank];
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

// ---- all-reduce

HcclResult all_reduce_directly(Communicator& communicator, const Call& call, const char* send, char* receive,
                               uint64_t bytes) {
  Contributions contributions(communicator, send, bytes);
  Plan plan(communicator, call);
  for (uint32_t peer = 0; peer < communicator.ranks; peer++) {
    if (peer == communicator.rank) continue;
    plan.send(peer, send, bytes);
    plan.receive(peer, contributions.of(peer), bytes);
  }
  if (HcclResult failure = plan.run()) return failure;
  contributions.reduce(receive, bytes, call);
  return HCCL_SUCCESS;
}

// Sections of a whole number of elements, as equal as they can be.
Parts sections(uint64_t count, uint64_t element, uint32_t ranks) {
  Parts parts;
  for (uint64_t rank = 0; rank < ranks; rank++) {
    const uint64_t start = count * rank / ranks, end = count * (rank + 1) / ranks;
    parts.push_back({start * element, (end - start) * element});
  }
  return parts;
}

HcclResult all_reduce(Communicator& communicator, const Call& call, const char* send, char* receive) {
  const uint64_t element = size_of(call.dtype), bytes = call.count * element;
  if (bytes <= kDirectBytes) return all_reduce_directly(communicator, call, send, receive, bytes);
  const Parts parts = sections(call.count, element, communicator.ranks);
  const Part& own = parts[communicator.rank];
  if (HcclResult failure = reduce_parts(communicator, call, send, parts, receive + own.offset))
    return failure;
  const Parts same(communicator.ranks, own);
  return exchange_parts(communicator, call, receive, same, receive, parts);
}

// ---- collectives with a root

HcclResult reduce_to_root(Communicator& communicator, const Call& call, const char* send, char* receive) {
  const uint64_t bytes = call.count * size_of(call.dtype);
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

// The root sends part p to rank p; a broadcast sends the same part to all.
HcclResult distribute(Communicator& communicator, const Call& call, const char* send, const Parts& parts,
                      char* receive) {
  const Part& own = parts[communicator.rank];
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

// ---- checks on the calling thread

HcclResult check(HcclComm handle, const Call& call) {
  const std::string name = name_of(call.operation);
  auto communicator = communicator_of(handle);
  if (!communicator) return refuse(HCCL_E_PTR, name + ": the communicator was destroyed or never created");
  if (size_of(call.dtype) == 0)
    return refuse(HCCL_E_PARA, name + ": unknown data type " + std::to_string(call.dtype));
  if (call.root != kNone && call.root >= communicator->ranks) {
    return refuse(HCCL_E_PARA, name + ": there is no rank " + std::to_string(call.root) + " to be the root");
  }
  if (call.reduction != kNone && !can_reduce(call.dtype, call.reduction)) {
    return refuse(HCCL_E_NOT_SUPPORT,
                  describe(call) + ": HCCL on Atlas A2 does not reduce this type this way");
  }
  return HCCL_SUCCESS;
}

Call make_call(Operation operation, uint64_t count, int dtype, uint32_t reduction = kNone,
               uint32_t root = kNone) {
  return {operation, static_cast<uint32_t>(dtype), reduction, root, count, 0};
}

// Communicator size for splitting arguments; `check` has passed.
uint32_t ranks_of(HcclComm handle) { return communicator_of(handle)->ranks; }
uint32_t rank_of(HcclComm handle) { return communicator_of(handle)->rank; }

HcclResult gather_parts(HcclComm handle, void* stream, const Call& call, const void* send, uint64_t bytes,
                        void* receive, const Parts& incoming) {
  const Parts outgoing(incoming.size(), Part{0, bytes});
  return submit(handle, stream, call, bytes, [=](Communicator& communicator, const Call& call) {
    return exchange_parts(communicator, call, static_cast<const char*>(send), outgoing,
                          static_cast<char*>(receive), incoming);
  });
}

HcclResult scatter_reduced(HcclComm handle, void* stream, const Call& call, const void* send,
                           const Parts& parts, void* receive) {
  return submit(handle, stream, call, total(parts), [=](Communicator& communicator, const Call& call) {
    return reduce_parts(communicator, call, static_cast<const char*>(send), parts,
                        static_cast<char*>(receive));
  });
}

HcclResult all_to_all(HcclComm handle, void* stream, const Call& call, const void* send,
                      const Parts& outgoing, void* receive, const Parts& incoming) {
  return submit(handle, stream, call, total(outgoing), [=](Communicator& communicator, const Call& call) {
    return exchange_parts(communicator, call, static_cast<const char*>(send), outgoing,
                          static_cast<char*>(receive), incoming);
  });
}

}  // namespace

}  // namespace sim::hccl

using namespace sim::hccl;

// ---- HCCL's interface. Counts and displacements are in elements; arrays hold one uint64 per rank.

SIM_API HcclResult HcclAllReduce(const void* send, void* receive, uint64_t count, HcclDataType dtype,
                                 HcclReduceOp reduction, HcclComm handle, void* stream) {
  const Call call = make_call(Operation::AllReduce, count, dtype, reduction);
  if (HcclResult wrong = check(handle, call)) return wrong;
  return submit(
      handle, stream, call, count * size_of(dtype), [=](Communicator& communicator, const Call& call) {
        return all_reduce(communicator, call, static_cast<const char*>(send), static_cast<char*>(receive));
      });
}

SIM_API HcclResult HcclReduce(const void* send, void* receive, uint64_t count, HcclDataType dtype,
                              HcclReduceOp reduction, uint32_t root, HcclComm handle, void* stream) {
  const Call call = make_call(Operation::Reduce, count, dtype, reduction, root);
  if (HcclResult wrong = check(handle, call)) return wrong;
  return submit(handle, stream, call, count * size_of(dtype),
                [=](Communicator& communicator, const Call& call) {
                  return reduce_to_root(communicator, call, static_cast<const char*>(send),
                                        static_cast<char*>(receive));
                });
}

SIM_API HcclResult HcclReduceScatter(const void* send, void* receive, uint64_t receive_count,
                                     HcclDataType dtype, HcclReduceOp reduction, HcclComm handle,
                                     void* stream) {
  const Call call = make_call(Operation::ReduceScatter, receive_count, dtype, reduction);
  if (HcclResult wrong = check(handle, call)) return wrong;
  const Parts parts = equal_parts(receive_count * size_of(dtype), ranks_of(handle));
  return scatter_reduced(handle, stream, call, send, parts, receive);
}

SIM_API HcclResult HcclReduceScatterV(const void* send, const void* counts, const void* displacements,
                                      void* receive, uint64_t receive_count, HcclDataType dtype,
                                      HcclReduceOp reduction, HcclComm handle, void* stream) {
  const Call call = make_call(Operation::ReduceScatterV, 0, dtype, reduction);
  if (HcclResult wrong = check(handle, call)) return wrong;
  const Parts parts = parts_of(counts, displacements, size_of(dtype), ranks_of(handle));
  if (parts[rank_of(handle)].bytes != receive_count * size_of(dtype)) {
    return refuse(HCCL_E_PARA, "ReduceScatterV: recvCount is not this rank's entry of sendCounts");
  }
  return scatter_reduced(handle, stream, call, send, parts, receive);
}

SIM_API HcclResult HcclAllGather(const void* send, void* receive, uint64_t count, HcclDataType dtype,
                                 HcclComm handle, void* stream) {
  const Call call = make_call(Operation::AllGather, count, dtype);
  if (HcclResult wrong = check(handle, call)) return wrong;
  const uint64_t bytes = count * size_of(dtype);
  return gather_parts(handle, stream, call, send, bytes, receive, equal_parts(bytes, ranks_of(handle)));
}

SIM_API HcclResult HcclAllGatherV(const void* send, uint64_t count, void* receive, const void* counts,
                                  const void* displacements, HcclDataType dtype, HcclComm handle,
                                  void* stream) {
  const Call call = make_call(Operation::AllGatherV, 0, dtype);
  if (HcclResult wrong = check(handle, call)) return wrong;
  const Parts parts = parts_of(counts, displacements, size_of(dtype), ranks_of(handle));
  if (parts[rank_of(handle)].bytes != count * size_of(dtype)) {
    return refuse(HCCL_E_PARA, "AllGatherV: sendCount is not this rank's entry of recvCounts");
  }
  return gather_parts(handle, stream, call, send, count * size_of(dtype), receive, parts);
}

SIM_API HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root,
                                 HcclComm handle, void* stream) {
  const Call call = make_call(Operation::Broadcast, count, dtype, kNone, root);
  if (HcclResult wrong = check(handle, call)) return wrong;
  const uint64_t bytes = count * size_of(dtype);
  const Parts parts(ranks_of(handle), Part{0, bytes});
  return submit(handle, stream, call, bytes, [=](Communicator& communicator, const Call& call) {
    return distribute(communicator, call, static_cast<const char*>(buffer), parts,
                      static_cast<char*>(buffer));
  });
}

SIM_API HcclResult HcclScatter(const void* send, void* receive, uint64_t receive_count, HcclDataType dtype,
                               uint32_t root, HcclComm handle, void* stream) {
  const Call call = make_call(Operation::Scatter, receive_count, dtype, kNone, root);
  if (HcclResult wrong = check(handle, call)) return wrong;
  const Parts parts = equal_parts(receive_count * size_of(dtype), ranks_of(handle));
  return submit(handle, stream, call, parts[0].bytes, [=](Communicator& communicator, const Call& call) {
    return distribute(communicator, call, static_cast<const char*>(send), parts, static_cast<char*>(receive));
  });
}

SIM_API HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, void* receive,
                                uint64_t receive_count, HcclDataType receive_type, HcclComm handle,
                                void* stream) {
  const Call call = make_call(Operation::AlltoAll, send_count, send_type);
  if (HcclResult wrong = check(handle, call)) return wrong;
  if (send_count != receive_count || send_type != receive_type) {
    return refuse(HCCL_E_PARA, "AlltoAll: what is sent and what is received differ in count or type");
  }
  const Parts parts = equal_parts(send_count * size_of(send_type), ranks_of(handle));
  return all_to_all(handle, stream, call, send, parts, receive, parts);
}

SIM_API HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_displacements,
                                 HcclDataType send_type, void* receive, const void* receive_counts,
                                 const void* receive_displacements, HcclDataType receive_type,
                                 HcclComm handle, void* stream) {
  const Call call = make_call(Operation::AlltoAllV, 0, send_type);
  if (HcclResult wrong = check(handle, call)) return wrong;
  if (send_type != receive_type)
    return refuse(HCCL_E_PARA, "AlltoAllV: what is sent and received differ in type");
  const uint64_t element = size_of(send_type);
  const uint32_t ranks = ranks_of(handle);
  return all_to_all(handle, stream, call, send, parts_of(send_counts, send_displacements, element, ranks),
                    receive, parts_of(receive_counts, receive_displacements, element, ranks));
}

// `matrix`: entry [i][j] is what rank i sends to rank j; both buffers are dense, in the order of ranks.
SIM_API HcclResult HcclAlltoAllVC(const void* send, const void* matrix, HcclDataType send_type, void* receive,
                                  HcclDataType receive_type, HcclComm handle, void* stream) {
  auto communicator = communicator_of(handle);
  if (!communicator) return refuse(HCCL_E_PTR, "AlltoAllVC: the communicator was destroyed or never created");
  const auto* counts = static_cast<const uint64_t*>(matrix);
  const uint32_t ranks = communicator->ranks, rank = communicator->rank;
  std::vector<uint64_t> to(ranks), to_start(ranks), from(ranks), from_start(ranks);
  for (uint32_t peer = 0; peer < ranks; peer++) {
    to[peer] = counts[rank * ranks + peer];
    from[peer] = counts[peer * ranks + rank];
    if (peer == 0) continue;
    to_start[peer] = to_start[peer - 1] + to[peer - 1];
    from_start[peer] = from_start[peer - 1] + from[peer - 1];
  }
  return HcclAlltoAllV(send, to.data(), to_start.data(), send_type, receive, from.data(), from_start.data(),
                       receive_type, handle, stream);
}

// Everybody sends everybody a message without data: nobody gets past it before all have come.
SIM_API HcclResult HcclBarrier(HcclComm handle, void* stream) {
  const Call call = make_call(Operation::Barrier, 0, HCCL_DATA_TYPE_INT8);
  if (HcclResult wrong = check(handle, call)) return wrong;
  const Parts nothing(ranks_of(handle), Part{0, 0});
  return submit(handle, stream, call, 0, [=](Communicator& communicator, const Call& call) {
    static char none;
    return exchange_parts(communicator, call, &none, nothing, &none, nothing);
  });
}
