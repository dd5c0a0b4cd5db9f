// A call of a collective or of send/receive: what all its participants must agree on, and how it reads.
#pragma once

#include <string>

#include "hccl_abi.h"

namespace sim::hccl {

enum class Operation : uint32_t {
  AllReduce,
  Reduce,
  ReduceScatter,
  ReduceScatterV,
  AllGather,
  AllGatherV,
  Broadcast,
  Scatter,
  AlltoAll,
  AlltoAllV,
  Barrier,
  SendReceive,
};

constexpr uint32_t kNone = 255;  // of root and reduction: the operation has none

// Plain data: it lies in shared memory. Two ranks' calls fit if all fields are equal.
struct Call {
  Operation operation;
  uint32_t dtype;      // HcclDataType
  uint32_t reduction;  // HcclReduceOp or kNone
  uint32_t root;       // rank or kNone
  uint64_t count;      // elements, as passed by the caller; 0 where ranks may pass different numbers
  // Collectives: their number on this communicator, from 1. Send and receive: the number of the message
  // from this sender to this receiver, from 1. 0: not yet numbered.
  uint64_t sequence;
};

bool operator==(const Call& one, const Call& other);
inline bool operator!=(const Call& one, const Call& other) { return !(one == other); }

// The name in HCCL's interface without its prefix, for example "AllReduce".
const char* name_of(Operation operation);

// For example "AllReduce #12 (1024 x fp32, sum)".
std::string describe(const Call& call);

// Bytes of one element; 0 if HCCL has no such type.
size_t size_of(uint32_t dtype);

}  // namespace sim::hccl
