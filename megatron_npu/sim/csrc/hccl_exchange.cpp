#include "hccl_exchange.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>

#include "hccl_traffic.h"
#include "runtime.h"

namespace sim::hccl {

namespace {

using Clock = std::chrono::steady_clock;

// Looks before the first sleep: a running peer answers sooner than the kernel could wake us.
constexpr int kYields = 20;

std::chrono::seconds patience() {
  static const std::chrono::seconds value(setting("hccl_timeout", int64_t{300}));
  return value;
}

// Messages of one direction between this rank and one peer, in order.
class Lane {
 public:
  Lane(Communicator& communicator, Transfer::Direction direction, uint32_t peer, Completion completion)
      : communicator_(communicator),
        direction_(direction),
        peer_(peer),
        completion_(completion),
        channel_(direction == Transfer::Send ? communicator.segment().channel(communicator.rank, peer)
                                             : communicator.segment().channel(peer, communicator.rank)) {}

  void add(const Transfer* transfer) {
    waiting_.push_back(transfer);
    last_ = transfer;
  }

  // Moves as many chunks as the channel allows; returns whether it moved any. A message that does not fit
  // the one expected is left to `mismatch`.
  bool advance() {
    bool moved = false;
    while (!waiting_.empty() && mismatch_.empty() && (direction_ == Transfer::Send ? fill() : drain()))
      moved = true;
    if (moved) communicator_.segment().ring(peer_);
    return moved;
  }

  bool done() const {
    if (!waiting_.empty()) return false;
    if (direction_ == Transfer::Receive) return communicator_.segment().told(peer_);
    if (!communicator_.segment().delivered(peer_)) return false;
    if (completion_ == Completion::Written) return true;
    return channel_.consumed.load(std::memory_order_acquire) ==
           channel_.written.load(std::memory_order_relaxed);
  }

  const std::string& mismatch() const { return mismatch_; }
  uint32_t peer() const { return peer_; }

  // What is not done yet, up to the peer's name; for example "to send 16384 of 65536 bytes of Broadcast #3
  // (16384 x fp32, root 0) to".
  std::string describe() const {
    if (waiting_.empty()) return "until " + hccl::describe(last_->call) + " is received by";
    const Transfer& front = *waiting_.front();
    const std::string verb = direction_ == Transfer::Send ? "to send " : "to receive ";
    return verb + std::to_string(front.bytes - moved_) + " of " + std::to_string(front.bytes) + " bytes of " +
           hccl::describe(front.call) + (direction_ == Transfer::Send ? " to" : " from");
  }

 private:
  // Sender: copies the next chunk into a free slot. A message of zero bytes is one chunk without data.
  bool fill() {
    const uint64_t written = channel_.written.load(std::memory_order_relaxed);
    if (written - channel_.consumed.load(std::memory_order_acquire) == kSlots) return false;
    const Transfer& front = *waiting_.front();
    Chunk& chunk = channel_.slots[written % kSlots];
    const uint64_t bytes = std::min<uint64_t>(kChunkBytes, front.bytes - moved_);
    chunk.call = front.call;
    chunk.message_bytes = front.bytes;
    std::memcpy(chunk.data, front.data + moved_, bytes);
    channel_.written.store(written + 1, std::memory_order_release);
    count(bytes);
    return true;
  }

  // Receiver: copies the next chunk out of its slot, if it belongs to the message that is expected.
  bool drain() {
    const uint64_t consumed = channel_.consumed.load(std::memory_order_relaxed);
    if (channel_.written.load(std::memory_order_acquire) == consumed) return false;
    const Transfer& front = *waiting_.front();
    const Chunk& chunk = channel_.slots[consumed % kSlots];
    if (chunk.call != front.call || chunk.message_bytes != front.bytes) {
      mismatch_ = differ(chunk, front);
      return false;
    }
    const uint64_t bytes = std::min<uint64_t>(kChunkBytes, front.bytes - moved_);
    std::memcpy(front.data + moved_, chunk.data, bytes);
    channel_.consumed.store(consumed + 1, std::memory_order_release);
    count(bytes);
    return true;
  }

  void count(uint64_t bytes) {
    moved_ += bytes;
    if (moved_ < waiting_.front()->bytes) return;
    waiting_.pop_front();
    moved_ = 0;
  }

  std::string differ(const Chunk& chunk, const Transfer& expected) const {
    Segment& segment = communicator_.segment();
    return segment.describe(peer_) + " sends " + std::to_string(chunk.message_bytes) + " bytes of " +
           hccl::describe(chunk.call) + ", but " + segment.describe(communicator_.rank) + " expects " +
           std::to_string(expected.bytes) + " bytes of " + hccl::describe(expected.call);
  }

  Communicator& communicator_;
  const Transfer::Direction direction_;
  const uint32_t peer_;
  const Completion completion_;
  Channel& channel_;
  std::deque<const Transfer*> waiting_;
  const Transfer* last_ = nullptr;
  uint64_t moved_ = 0;  // bytes of the front message
  std::string mismatch_;
};

std::vector<Lane> lanes_of(Communicator& communicator, const std::vector<Transfer>& transfers,
                           Completion completion) {
  std::map<std::pair<Transfer::Direction, uint32_t>, Lane> lanes;
  for (const Transfer& transfer : transfers) {
    auto& lane = lanes
                     .try_emplace({transfer.direction, transfer.peer}, communicator, transfer.direction,
                                  transfer.peer, completion)
                     .first->second;
    lane.add(&transfer);
  }
  std::vector<Lane> result;
  for (auto& entry : lanes) result.push_back(std::move(entry.second));
  return result;
}

std::string where(Communicator& communicator) { return " on communicator " + communicator.name + ": "; }

// The call with which `peer` entered the collective of number `sequence`; false if it has not, or if it has
// gone on so far that the call is no longer remembered.
bool remembered(Member& peer, uint64_t sequence, Call* call) {
  const auto there = [&] {
    const uint64_t entered = peer.entered.load();
    return entered >= sequence && entered < sequence + kRemembered - 1;
  };
  if (!there()) return false;
  *call = peer.calls[sequence % kRemembered];
  std::atomic_thread_fence(std::memory_order_acquire);
  return there();  // it was not overwritten while we read
}

// What the collectives that the others have entered under this number have against `call`; empty if nothing.
std::string disagreement(Communicator& communicator, const Call& call) {
  Segment& segment = communicator.segment();
  Call other;
  for (uint32_t peer = 0; peer < communicator.ranks; peer++) {
    if (!remembered(segment.member(peer), call.sequence, &other) || other == call) continue;
    return segment.describe(communicator.rank) + " calls " + describe(call) + ", but " +
           segment.describe(peer) + " calls " + describe(other);
  }
  return "";
}

// For example "rank 1 (process 4711), which last entered AllReduce #11 (4 x fp32, sum)".
std::string last_seen(Communicator& communicator, uint32_t peer) {
  Member& member = communicator.segment().member(peer);
  const uint64_t entered = member.entered.load();
  Call call;
  std::string text = communicator.segment().describe(peer);
  if (entered == 0 || !remembered(member, entered, &call)) return text;
  return text + ", which last entered " + describe(call);
}

// Send and receive have no call in common; what is under way is reported per peer.
std::string name_in_waiting(const Call& current) {
  return current.operation == Operation::SendReceive ? "send/receive" : describe(current);
}

HcclResult time_out(Communicator& communicator, const Call& current, const std::vector<Lane>& lanes) {
  std::string text = "timeout after " + std::to_string(patience().count()) + " s without progress" +
                     where(communicator) + communicator.segment().describe(communicator.rank) + " in " +
                     name_in_waiting(current) + " waits";
  for (const Lane& lane : lanes) {
    if (!lane.done()) text += "\n    " + lane.describe() + " " + last_seen(communicator, lane.peer());
  }
  return communicator.fail(HCCL_E_TIMEOUT, text);
}

HcclResult mismatch(Communicator& communicator, const std::string& text) {
  return communicator.fail(HCCL_E_PARA, "calls do not fit" + where(communicator) + text);
}

// What ends a wait without progress; HCCL_SUCCESS if there is nothing of the kind.
HcclResult reason_to_stop(Communicator& communicator, const Call& current, const std::vector<Lane>& lanes,
                          Clock::time_point deadline) {
  if (HcclResult failure = communicator.adopt_failure()) return failure;
  for (const Lane& lane : lanes) {
    if (!lane.mismatch().empty()) return mismatch(communicator, lane.mismatch());
  }
  if (current.operation != Operation::SendReceive) {
    const std::string other = disagreement(communicator, current);
    if (!other.empty()) return mismatch(communicator, other);
  }
  if (Clock::now() > deadline) return time_out(communicator, current, lanes);
  return HCCL_SUCCESS;
}

// A peer we wait for whose process is gone; one that we receive from, rather than send to.
const Lane* dead_peer(Communicator& communicator, const std::vector<Lane>& lanes) {
  const auto found = std::find_if(lanes.rbegin(), lanes.rend(), [&](const Lane& lane) {
    return !lane.done() && !communicator.segment().alive(lane.peer());
  });
  return found == lanes.rend() ? nullptr : &*found;
}

HcclResult report_death(Communicator& communicator, const Call& current, const Lane& lane) {
  return communicator.fail(
      HCCL_E_REMOTE, "a peer is gone" + where(communicator) + communicator.segment().describe(lane.peer()) +
                         " has ended, but " + communicator.segment().describe(communicator.rank) + " in " +
                         name_in_waiting(current) + " waits " + lane.describe() + " it");
}

// At the end: of two ranks on different machines, the later one sees the other's call, if it fits or not.
HcclResult judge(Communicator& communicator, const Call& current) {
  if (!communicator.segment().linked() || current.operation == Operation::SendReceive) return HCCL_SUCCESS;
  const std::string other = disagreement(communicator, current);
  return other.empty() ? HCCL_SUCCESS : mismatch(communicator, other);
}

}  // namespace

HcclResult enter(Communicator& communicator, const Call& call) {
  Member& self = communicator.segment().member(communicator.rank);
  self.calls[call.sequence % kRemembered] = call;
  self.entered.store(call.sequence);  // sequentially consistent: of two ranks, at least one sees the other
  communicator.segment().announce();
  const std::string other = disagreement(communicator, call);
  return other.empty() ? HCCL_SUCCESS : mismatch(communicator, other);
}

HcclResult exchange(Communicator& communicator, const Call& current, const std::vector<Transfer>& transfers,
                    Completion completion) {
  std::vector<Lane> lanes = lanes_of(communicator, transfers, completion);
  Segment& segment = communicator.segment();
  for (const Transfer& each : transfers) {
    if (each.direction == Transfer::Send && each.peer != communicator.rank)
      count_sent(communicator.name, segment.elsewhere(each.peer), each.bytes);
  }
  auto progress = Clock::now();
  auto examined = progress;  // when we last looked whether the peers are alive
  for (int idle = 0;;) {
    const uint32_t bell = segment.member(communicator.rank).bell.load();
    bool moved = false, done = true;
    for (Lane& lane : lanes) {
      moved |= lane.advance();
      done &= lane.done();
    }
    if (done) return judge(communicator, current);
    if (moved) {
      idle = 0;
      progress = examined = Clock::now();
      continue;
    }
    if (HcclResult failure = reason_to_stop(communicator, current, lanes, progress + patience()))
      return failure;
    if (idle++ < kYields) {
      std::this_thread::yield();
      continue;
    }
    if (Clock::now() > examined + kNap) {
      examined = Clock::now();
      const Lane* dead = dead_peer(communicator, lanes);
      // Unless it rang the bell after we looked into its channel: then it may have written its last chunk.
      const bool silent = segment.member(communicator.rank).bell.load() == bell;
      if (dead && silent) return report_death(communicator, current, *dead);
    }
    segment.wait(communicator.rank, bell);
  }
}

}  // namespace sim::hccl
