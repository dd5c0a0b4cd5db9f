// How the ranks of a communicator that may be on several machines find each other, before they move data.
//
//   1. Rank 0 lets others connect to a place that its invitation names. Everybody tells it who it is and
//      where its own place is.
//   2. Rank 0 tells everybody who all are. If all are on one machine, the connections end here, and memory
//      is shared (hccl_segment.h).
//   3. Else every pair is connected, rank 0 by the connections that there are: a rank connects to those
//      below it (hccl_links.h goes on from here).
//
// A token that only the invitation has keeps others out.
#pragma once

#include <string>
#include <vector>

#include "hccl_host.h"
#include "hccl_socket.h"

namespace sim::hccl {

constexpr size_t kTokenBytes = 16;

// Identifies a process even after it is gone: the system gives its pid to a new one then.
struct Process {
  int32_t pid;
  uint64_t started;  // clock ticks since boot, /proc/<pid>/stat
};

// Where a rank is reached; port 0: nowhere.
struct Place {
  char address[kAddressBytes];
  uint16_t port;
};

// Who a rank is.
struct Peer {
  uint64_t host;
  char host_name[kHostNameBytes];
  int32_t global_rank;  // RANK as set by the launcher; -1 if it is not set
  Process process;
  Place place;
};

// What rank 0 has opened for the others, and how they enter.
struct Door {
  Place place;
  unsigned char token[kTokenBytes];
};

// Opens a door; false, and `problem` says why, if it cannot.
bool open_door(Door* door, std::string* problem);
// Closes it, if it is this process's.
void close_door(const Door& door);

struct Meeting {
  std::vector<Peer> peers;       // by rank
  std::vector<Socket> sockets;   // by rank, the own one invalid; none if all ranks are on one machine
  std::string problem;           // why there was none; else empty
};

// Meets the others as `rank` of `ranks`; `self` is completed with its place.
Meeting meet(const Door& door, uint32_t ranks, uint32_t rank, Peer self, std::chrono::seconds timeout);

}  // namespace sim::hccl
