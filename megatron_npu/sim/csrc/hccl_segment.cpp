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

namespace sim::hccl {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMagic[16] = "npu-sim-hccl-1";
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

Process this_process() { return {static_cast<int32_t>(getpid()), status_of(getpid()).started}; }

int global_rank() {
  const char* value = std::getenv("RANK");  // set by torchrun for every worker
  return value && *value ? std::atoi(value) : -1;
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

bool Segment::invite(Invitation* invitation) {
  static std::atomic<uint32_t> invitations{0};
  const int file = memfd_create("megatron_npu_sim_hccl", MFD_CLOEXEC);
  if (file < 0) return false;
  std::memcpy(invitation->magic, kMagic, sizeof kMagic);
  invitation->inviter = this_process();
  invitation->file = file;
  invitation->serial = ++invitations;
  return true;
}

std::unique_ptr<Segment> Segment::attach(const Invitation& invitation, uint32_t ranks, uint32_t rank,
                                         std::chrono::seconds timeout, std::string* problem) {
  if (std::memcmp(invitation.magic, kMagic, sizeof kMagic) != 0) {
    *problem = "the root info does not come from HcclGetRootInfo of the same simulator";
    return nullptr;
  }
  const auto deadline = Clock::now() + timeout;
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
  std::unique_ptr<Segment> segment(new Segment(memory, bytes, ranks));
  Member& self = segment->member(rank);
  self.global_rank = global_rank();
  self.process = this_process();
  self.attached.store(1, std::memory_order_release);
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

Segment::Segment(void* memory, size_t bytes, uint32_t ranks) : ranks(ranks), memory_(memory), bytes_(bytes) {}

Segment::~Segment() { munmap(memory_, bytes_); }

Member& Segment::member(uint32_t rank) {
  return reinterpret_cast<Member*>(static_cast<char*>(memory_) + members_offset())[rank];
}

Channel& Segment::channel(uint32_t from, uint32_t to) {
  return reinterpret_cast<Channel*>(static_cast<char*>(memory_) +
                                    channels_offset(ranks))[size_t{from} * ranks + to];
}

void Segment::ring(uint32_t rank) {
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

bool Segment::alive(uint32_t rank) { return runs(member(rank).process); }

std::string Segment::describe(uint32_t rank) {
  const Member& member = this->member(rank);
  std::string text = "rank " + std::to_string(rank) + " (";
  if (member.global_rank >= 0) text += "global rank " + std::to_string(member.global_rank) + ", ";
  return text + "process " + std::to_string(member.process.pid) + ")";
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
