// Devices, contexts and process-wide options of the simulated CANN runtime.
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "codes.h"
#include "runtime.h"

namespace sim {
namespace {

constexpr int kMostDevices = 64;
thread_local int device_of_thread = -1;
// One context per device; a context handle is the address of its entry.
int contexts[kMostDevices];

int device_count() {
  static const int count = std::min<int>(setting("devices", 8), kMostDevices);
  return count;
}

std::mutex options_mutex;
auto& options = *new std::map<int, int64_t>;

}  // namespace

int current_device() { return device_of_thread < 0 ? 0 : device_of_thread; }

}  // namespace sim

using namespace sim;

SIM_API int aclInit(const char* /*config*/) { return kOk; }
SIM_API int aclFinalize() { return kOk; }

// torch_npu chooses code paths by this name (attention, matmul, data types), so it must be a real one.
SIM_API const char* aclrtGetSocName() {
  static const std::string name = setting("soc", "Ascend910B2");
  return name.c_str();
}

SIM_API int aclrtGetDeviceCount(uint32_t* count) {
  *count = device_count();
  return kOk;
}
SIM_API int aclrtSetDevice(int device) {
  if (device < 0 || device >= device_count()) return kInvalidDevice;
  device_of_thread = device;
  return kOk;
}
SIM_API int aclrtResetDevice(int /*device*/) { return kOk; }
SIM_API int aclrtGetDevice(int* device) {
  if (device_of_thread < 0) return kContextNull;
  *device = device_of_thread;
  return kOk;
}
SIM_API int aclrtGetCurrentContext(void** context) {
  if (device_of_thread < 0) return kContextNull;
  *context = &contexts[device_of_thread];
  return kOk;
}
SIM_API int aclrtSetCurrentContext(void* context) {
  auto* entry = static_cast<int*>(context);
  if (entry < contexts || entry >= contexts + device_count()) return kInvalidParameter;
  device_of_thread = static_cast<int>(entry - contexts);
  return kOk;
}
SIM_API int aclrtGetPrimaryCtxState(int /*device*/, uint32_t* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return kOk;
}
SIM_API int aclrtGetLogicDevIdByUserDevId(int user, int* logic) {
  *logic = user;
  return kOk;
}
SIM_API int aclrtDeviceCanAccessPeer(int* can, int /*device*/, int /*peer*/) {
  *can = 1;
  return kOk;
}
SIM_API int aclrtDeviceGetBareTgid(int32_t* process) {
  *process = getpid();
  return kOk;
}
SIM_API int aclGetDeviceCapability(uint32_t /*device*/, int /*kind*/, int64_t* value) {
  if (value) *value = 0;
  return kOk;
}

SIM_API int aclrtGetLastError(int /*level*/) { return kOk; }
SIM_API int aclrtPeekAtLastError(int /*level*/) { return kOk; }
// Without a version torch_npu takes the oldest behaviour it knows.
SIM_API int aclsysGetCANNVersion(int /*package*/, void* /*version*/) { return kInvalidParameter; }
SIM_API int aclrtGetDeviceUtilizationRate(int /*device*/, void* /*rate*/) { return kOk; }

// Options are only kept: initialisation reads back what it has set and fails if that differs.
SIM_API int aclrtSetSysParamOpt(int option, int64_t value) {
  std::lock_guard<std::mutex> lock(options_mutex);
  options[option] = value;
  return kOk;
}
SIM_API int aclrtGetSysParamOpt(int option, int64_t* value) {
  std::lock_guard<std::mutex> lock(options_mutex);
  *value = options[option];
  return kOk;
}
SIM_API int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
SIM_API int aclrtCtxGetSysParamOpt(int option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }
SIM_API size_t aclGetCompileoptSize(int /*option*/) { return 256; }
SIM_API int aclGetCompileopt(int /*option*/, char* value, size_t length) {
  if (length) value[0] = 0;
  return kOk;
}
SIM_API int aclSetCompileopt(int /*option*/, const char* /*value*/) { return kOk; }

SIM_API int aclrtGetStreamOverflowSwitch(void* /*stream*/, uint32_t* flag) {
  *flag = 0;
  return kOk;
}

// Looked up by name; they rightly do nothing: time limits and saturation of kernels that do not
// exist, error dumps, and a host thread for callbacks that are never launched.
#define SIM_NO_EFFECT(name) \
  SIM_API int name() { return kOk; }
SIM_NO_EFFECT(aclrtSetDeviceSatMode)
SIM_NO_EFFECT(aclrtSetStreamFailureMode)
SIM_NO_EFFECT(aclrtSetStreamAttribute)
SIM_NO_EFFECT(aclrtSetStreamOverflowSwitch)
SIM_NO_EFFECT(aclrtSetOpWaitTimeout)
SIM_NO_EFFECT(aclrtSetOpExecuteTimeOut)
SIM_NO_EFFECT(aclrtSetOpExecuteTimeOutV2)
SIM_NO_EFFECT(aclrtDeviceTaskAbort)
SIM_NO_EFFECT(aclInitDump)
SIM_NO_EFFECT(aclrtSubscribeReport)
SIM_NO_EFFECT(aclrtUnSubscribeReport)
