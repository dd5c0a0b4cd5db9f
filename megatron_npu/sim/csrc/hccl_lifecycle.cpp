// Creating, splitting, querying and destroying communicators.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

#include "hccl_communicator.h"
#include "hccl_traffic.h"
#include "runtime.h"

namespace sim::hccl {

namespace {

static_assert(sizeof(Invitation) <= HCCL_ROOT_INFO_BYTES);

// Living communicators by handle. Never destroyed: workers may still run when the process ends.
std::mutex registry_mutex;
auto& registry = *new std::map<HcclComm, std::shared_ptr<Communicator>>;

std::chrono::seconds patience() { return std::chrono::seconds(setting("hccl_timeout", int64_t{300})); }

std::string name_for(const HcclCommConfig* config, const Invitation& invitation) {
  if (config && config->name[0])
    return std::string(config->name, strnlen(config->name, COMM_NAME_MAX_LENGTH - 1));
  return "hccl_" + std::to_string(invitation.inviter.pid) + "_" + std::to_string(invitation.serial);
}

HcclResult enlist(std::shared_ptr<Communicator> communicator, const HcclCommConfig* config, HcclComm* handle) {
  *handle = communicator.get();
  note_communicator(communicator->name, communicator->ranks, config ? config->buffer_size : kBufferNotSet);
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry[*handle] = std::move(communicator);
  return HCCL_SUCCESS;
}

// In a dry run, which has no peers.
HcclResult stay_alone(uint32_t ranks, uint32_t rank, const std::string& name, const HcclCommConfig* config,
                      HcclComm* handle) {
  static std::atomic<uint32_t> number{0};
  const bool named = config && config->name[0];
  const std::string own = named ? name : "hccl_dry_" + std::to_string(++number);
  return enlist(std::make_shared<Communicator>(ranks, own, rank), config, handle);
}

HcclResult join(const Invitation& invitation, uint32_t ranks, uint32_t rank, const HcclCommConfig* config,
                HcclComm* handle) {
  const std::string name = name_for(config, invitation);
  if (sim::dry_limit()) return stay_alone(ranks, rank, name, config, handle);
  if (ranks == 0 || ranks > kMaxRanks || rank >= ranks) {
    return refuse(HCCL_E_PARA, "communicator " + name + ": rank " + std::to_string(rank) + " of " +
                                   std::to_string(ranks) + "; 1 to " + std::to_string(kMaxRanks) +
                                   " ranks are possible");
  }
  std::string problem;
  auto segment = Segment::attach(invitation, ranks, rank, patience(), &problem);
  if (!segment) {
    return refuse(HCCL_E_TIMEOUT, "creating communicator " + name + " failed on rank " +
                                      std::to_string(rank) + " of " + std::to_string(ranks) + ": " + problem);
  }
  return enlist(std::make_shared<Communicator>(std::move(segment), name, rank), config, handle);
}

// ---- sub-communicators: rank 0 of the new one issues an invitation in the parent's segment

// The invitation that `first_member` has issued under `id` and this rank has not yet accepted.
bool find(Communicator& parent, uint64_t id, uint32_t first_member, Invitation* invitation) {
  for (Split& split : parent.segment().header().splits) {
    if (split.state.load(std::memory_order_acquire) != kWritten) continue;
    if (split.id != id || split.first_member != first_member) continue;
    *invitation = split.invitation;
    if (!parent.take_up(first_member, invitation->serial)) continue;
    if (parent.segment().linked()) split.state.store(kClear, std::memory_order_release);  // for this rank alone
    return true;
  }
  return false;
}

HcclResult await_invitation(Communicator& parent, uint64_t id, uint32_t first_member,
                            Invitation* invitation) {
  const auto deadline = std::chrono::steady_clock::now() + patience();
  while (!find(parent, id, first_member, invitation)) {
    const bool late = std::chrono::steady_clock::now() > deadline;
    if (late || !parent.segment().alive(first_member)) {
      return refuse(HCCL_E_TIMEOUT, "splitting communicator " + parent.name + ": " +
                                        parent.segment().describe(first_member) +
                                        (late ? " did not take part in time" : " has ended"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return HCCL_SUCCESS;
}

HcclResult invite_to_split(Communicator& parent, uint64_t id, const std::vector<uint32_t>& members,
                           const HcclCommConfig* config, HcclComm* handle) {
  Invitation invitation{};
  std::string problem;
  if (!Segment::invite(&invitation, &problem)) return refuse(HCCL_E_SYSCALL, problem);
  Split* split = parent.segment().put_up(parent.rank, id, invitation);
  if (!split)
    return refuse(HCCL_E_INTERNAL, "splitting communicator " + parent.name + ": too many splits at once");
  for (uint32_t member : members) {
    if (member != parent.rank) parent.segment().offer(member, *split);
  }
  const HcclResult result = join(invitation, static_cast<uint32_t>(members.size()), 0, config, handle);
  split->state.store(kClear, std::memory_order_release);
  return result;
}

}  // namespace

std::shared_ptr<Communicator> communicator_of(HcclComm handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto found = registry.find(handle);
  return found == registry.end() ? nullptr : found->second;
}

HcclComm handle_of(const std::string& name) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  for (const auto& [handle, communicator] : registry)
    if (communicator->name == name) return handle;
  return nullptr;
}

}  // namespace sim::hccl

using namespace sim::hccl;

SIM_API HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  std::memset(info, 0, sizeof *info);
  if (sim::dry_limit()) return HCCL_SUCCESS;
  Invitation invitation{};
  std::string problem;
  if (!Segment::invite(&invitation, &problem)) return refuse(HCCL_E_SYSCALL, problem);
  std::memcpy(info->internal, &invitation, sizeof invitation);
  return HCCL_SUCCESS;
}

SIM_API HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                              const HcclCommConfig* config, HcclComm* handle) {
  Invitation invitation;
  std::memcpy(&invitation, info->internal, sizeof invitation);
  return join(invitation, ranks, rank, config, handle);
}

SIM_API HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                        HcclComm* handle) {
  return HcclCommInitRootInfoConfig(ranks, info, rank, nullptr, handle);
}

// `members`: the ranks of the new communicator as ranks of the parent; null on a rank that is in none.
SIM_API HcclResult HcclCreateSubCommConfig(HcclComm* parent_handle, uint32_t ranks, uint32_t* members,
                                           uint64_t id, uint32_t rank, HcclCommConfig* config,
                                           HcclComm* handle) {
  *handle = nullptr;
  if (!members) return HCCL_SUCCESS;
  auto parent = communicator_of(*parent_handle);
  if (!parent) return refuse(HCCL_E_PTR, "the parent communicator was destroyed or never created");
  if (rank >= ranks || members[rank] != parent->rank) {
    return refuse(HCCL_E_PARA, "splitting communicator " + parent->name + ": rank " + std::to_string(rank) +
                                   " of the new one is not this process");
  }
  if (parent->alone()) return join(Invitation{}, ranks, rank, config, handle);
  if (rank == 0) return invite_to_split(*parent, id, {members, members + ranks}, config, handle);
  Invitation invitation;
  if (HcclResult result = await_invitation(*parent, id, members[0], &invitation)) return result;
  return join(invitation, ranks, rank, config, handle);
}

// Calls that are queued or running keep the memory; the last of them frees it.
SIM_API HcclResult HcclCommDestroy(HcclComm handle) {
  std::shared_ptr<Communicator> last;
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto found = registry.find(handle);
  if (found == registry.end())
    return refuse(HCCL_E_PTR, "the communicator was destroyed before or never created");
  last = std::move(found->second);
  note_destroyed(last->name);
  registry.erase(found);
  return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
  auto communicator = communicator_of(handle);
  if (!communicator) return HCCL_E_PTR;
  *error = communicator->adopt_failure();
  if (*error != HCCL_SUCCESS) refuse(*error, communicator->error_text());
  return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGetCommName(HcclComm handle, char* name) {
  auto communicator = communicator_of(handle);
  if (!communicator) return HCCL_E_PTR;
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", communicator->name.c_str());
  return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGetRankSize(HcclComm handle, uint32_t* ranks) {
  auto communicator = communicator_of(handle);
  if (!communicator) return HCCL_E_PTR;
  *ranks = communicator->ranks;
  return HCCL_SUCCESS;
}

SIM_API HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  auto communicator = communicator_of(handle);
  if (!communicator) return HCCL_E_PTR;
  *rank = communicator->rank;
  return HCCL_SUCCESS;
}

// HCCL_COMM_CONFIG_RESERVED of hccl_types.h (CANN 8.5): every member of HcclCommConfig that exists is
// accepted.
SIM_API uint32_t HcclGetCommConfigCapability() { return 12; }

SIM_API const char* HcclGetErrorString(HcclResult code) {
  switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_PTR: return "empty pointer";
    case HCCL_E_INTERNAL: return "internal error";
    case HCCL_E_NOT_SUPPORT: return "not supported";
    case HCCL_E_SYSCALL: return "system call failed";
    case HCCL_E_TIMEOUT: return "timeout";
    case HCCL_E_REMOTE: return "remote error";
  }
  return "unknown error";
}

// The one setting there is asks for determinism, which holds anyway.
SIM_API HcclResult HcclSetConfig(int /*config*/, int32_t /*value*/) { return HCCL_SUCCESS; }
SIM_API HcclResult HcclGetConfig(int /*config*/, int32_t* value) {
  *value = 1;
  return HCCL_SUCCESS;
}
