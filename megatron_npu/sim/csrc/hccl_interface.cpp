// HCCL's collectives as torch_npu calls them: arguments are checked here, on the calling thread, and the rest
// is queued. Counts and displacements are in elements; arrays hold one uint64 per rank.
//
// The simulated HCCL from the outside in; each file uses only those below it:
//   hccl_interface, hccl_p2p   collectives; send and receive
//   hccl_collectives           collectives as messages; hccl_reduce computes
//   hccl_lifecycle             create, split, destroy, query communicators
//   hccl_communicator          this rank's end: numbering, queueing, groups, errors
//   hccl_traffic               what each communicator costs
//   hccl_exchange              moves messages; compares calls, notices death and standstill
//   hccl_segment               the shared memory and its protocol
//   hccl_call, hccl_abi        what a call is; HCCL's types
#include "hccl_collectives.h"
#include "hccl_reduce.h"
#include "runtime.h"

namespace sim::hccl {

namespace {

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

HcclResult submit_exchange(HcclComm handle, void* stream, const Call& call, uint64_t bytes, const void* send,
                           const Parts& outgoing, void* receive, const Parts& incoming) {
  return submit(
      handle, stream, call, bytes,
      [=](Communicator& communicator, const Call& call) {
        return exchange_parts(communicator, call, static_cast<const char*>(send), outgoing,
                              static_cast<char*>(receive), incoming);
      },
      total(incoming));
}

HcclResult submit_reduction(HcclComm handle, void* stream, const Call& call, const void* send,
                            const Parts& parts, void* receive) {
  return submit(handle, stream, call, total(parts), [=](Communicator& communicator, const Call& call) {
    return reduce_parts(communicator, call, static_cast<const char*>(send), parts,
                        static_cast<char*>(receive));
  });
}

// Every rank gets the same part of this rank.
HcclResult submit_gather(HcclComm handle, void* stream, const Call& call, const void* send, uint64_t bytes,
                         void* receive, const Parts& incoming) {
  const Parts outgoing(incoming.size(), Part{0, bytes});
  return submit_exchange(handle, stream, call, bytes, send, outgoing, receive, incoming);
}

}  // namespace

}  // namespace sim::hccl

using namespace sim::hccl;

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
  return submit_reduction(handle, stream, call, send, parts, receive);
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
  return submit_reduction(handle, stream, call, send, parts, receive);
}

SIM_API HcclResult HcclAllGather(const void* send, void* receive, uint64_t count, HcclDataType dtype,
                                 HcclComm handle, void* stream) {
  const Call call = make_call(Operation::AllGather, count, dtype);
  if (HcclResult wrong = check(handle, call)) return wrong;
  const uint64_t bytes = count * size_of(dtype);
  return submit_gather(handle, stream, call, send, bytes, receive, equal_parts(bytes, ranks_of(handle)));
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
  return submit_gather(handle, stream, call, send, count * size_of(dtype), receive, parts);
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
  return submit_exchange(handle, stream, call, total(parts), send, parts, receive, parts);
}

SIM_API HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_displacements,
                                 HcclDataType send_type, void* receive, const void* receive_counts,
                                 const void* receive_displacements, HcclDataType receive_type,
                                 HcclComm handle, void* stream) {
  const Call call = make_call(Operation::AlltoAllV, 0, send_type);
  if (HcclResult wrong = check(handle, call)) return wrong;
  if (send_type != receive_type)
    return refuse(HCCL_E_PARA, "AlltoAllV: what is sent and received differ in type");
  const uint32_t ranks = ranks_of(handle), rank = rank_of(handle);
  const Parts outgoing = parts_of(send_counts, send_displacements, size_of(send_type), ranks);
  const Parts incoming = parts_of(receive_counts, receive_displacements, size_of(send_type), ranks);
  if (outgoing[rank].bytes != incoming[rank].bytes) {
    return refuse(HCCL_E_PARA,
                  "AlltoAllV: what this rank sends to itself is not what it receives from itself");
  }
  return submit_exchange(handle, stream, call, total(outgoing), send, outgoing, receive, incoming);
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
  static char none;
  return submit_exchange(handle, stream, call, 0, &none, nothing, &none, nothing);
}

// ---- collectives inside operations of torch_npu that communicate (sim/kernels/communication.py)

// They name their communicator, and all of them takes place on the calling thread. What was queued on the
// communicator before comes first; a stream of their own keeps them from what is queued on others. `count`:
// elements of the smaller buffer.
SIM_API HcclResult sim_collective(const char* operation, const char* name, const void* send, void* receive,
                                  uint64_t count, HcclDataType dtype) {
  static auto& stream = *new sim::Stream(0);
  const HcclComm handle = handle_of(name);
  if (!handle) return refuse(HCCL_E_PTR, std::string("there is no communicator ") + name);
  auto communicator = communicator_of(handle);
  communicator->drain();
  const std::string which = operation;
  HcclResult result = HCCL_E_PARA;
  if (which == "AllGather") result = HcclAllGather(send, receive, count, dtype, handle, &stream);
  if (which == "ReduceScatter")
    result = HcclReduceScatter(send, receive, count, dtype, HCCL_REDUCE_SUM, handle, &stream);
  if (which == "AllReduce")
    result = HcclAllReduce(send, receive, count, dtype, HCCL_REDUCE_SUM, handle, &stream);
  if (result != HCCL_SUCCESS) return result;
  stream.synchronize();
  return communicator->error();
}
