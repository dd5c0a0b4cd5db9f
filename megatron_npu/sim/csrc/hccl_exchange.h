// Messages between the ranks of a communicator: the one mechanism under all collectives and send/receive.
#pragma once

#include "hccl_communicator.h"

namespace sim::hccl {

// A message of this rank to or from a peer (which may be itself). Zero bytes are a message, too.
struct Transfer {
  enum Direction { Send, Receive };
  Direction direction;
  uint32_t peer;
  char* data;
  uint64_t bytes;
  Call call;  // the receiver compares it with the sender's
};

// When a sent message counts as done. Collectives need no more than that the data are on their way.
// HcclSend returns when the receiver has them, so that code which relies on buffering hangs here, too.
enum class Completion { Written, Received };

// Moves all transfers, both directions at once; messages between one pair in one direction keep their order.
// Returns when all are done, or with the failure that ended it, already reported through `communicator`:
// calls that do not fit, a dead peer, another rank's failure, or no progress for the time set.
// `current` is the call that messages name.
HcclResult exchange(Communicator& communicator, const Call& current, const std::vector<Transfer>& transfers,
                    Completion completion);

// Tells the others which collective this rank enters and compares it with theirs.
HcclResult enter(Communicator& communicator, const Call& call);

}  // namespace sim::hccl
