// The memory that the ranks of one communicator share.
//
// Layout
//   Header                        failure record, invitations to sub-communicators
//   Member  x ranks               who a rank is, its bell, the collectives it has entered
//   Channel x ranks x ranks       one queue of chunks per ordered pair (from, to)
//
// Channels. All data travel through them, in chunks of at most kChunkBytes; a message that is larger than a
// channel is pipelined. A channel is a ring of kSlots chunks with one writer and one reader. `written` and
// `consumed` count chunks since the beginning: chunk k lies in slot k % kSlots; the writer may fill a slot
// while written - consumed < kSlots, the reader may empty one while consumed < written. Filling a slot
// happens before the release-store of `written`, which the reader load-acquires before it looks; the same
// holds for emptying and `consumed`. Each counter has one writing thread (Communicator::execution).
//
// Bells. Whoever changes a counter rings the bell of the rank at the other end: it increments `bell` and
// wakes the sleepers, if there are any. A rank that can do nothing reads `bell` BEFORE it looks at the
// counters and sleeps (futex) only while `bell` still has that value. `bell` and `sleepers` are sequentially
// consistent: either the ringer sees the sleeper, or the sleeper sees the new value. Nobody sleeps longer
// than kNap, because death and timeouts ring no bell.
//
// Life. The segment is an anonymous file (memfd): it has no name in any file system, and the kernel frees
// it when the last process that maps it is gone, however that ends. The invitation that HcclRootInfo carries
// says where to find it: /proc/<pid of the inviting rank>/fd/<number>. The inviting rank keeps its number
// open until everybody has attached. All ranks must therefore run on one machine, in one PID namespace, as
// one user. Ranks that are on several machines (hccl_meeting.h) have a segment each, and connections that keep
// them in step (hccl_links.h).
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "hccl_call.h"
#include "hccl_meeting.h"

namespace sim::hccl {

constexpr uint32_t kMaxRanks = 64;
constexpr size_t kChunkBytes = 256 << 10;
constexpr uint64_t kSlots = 2;
constexpr size_t kCacheLine = 64;
constexpr size_t kFailureBytes = 2048;
constexpr uint32_t kMaxSplits = 64;  // open invitations to sub-communicators
constexpr std::chrono::milliseconds kNap{50};

// Collectives whose calls a member remembers. A rank can be ahead of another by as many collectives as a
// channel has slots, plus the one it is in.
constexpr uint64_t kRemembered = 8;
static_assert(kRemembered > kSlots + 1);

// Travels inside HcclRootInfo, or through a parent's segment for sub-communicators.
struct Invitation {
  char magic[16];
  Process inviter;
  int32_t file;     // number of the open file in the inviter
  uint32_t serial;  // counts the inviter's invitations
  uint64_t host;    // of the inviter
  Door door;        // where ranks of other machines come in; port 0: there are none
};

struct Chunk {
  Call call;               // of the message this chunk belongs to
  uint64_t message_bytes;  // of the whole message
  char data[kChunkBytes];
};

struct Channel {
  alignas(kCacheLine) std::atomic<uint64_t> written;
  alignas(kCacheLine) std::atomic<uint64_t> consumed;
  alignas(kCacheLine) Chunk slots[kSlots];
};

struct Member {
  alignas(kCacheLine) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;
  alignas(kCacheLine) std::atomic<uint32_t> attached;  // 1 once the fields below it are valid
  Peer peer;
  std::atomic<uint64_t> entered;  // number of the last collective whose call is in `calls`
  Call calls[kRemembered];        // collective k at index k % kRemembered
};

// The first failure of any rank; the others stop with it instead of waiting for their own timeout.
struct Failure {
  std::atomic<uint32_t> state;  // kClear, then kWriting by the one rank that won, then kWritten
  uint32_t rank;
  char text[kFailureBytes];
};

// An invitation to a sub-communicator, issued by its rank 0, withdrawn when all have attached.
struct Split {
  std::atomic<uint32_t> state;
  uint32_t first_member;  // rank 0 of the sub-communicator, as a rank of the parent
  uint64_t id;
  Invitation invitation;
};
enum : uint32_t { kClear = 0, kWriting = 1, kWritten = 2 };

struct Header {
  Failure failure;
  Split splits[kMaxSplits];
};

// This process's view of a segment; unmapped by the destructor.
class Links;

class Segment {
 public:
  // Makes an empty segment and the invitation to it; its size follows when the inviter attaches. False, and
  // `problem` says why, if it cannot.
  static bool invite(Invitation* invitation, std::string* problem);
  // Joins as `rank` of `ranks` and waits until all have joined. Null, and `problem` says why, if somebody is
  // missing after `timeout`, the inviter died, or the memory cannot be mapped.
  static std::unique_ptr<Segment> attach(const Invitation& invitation, uint32_t ranks, uint32_t rank,
                                         std::chrono::seconds timeout, std::string* problem);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() { return *static_cast<Header*>(memory_); }
  Member& member(uint32_t rank);
  Channel& channel(uint32_t from, uint32_t to);

  // Whether the ranks are on several machines.
  bool linked() const { return links_ != nullptr; }
  bool elsewhere(uint32_t rank) { return member(rank).peer.host != host_id(); }
  // Tells the others that this rank has entered a collective; in shared memory they see it.
  void announce();
  // Whether what was written for a rank is in memory that does not end with this process.
  bool delivered(uint32_t rank);
  // Whether a rank will learn that all its chunks were consumed, even if this process ends now.
  bool told(uint32_t rank);
  // Notes the first failure of any rank, for all of them.
  void fail(uint32_t rank, const char* text);
  // Puts up an invitation to a sub-communicator for all who see this memory; null if there is no room.
  Split* put_up(uint32_t first_member, uint64_t id, const Invitation& invitation);
  // Sends it to a rank that does not.
  void offer(uint32_t rank, const Split& split);

  // Wakes a rank that sleeps in wait().
  void ring(uint32_t rank);
  // Sleeps until the bell of `rank` no longer reads `bell`, at most kNap.
  void wait(uint32_t rank, uint32_t bell);

  // Whether the process of a rank still runs; a zombie does not.
  bool alive(uint32_t rank);
  // For example "rank 1 (global rank 3, process 4711)".
  std::string describe(uint32_t rank);

  const uint32_t ranks;

 private:
  static std::unique_ptr<Segment> share(const Invitation& invitation, uint32_t ranks, uint32_t rank,
                                        const Peer& self, Deadline deadline, std::string* problem);
  static std::unique_ptr<Segment> link(Meeting meeting, uint32_t rank, std::string* problem);
  Segment(void* memory, size_t bytes, uint32_t ranks, uint32_t own);
  std::string missing();

  void* memory_;
  size_t bytes_;
  const uint32_t own_;
  std::unique_ptr<Links> links_;
};

}  // namespace sim::hccl
