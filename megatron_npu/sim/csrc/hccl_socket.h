// A TCP connection, or the place where others connect. Children of this process do not keep it: a fork that
// outlived the process would hide its end from the peers.
#pragma once

#include <chrono>
#include <string>
#include <utility>

namespace sim::hccl {

using Deadline = std::chrono::steady_clock::time_point;

class Socket {
 public:
  Socket() = default;
  ~Socket();
  Socket(Socket&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;

  // Lets others connect at a free port of an address, which `port` then is. Invalid, with errno, if not.
  static Socket listening(const std::string& address, uint16_t* port);
  // Connects; invalid, with errno, if nobody answers in time.
  static Socket connected(const std::string& address, uint16_t port, Deadline deadline);
  // The next connection to this place; invalid if there is none in time.
  Socket accept(Deadline deadline);

  // All of it or false, with errno; 0 there: the other side has closed.
  bool send(const void* data, size_t bytes, Deadline deadline);
  bool receive(void* data, size_t bytes, Deadline deadline);

  bool valid() const { return file_ >= 0; }
  int file() const { return file_; }

 private:
  explicit Socket(int file);
  int file_ = -1;  // never blocks
};

}  // namespace sim::hccl
