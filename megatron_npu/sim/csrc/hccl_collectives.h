// The collectives as messages: what each rank sends to whom, and what it computes from what it gets. All of
// these run on a stream's worker and return the failure that exchange() has reported, if any.
#pragma once

#include <vector>

#include "hccl_communicator.h"

namespace sim::hccl {

// A part of a buffer, in bytes.
struct Part {
  uint64_t offset;
  uint64_t bytes;
};
using Parts = std::vector<Part>;  // one per rank

// All-gather, all-to-all, barrier: everybody sends part p of `send` to rank p and receives part p of
// `receive` from it. The own part is copied, unless it is already in place.
HcclResult exchange_parts(Communicator& communicator, const Call& call, const char* send,
                          const Parts& outgoing, char* receive, const Parts& incoming);

// Reduce-scatter: everybody gives part p of `send` to rank p, which reduces what it gets. `result` may be the
// part of this rank in `send`.
HcclResult reduce_parts(Communicator& communicator, const Call& call, const char* send, const Parts& parts,
                        char* result);

HcclResult all_reduce(Communicator& communicator, const Call& call, const char* send, char* receive);

HcclResult reduce_to_root(Communicator& communicator, const Call& call, const char* send, char* receive);

// Scatter, broadcast: the root sends part p of `send` to rank p; in a broadcast all parts are the same.
HcclResult distribute(Communicator& communicator, const Call& call, const char* send, const Parts& parts,
                      char* receive);

}  // namespace sim::hccl
