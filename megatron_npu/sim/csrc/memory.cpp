// Memory of the simulated CANN runtime. Device memory is host memory with a limit per device; page-locked host
// memory can be registered for a device to read and write, and counts against no device's limit.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "codes.h"
#include "runtime.h"

namespace sim {
namespace {

constexpr size_t kAlignment = 512;  // what aclrtMalloc guarantees
constexpr int kNaN = 0xff;          // all bits set is NaN in fp16, bf16, fp32 and fp64
constexpr size_t kPage = 4096;      // what aclrtHostRegister asks of an address
constexpr int kRegisterMapped = 0;  // ACL_HOST_REGISTER_MAPPED, the one type that is documented
constexpr int kVaFlag = 1;          // ACL_RT_MEM_ATTR_VA_FLAG

struct Block {
  int device;
  size_t bytes;
};

// Page-locked host memory. `same_address`: it was asked for with the attribute that gives it one address on
// host and device, where it may also be copied from and to (aclrtMallocHostWithCfg).
struct HostBlock {
  size_t bytes;
  bool same_address;
};

// A part of it that a device may use, at another address unless it has the same one.
struct Registered {
  char* on_host;
  size_t bytes;
  bool same_address;
};

// As acl/acl_rt.h declares them for aclrtMallocHostWithCfg.
struct Attribute {
  int kind;
  union {
    uint16_t module;
    uint32_t same_address;
    uint64_t reserved[4];
  } value;
};
struct Configuration {
  Attribute* attributes;
  size_t count;
};

std::mutex mutex;
auto& host_blocks = *new std::map<char*, HostBlock>;
auto& registered = *new std::map<char*, Registered>;  // by the device's address
std::atomic<size_t> registered_bytes{0};
auto& blocks = *new std::map<void*, Block>;
auto& mapped = *new std::map<void*, size_t>;
std::array<size_t, 64> used{};

size_t limit() {
  static const size_t bytes = static_cast<size_t>(setting("memory", int64_t{64} << 30));
  return bytes;
}

bool memcheck() {
  static const bool on = setting("memcheck", 0) != 0;
  return on;
}

// Takes `bytes` from the device's limit; false if that exceeds it.
bool reserve(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  if (used[device] + bytes > limit()) return false;
  used[device] += bytes;
  return true;
}

void release(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  used[device] -= bytes;
}

// Where devices have their memory. torch_npu's allocator takes the lowest of equally large free blocks, so the
// order of addresses decides what it reserves: they ascend, as those of a device, in a dry run as in a full one.
class Addresses {
 public:
  // The lowest free range that is large enough.
  char* take(size_t bytes) {
    for (auto [start, size] : gaps_) {
      if (size < bytes) continue;
      gaps_.erase(start);
      if (size > bytes) gaps_[start + bytes] = size - bytes;
      return start;
    }
    char* start = end_;
    end_ += bytes;
    return start;
  }

  void give_back(char* start, size_t bytes) {
    if (start < kFirst || start >= end_) return;  // not one of these: the kernel had it elsewhere
    auto after = gaps_.lower_bound(start);
    if (after != gaps_.end() && start + bytes == after->first) {
      bytes += after->second;
      after = gaps_.erase(after);
    }
    if (after != gaps_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == start) {
        before->second += bytes;
        return;
      }
    }
    gaps_[start] = bytes;
  }

 private:
  static inline char* const kFirst = reinterpret_cast<char*>(uint64_t{1} << 45);  // between the heap and libraries
  char* end_ = kFirst;
  std::map<char*, size_t> gaps_;
};

Addresses& addresses() {
  static auto& all = *new Addresses;
  return all;
}

size_t whole_pages(size_t bytes) { return (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage; }

// Memory of the host for a device. Its pages appear where they are touched: in a dry run few are.
int take(void** address, size_t bytes) {
  bytes = whole_pages(bytes);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (dry_limit() ? MAP_NORESERVE : 0);
  std::lock_guard<std::mutex> lock(mutex);
  char* wanted = addresses().take(bytes);
  *address = mmap(wanted, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (*address == wanted) return 0;
  addresses().give_back(wanted, bytes);
  return *address == MAP_FAILED;
}

void give_back(void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  munmap(address, whole_pages(bytes));
  addresses().give_back(static_cast<char*>(address), whole_pages(bytes));
}

// Whether a copy is one that a dry run leaves out.
bool left_out(size_t bytes) { return dry_limit() && bytes > static_cast<size_t>(dry_limit()); }

int allocate(void** address, size_t bytes) {
  *address = nullptr;
  int device = current_device();
  bytes = bytes ? bytes : kAlignment;
  if (!reserve(device, bytes)) return kOutOfMemory;
  if (take(address, bytes)) {
    release(device, bytes);
    return kOutOfMemory;
  }
  if (memcheck()) std::memset(*address, kNaN, bytes);
  std::lock_guard<std::mutex> lock(mutex);
  blocks[*address] = {device, bytes};
  return kOk;
}

// Shared pages, as they may get a second address.
int allocate_host(void** address, size_t bytes, bool same_address) {
  bytes = whole_pages(bytes);
  *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED) return kOutOfMemory;
  std::lock_guard<std::mutex> lock(mutex);
  host_blocks[static_cast<char*>(*address)] = {bytes, same_address};
  return kOk;
}

// The registered part at an address of the device, or null. The caller holds the mutex.
const Registered* find_registered(const void* address) {
  auto* byte = static_cast<char*>(const_cast<void*>(address));
  auto after = registered.upper_bound(byte);
  if (after == registered.begin()) return nullptr;
  auto& [start, part] = *--after;
  return byte < start + part.bytes ? &part : nullptr;
}

// Whether memory operations may have this address: not one that is the device's alone.
bool may_copy(const void* address) {
  if (!registered_bytes) return true;
  std::lock_guard<std::mutex> lock(mutex);
  const Registered* part = find_registered(address);
  return !part || part->same_address;
}

}  // namespace

bool in_host_memory(const void* address) {
  if (!registered_bytes) return false;
  std::lock_guard<std::mutex> lock(mutex);
  return find_registered(address);
}

}  // namespace sim

using namespace sim;

SIM_API int aclrtMalloc(void** address, size_t bytes, int /*policy*/) { return allocate(address, bytes); }
SIM_API int aclrtMallocAlign32(void** address, size_t bytes, int /*policy*/) { return allocate(address, bytes); }
SIM_API int aclrtFree(void* address) {
  Block block;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(address);
    if (found == blocks.end()) return kInvalidParameter;
    block = found->second;
    blocks.erase(found);
  }
  release(block.device, block.bytes);
  give_back(address, block.bytes);
  return kOk;
}

SIM_API int aclrtMallocHost(void** address, size_t bytes) { return allocate_host(address, bytes, false); }
SIM_API int aclrtMallocHostWithCfg(void** address, uint64_t bytes, Configuration* configuration) {
  bool same_address = false;
  for (size_t i = 0; configuration && i < configuration->count; ++i)
    if (configuration->attributes[i].kind == kVaFlag)
      same_address = configuration->attributes[i].value.same_address == 1;
  return allocate_host(address, bytes, same_address);
}
SIM_API int aclrtFreeHost(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = host_blocks.find(static_cast<char*>(address));
  if (found == host_blocks.end()) return kInvalidParameter;
  munmap(address, found->second.bytes);
  host_blocks.erase(found);
  return kOk;
}

// ---------------------------------------------------------------- host memory that a device uses

static auto registered_at(char* on_host) {
  return std::find_if(registered.begin(), registered.end(), [=](auto& e) { return e.second.on_host == on_host; });
}

// Only what aclrtMallocHost and aclrtMallocHostWithCfg gave out: other memory, which newer kernels of Linux
// allow, has no second address here.
SIM_API int aclrtHostRegister(void* address, uint64_t bytes, int type, void** on_device) {
  auto* start = static_cast<char*>(address);
  std::lock_guard<std::mutex> lock(mutex);
  auto found = host_blocks.upper_bound(start);
  if (type != kRegisterMapped || !bytes || reinterpret_cast<uintptr_t>(start) % kPage ||
      found == host_blocks.begin() || registered_at(start) != registered.end())
    return kInvalidParameter;
  auto& [first, block] = *--found;
  if (start + bytes > first + block.bytes) return kInvalidParameter;
  char* mapped_at = start;
  if (!block.same_address) {
    void* twin = mremap(start, 0, bytes, MREMAP_MAYMOVE);  // of size 0: the same pages, once more
    if (twin == MAP_FAILED) return kOutOfMemory;
    mapped_at = static_cast<char*>(twin);
  }
  registered[mapped_at] = {start, bytes, block.same_address};
  registered_bytes += bytes;
  *on_device = mapped_at;
  return kOk;
}
SIM_API int aclrtHostUnregister(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = registered_at(static_cast<char*>(address));
  if (found == registered.end()) return kInvalidParameter;
  if (!found->second.same_address) munmap(found->first, found->second.bytes);
  registered_bytes -= found->second.bytes;
  registered.erase(found);
  return kOk;
}
// Bytes of host memory that are registered now.
SIM_API size_t sim_registered() { return registered_bytes; }

SIM_API int aclrtGetMemInfo(int /*kind*/, size_t* available, size_t* total) {
  std::lock_guard<std::mutex> lock(mutex);
  *total = limit();
  *available = limit() - used[current_device()];
  return kOk;
}

// ---------------------------------------------------------------- expandable segments
// An address range without memory behind it, into which pieces of memory are mapped one by one.

SIM_API int aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
  *address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *address == MAP_FAILED ? kOutOfMemory : kOk;
}
// The size is not passed, so the (empty) range stays reserved until the process ends.
SIM_API int aclrtReleaseMemAddress(void* /*address*/) { return kOk; }
SIM_API int aclrtMallocPhysical(void** handle, size_t bytes, const void* /*properties*/, uint64_t /*flags*/) {
  if (!reserve(current_device(), bytes)) return kOutOfMemory;
  *handle = new Block{current_device(), bytes};
  return kOk;
}
SIM_API int aclrtFreePhysical(void* handle) {
  auto* block = static_cast<Block*>(handle);
  release(block->device, block->bytes);
  delete block;
  return kOk;
}
SIM_API int aclrtMapMem(void* address, size_t bytes, size_t /*offset*/, void* /*handle*/, uint64_t /*flags*/) {
  if (mprotect(address, bytes, PROT_READ | PROT_WRITE)) return kInvalidParameter;
  if (memcheck()) std::memset(address, kNaN, bytes);
  std::lock_guard<std::mutex> lock(mutex);
  mapped[address] = bytes;
  return kOk;
}
SIM_API int aclrtUnmapMem(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = mapped.find(address);
  if (found == mapped.end()) return kInvalidParameter;
  madvise(address, found->second, MADV_DONTNEED);
  mprotect(address, found->second, PROT_NONE);
  mapped.erase(found);
  return kOk;
}

// ---------------------------------------------------------------- copies

SIM_API int aclrtMemcpy(void* to, size_t capacity, const void* from, size_t bytes, int /*kind*/) {
  if (bytes > capacity || !may_copy(to) || !may_copy(from)) return kInvalidParameter;
  if (left_out(bytes)) return kOk;
  std::memmove(to, from, bytes);
  return kOk;
}
SIM_API int aclrtMemset(void* address, size_t capacity, int value, size_t bytes) {
  if (bytes > capacity || !may_copy(address)) return kInvalidParameter;
  if (left_out(bytes)) return kOk;
  std::memset(address, value, bytes);
  return kOk;
}
SIM_API int aclrtMemcpyAsync(void* to, size_t capacity, const void* from, size_t bytes, int, void* stream) {
  if (bytes > capacity || !may_copy(to) || !may_copy(from)) return kInvalidParameter;
  if (left_out(bytes)) return kOk;
  stream_of(stream).run_in_order([=] { std::memmove(to, from, bytes); });
  return kOk;
}
SIM_API int aclrtMemsetAsync(void* address, size_t capacity, int value, size_t bytes, void* stream) {
  if (bytes > capacity || !may_copy(address)) return kInvalidParameter;
  if (left_out(bytes)) return kOk;
  stream_of(stream).run_in_order([=] { std::memset(address, value, bytes); });
  return kOk;
}
