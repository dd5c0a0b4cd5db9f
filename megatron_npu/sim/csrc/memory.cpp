// Device memory of the simulated CANN runtime: host memory with a limit per device.
#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "codes.h"
#include "runtime.h"

namespace sim {
namespace {

constexpr size_t kAlignment = 512;  // what aclrtMalloc guarantees
constexpr int kNaN = 0xff;          // all bits set is NaN in fp16, bf16, fp32 and fp64

struct Block {
  int device;
  size_t bytes;
};

std::mutex mutex;
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

int allocate(void** address, size_t bytes) {
  *address = nullptr;
  int device = current_device();
  bytes = bytes ? bytes : kAlignment;
  if (!reserve(device, bytes)) return kOutOfMemory;
  if (posix_memalign(address, kAlignment, bytes)) {
    release(device, bytes);
    return kOutOfMemory;
  }
  if (memcheck()) std::memset(*address, kNaN, bytes);
  std::lock_guard<std::mutex> lock(mutex);
  blocks[*address] = {device, bytes};
  return kOk;
}

int allocate_host(void** address, size_t bytes) {
  return posix_memalign(address, kAlignment, bytes ? bytes : kAlignment) ? kOutOfMemory : kOk;
}

}  // namespace
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
  std::free(address);
  return kOk;
}

SIM_API int aclrtMallocHost(void** address, size_t bytes) { return allocate_host(address, bytes); }
SIM_API int aclrtMallocHostWithCfg(void** address, uint64_t bytes, void* /*config*/) {
  return allocate_host(address, bytes);
}
SIM_API int aclrtFreeHost(void* address) {
  std::free(address);
  return kOk;
}

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
  if (bytes > capacity) return kInvalidParameter;
  std::memmove(to, from, bytes);
  return kOk;
}
SIM_API int aclrtMemset(void* address, size_t capacity, int value, size_t bytes) {
  if (bytes > capacity) return kInvalidParameter;
  std::memset(address, value, bytes);
  return kOk;
}
SIM_API int aclrtMemcpyAsync(void* to, size_t capacity, const void* from, size_t bytes, int, void* stream) {
  if (bytes > capacity) return kInvalidParameter;
  stream_of(stream).run_in_order([=] { std::memmove(to, from, bytes); });
  return kOk;
}
SIM_API int aclrtMemsetAsync(void* address, size_t capacity, int value, size_t bytes, void* stream) {
  if (bytes > capacity) return kInvalidParameter;
  stream_of(stream).run_in_order([=] { std::memset(address, value, bytes); });
  return kOk;
}
