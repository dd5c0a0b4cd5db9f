// Which machine this process is on, and where others reach it.
//
// Processes are on one machine if they see the same kernel and the same process numbers: only then does an
// invitation to shared memory mean something (hccl_segment.h).
#pragma once

#include <cstdint>
#include <string>

namespace sim::hccl {

constexpr size_t kHostNameBytes = 64;
constexpr size_t kAddressBytes = 46;  // of an IPv6 address as text

// A number for this machine; the setting "host" may stand for another.
uint64_t host_id();

// Whether ranks may be on several machines: the launcher says so, or the setting "host" is used.
bool spans_hosts();

// The name of this machine.
std::string host_name();

// The address at which other machines reach this one: HCCL_IF_IP, else the one from which the way to
// MASTER_ADDR begins, else the loopback's.
std::string own_address();

}  // namespace sim::hccl
