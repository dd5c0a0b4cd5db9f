// Return codes of the CANN runtime, as acl/acl_base.h documents them (ACL_ERROR_*, ACL_ERROR_RT_*).
#pragma once

namespace sim {

enum Code : int {
  kOk = 0,
  kInvalidParameter = 100000,
  kContextNull = 107002,
  kInvalidDevice = 107001,
  kFeatureNotSupported = 207000,
  kOutOfMemory = 207001,
  kStreamSyncTimeout = 507046,
  kEventSyncTimeout = 507047,
  kEventNotComplete = 107003,
  kDeviceFailed = 507000,  // ACL_ERROR_RT_INTERNAL_ERROR
};

}  // namespace sim
