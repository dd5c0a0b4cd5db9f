#include "hccl_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>
#include <thread>

#include "hccl_links.h"

namespace sim::hccl {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMagic[16] = "npu-sim-hccl-2";
constexpr std::chrono::milliseconds kPoll{1};

size_t aligned(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }
size_t members_offset() { return aligned(sizeof(Header)); }
size_t channels_offset(uint32_t ranks) { return members_offset() + ranks * sizeof(Member); }
size_t segment_bytes(uint32_t ranks) {
  return channels_offset(ranks) + size_t{ranks} * ranks * sizeof(Channel);
}

// Start time and state from /proc/<pid>/stat; 0 and 'X' if there is no such process.
struct Status {
  uint64_t started = 0;
  char state = 'X';
};

Status status_of(int32_t pid) {
  constexpr int fields_between = 18;  // field 3 is the state, field 22 the start time (man 5 proc)
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line, skipped;
  if (!std::getline(file, line)) return {};
  std::istringstream rest(line.substr(line.rfind(')') + 1));  // a program's name may contain spaces and ')'
  Status status;
  rest >> status.state;
  for (int i = 0; i < fields_between; i++) rest >> skipped;
  rest >> status.started;
  return status;
}

bool runs(const Process& process) {
  const Status status = status_of(process.pid);
  return status.started == process.started && status.state != 'Z' && status.state != 'X';
}


int global_rank() {
  const char* value = std::getenv("RANK");  // set by torchrun for every worker
  return value && *value ? std::atoi(value) : -1;
}

// Who this process is, its place aside.
Peer this_peer() {
  Peer self{};
  self.host = host_id();
  std::snprintf(self.host_name, sizeof self.host_name, "%s", host_name().c_str());
  self.global_rank = global_rank();
  self.process = {static_cast<int32_t>(getpid()), status_of(getpid()).started};
  return self;
}

// Opens the file of an invitation; the inviter itself uses the number it has. -1 and errno on failure.
int open_file(const Invitation& invitation) {
  if (invitation.inviter.pid == getpid()) return invitation.file;
  const std::string path =
      "/proc/" + std::to_string(invitation.inviter.pid) + "/fd/" + std::to_string(invitation.file);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

// Maps the file once the inviter has given it its size; null and errno on failure.
void* map_file(int file, size_t bytes, bool inviting, const Process& owner, Clock::time_point deadline) {
  if (inviting && ftruncate(file, static_cast<off_t>(bytes)) != 0) return nullptr;
  struct stat info{};
  while (fstat(file, &info) == 0 && static_cast<size_t>(info.st_size) != bytes) {
    if (info.st_size != 0) return errno = EINVAL, nullptr;  // the inviter has another number of ranks
    if (!runs(owner)) return errno = ESRCH, nullptr;
    if (Clock::now() > deadline) return errno = ETIMEDOUT, nullptr;
    std::this_thread::sleep_for(kPoll);
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

std::string explain(const Invitation& invitation, uint32_t ranks, int error) {
  const std::string inviter =
      "the rank that created the communicator (process " + std::to_string(invitation.inviter.pid) + ")";
  switch (error) {
    case ESRCH:
    case ENOENT: return inviter + " is gone";
    case ETIMEDOUT: return inviter + " did not join in time";
    case EINVAL: return inviter + " has another number of ranks than this one (" + std::to_string(ranks) + ")";
    default:
      return "cannot share memory with " + inviter + ": " + std::strerror(error) +
             "; all ranks must run on one machine, in one PID namespace, as one user";
  }
}

}  // namespace

bool Segment::invite(Invitation* invitation, std::string* problem) {
  static std::atomic<uint32_t> invitations{0};
  if (spans_hosts() && !open_door(&invitation->door, problem)) return false;
  const int file = memfd_create("megatron_npu_sim_hccl", MFD_CLOEXEC);
  if (file < 0) {
    *problem = std::string("no shared memory: ") + std::strerror(errno);
    return false;
  }
  std::memcpy(invitation->magic, kMagic, sizeof kMagic);
  invitation->inviter = this_peer().process;
  invitation->file = file;
  invitation->serial = ++invitations;
  invitation->host = host_id();
  return true;
}

std::unique_ptr<Segment> Segment::attach(const Invitation& invitation, uint32_t ranks, uint32_t rank,
                                         std::chrono::seconds timeout, std::string* problem) {
  if (std::memcmp(invitation.magic, kMagic, sizeof kMagic) != 0) {
    *problem = "the root info does not come from HcclGetRootInfo of the same simulator";
    return nullptr;
  }
  const auto deadline = Clock::now() + timeout;
  const Peer self = this_peer();
  if (invitation.door.place.port != 0) {
    Meeting meeting = meet(invitation.door, ranks, rank, self, timeout);
    const bool apart = !meeting.problem.empty() || !meeting.sockets.empty();
    if (apart && rank == 0) close(invitation.file);
    *problem = meeting.problem;
    if (!problem->empty()) return nullptr;
    if (apart) return link(std::move(meeting), rank, problem);
  } else if (invitation.host != host_id()) {
    *problem = "the rank that created the communicator is on another machine, but it was not told of "
               "several: set LOCAL_WORLD_SIZE and WORLD_SIZE on every rank, as torchrun does";
    return nullptr;
  }
  return share(invitation, ranks, rank, self, deadline, problem);
}

std::unique_ptr<Segment> Segment::share(const Invitation& invitation, uint32_t ranks, uint32_t rank,
                                        const Peer& self, Deadline deadline, std::string* problem) {
  const auto timeout = std::chrono::duration_cast<std::chrono::seconds>(deadline - Clock::now() + kPoll);
  const bool inviting = invitation.inviter.pid == getpid();
  const size_t bytes = segment_bytes(ranks);
  const int file = open_file(invitation);
  void* memory = file < 0 ? nullptr : map_file(file, bytes, inviting, invitation.inviter, deadline);
  const int error = errno;
  if (file >= 0 && !inviting) close(file);
  if (!memory) {
    *problem = explain(invitation, ranks, error);
    if (inviting) close(file);
    return nullptr;
  }
  std::unique_ptr<Segment> segment(new Segment(memory, bytes, ranks, rank));
  segment->member(rank).peer = self;
  segment->member(rank).attached.store(1, std::memory_order_release);
  while (segment->missing() != "") {
    const bool late = Clock::now() > deadline;
    if (late || (!inviting && !runs(invitation.inviter))) {
      *problem = late ? "timeout after " + std::to_string(timeout.count()) + " s; " + segment->missing() +
                            " did not join"
                      : explain(invitation, ranks, ESRCH);
      segment = nullptr;
      break;
    }
    std::this_thread::sleep_for(kPoll);
  }
  if (inviting) close(file);
  return segment;
}

std::unique_ptr<Segment> Segment::link(Meeting meeting, uint32_t rank, std::string* problem) {
  const uint32_t ranks = static_cast<uint32_t>(meeting.peers.size());
  const size_t bytes = segment_bytes(ranks);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) {
    *problem = std::string("no memory: ") + std::strerror(errno);
    return nullptr;
  }
  std::unique_ptr<Segment> segment(new Segment(memory, bytes, ranks, rank));
  for (uint32_t peer = 0; peer < ranks; peer++) segment->member(peer).peer = meeting.peers[peer];
  segment->links_ = std::make_unique<Links>(*segment, rank, std::move(meeting.sockets));
  return segment;
}

Segment::Segment(void* memory, size_t bytes, uint32_t ranks, uint32_t own)
    : ranks(ranks), memory_(memory), bytes_(bytes), own_(own) {}

Segment::~Segment() {
  links_.reset();
  munmap(memory_, bytes_);
}

Member& Segment::member(uint32_t rank) {
  return reinterpret_cast<Member*>(static_cast<char*>(memory_) + members_offset())[rank];
}

Channel& Segment::channel(uint32_t from, uint32_t to) {
  return reinterpret_cast<Channel*>(static_cast<char*>(memory_) +
                                    channels_offset(ranks))[size_t{from} * ranks + to];
}

void Segment::announce() {
  if (links_) links_->wake();
}

bool Segment::delivered(uint32_t rank) { return !links_ || links_->delivered(rank); }

bool Segment::told(uint32_t rank) { return !links_ || links_->told(rank); }

void Segment::fail(uint32_t rank, const char* text) {
  Failure& failure = header().failure;
  uint32_t clear = kClear;
  if (!failure.state.compare_exchange_strong(clear, kWriting)) return;
  failure.rank = rank;
  std::snprintf(failure.text, sizeof failure.text, "%s", text);
  failure.state.store(kWritten, std::memory_order_release);
  if (links_ && rank == own_) return links_->send_failure();
  for (uint32_t peer = 0; peer < ranks; peer++) {
    if (!links_ || peer == own_) ring(peer);
  }
}

Split* Segment::put_up(uint32_t first_member, uint64_t id, const Invitation& invitation) {
  for (Split& split : header().splits) {
    uint32_t clear = kClear;
    if (!split.state.compare_exchange_strong(clear, kWriting)) continue;
    split.first_member = first_member;
    split.id = id;
    split.invitation = invitation;
    split.state.store(kWritten, std::memory_order_release);
    return &split;
  }
  return nullptr;
}

void Segment::offer(uint32_t rank, const Split& split) {
  if (links_) links_->offer(rank, split);
}

void Segment::ring(uint32_t rank) {
  if (rank != own_ && links_) return links_->wake();
  Member& member = this->member(rank);
  member.bell.fetch_add(1);
  if (member.sleepers.load() != 0) syscall(SYS_futex, &member.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::wait(uint32_t rank, uint32_t bell) {
  Member& member = this->member(rank);
  const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
  member.sleepers.fetch_add(1);
  syscall(SYS_futex, &member.bell, FUTEX_WAIT, bell, &nap, nullptr, 0);
  member.sleepers.fetch_sub(1);
}

bool Segment::alive(uint32_t rank) { return links_ ? links_->connected(rank) : runs(member(rank).peer.process); }

std::string Segment::describe(uint32_t rank) {
  const Peer& peer = member(rank).peer;
  std::string text = "rank " + std::to_string(rank) + " (";
  if (peer.global_rank >= 0) text += "global rank " + std::to_string(peer.global_rank) + ", ";
  if (links_) text += std::string(peer.host_name) + ", ";
  return text + "process " + std::to_string(peer.process.pid) + ")";
}

std::string Segment::missing() {
  std::string text;
  for (uint32_t rank = 0; rank < ranks; rank++) {
    if (member(rank).attached.load(std::memory_order_acquire)) continue;
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  return text;
}

}  // namespace sim::hccl
